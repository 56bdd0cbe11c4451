"""Tiles of a product whose operands FP8 does not hold everywhere, computed anew from BF16 operands.

Mostly there are none: so few programs look at the notes of both operands, and go. Else they share the tiles, look for
flags in the rows and columns of each, and compute those that have one along the whole contraction, in one order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import APART, Fp8, Shift, spaced
from fp4dse.kernels.ops.fp8.shifting import MANTISSA, higher, unshifted
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import SEGMENT, Finish
from fp4dse.kernels.ops.products.triton import Tiles, constants_of, finish_tile

_SEGMENT, _APART = tl.constexpr(SEGMENT), tl.constexpr(APART)
_NOTES = tl.constexpr(8192)
_AT_A_TIME = tl.constexpr(32)
TILES, PROGRAMS = Tiles(64, 128, 64, 4, 2), 264
"""Of the result, of few rows, since a row of small gradients has flags and its neighbours have none; and programs a
lane at most."""


@triton.jit
def _any_note(ptr, lane, count):
    """The largest of a lane's notes."""
    found = tl.full((_NOTES,), 0, tl.int32)
    for start in range(0, count, _NOTES):
        at = start + tl.arange(0, _NOTES)
        found = tl.maximum(found, tl.load(ptr + lane * count + at, at < count, 0))
    return tl.reduce(found, 0, higher)


@triton.jit
def _any_flag(ptr, lane, line, lines, segments):
    """The largest flag of some lines of an operand."""
    found = tl.full((line.shape[0], _AT_A_TIME), 0, tl.int32)
    for start in range(0, segments, _AT_A_TIME):
        number = start + tl.arange(0, _AT_A_TIME)
        at = (lane * lines + line)[:, None] * segments + number[None, :]
        flags = tl.load(ptr + at, (line < lines)[:, None] & (number < segments)[None, :], 0)
        found = tl.maximum(found, flags.to(tl.int32))
    return tl.reduce(tl.reduce(found, 1, higher), 0, higher)


@triton.jit
def _exact(ptr, flags_ptr, wide_ptr, power_ptr, lane, line, lines, number, along, length, MANTISSA: tl.constexpr):
    """Lines of an operand in BF16, a part of the segment of this number."""
    at = (lane * lines + line)[:, None] * length + along[None, :]
    inside = (line < lines)[:, None] & (along < length)[None, :]
    exact = unshifted(tl.load(ptr + at, inside, 0), MANTISSA)
    if flags_ptr is not None:
        segments = (length + _SEGMENT - 1) // _SEGMENT
        flags = tl.load(flags_ptr + (lane * lines + line) * segments + number, line < lines, 0)
        is_wide = (flags > 0)[:, None]
        wide = tl.load(wide_ptr + at, is_wide & inside, 0.0).to(tl.float32)
        exact = tl.where(is_wide, wide, exact * tl.load(power_ptr + lane * _APART))
    return exact.to(tl.bfloat16)


@triton.jit
def _wide_kernel(
    a_ptr,
    b_ptr,
    power_a_ptr,
    flags_a_ptr,
    notes_a_ptr,
    wide_a_ptr,
    power_b_ptr,
    flags_b_ptr,
    notes_b_ptr,
    wide_b_ptr,
    out_ptr,
    factor_a_ptr,
    factor_b_ptr,
    bias_ptr,
    rows,
    columns,
    length,
    out_lane,
    notes_a,
    notes_b,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
    MANTISSA_A: tl.constexpr,
    MANTISSA_B: tl.constexpr,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Tiles of a lane, as many apart as there are programs, finished as by `finish_tile`. Of operands that are held
    everywhere, pointers are None. out_lane: numbers from a lane of the result to the next."""
    lane, segments = tl.program_id(1).to(tl.int64), (length + _SEGMENT - 1) // _SEGMENT
    down, across = (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
    noted = 0
    if flags_a_ptr is not None:
        noted += _any_note(notes_a_ptr, lane, notes_a)
    if flags_b_ptr is not None:
        noted += _any_note(notes_b_ptr, lane, notes_b)
    tiles = tl.where(noted > 0, down * across, 0)
    for number in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row0, column0 = number // across * ROWS, number % across * COLUMNS
        row, column = row0 + tl.arange(0, ROWS), column0 + tl.arange(0, COLUMNS)
        flagged = 0
        if flags_a_ptr is not None:
            flagged += _any_flag(flags_a_ptr, lane, row, rows, segments)
        if flags_b_ptr is not None:
            flagged += _any_flag(flags_b_ptr, lane, column, columns, segments)
        if flagged > 0:
            out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
            for segment in range(segments):
                for start in range(segment * _SEGMENT, (segment + 1) * _SEGMENT, ALONG):
                    along = start + tl.arange(0, ALONG)
                    of_a = a_ptr, flags_a_ptr, wide_a_ptr, power_a_ptr, lane, row, rows
                    of_b = b_ptr, flags_b_ptr, wide_b_ptr, power_b_ptr, lane, column, columns
                    x = _exact(*of_a, segment, along, length, MANTISSA_A)
                    y = _exact(*of_b, segment, along, length, MANTISSA_B)
                    out = tl.dot(x, tl.trans(y), out)
            place = lane, row, rows, column, columns
            out = finish_tile(out, factor_a_ptr, factor_b_ptr, bias_ptr, *place, OF_A, OF_B, BIAS)
            at = lane * out_lane + row.to(tl.int64)[:, None] * columns + column[None, :]
            inside = (row < rows)[:, None] & (column < columns)[None, :]
            tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)


def widen(out: Tensor, a: Fp8, b: Fp8, finish: Finish) -> Tensor:
    """A finished product [L, R, S], each lane in one piece, with the tiles that need it computed anew; arguments as in
    `fp8.multiply`."""
    if a.shift is None and b.shift is None:
        return out
    lanes, rows, columns = out.shape
    values = [of.values.contiguous() for of in (a, b)]
    factors, constants = constants_of(finish, out, TILES)
    constants |= {f"MANTISSA_{name}": MANTISSA[of.dtype] for name, of in zip("AB", values, strict=True)}
    tiles = triton.cdiv(rows, TILES.rows) * triton.cdiv(columns, TILES.columns)
    notes = (0 if of.shift is None else of.shift.notes.shape[1] for of in (a, b))
    sizes = rows, columns, values[0].shape[2], out.stride(0), *notes
    codes = (of.view(torch.uint8) for of in values)
    pointers = *codes, *_pointers(a.shift), *_pointers(b.shift)
    _wide_kernel[launch_grid(min(tiles, PROGRAMS), lanes)](*pointers, out, *factors, *sizes, **constants)
    return out


def _pointers(shift: Shift | None) -> list[Tensor | None]:
    """A shift as the kernel takes it."""
    return [None] * 4 if shift is None else [spaced(shift.power), *(t.contiguous() for t in shift[1:])]
