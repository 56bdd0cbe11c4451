"""Tiles of a product whose operands FP8 does not hold everywhere: the rest, multiplied in BF16.

Mostly there is nothing: so few programs look at the notes of both operands, and go. Else they share the tiles, look for
flags in the rows and columns of many at a time, and then, of those that have some, for where they are.

    products that are the result, rounded    only the segments with a flag are multiplied, of which FP8 had zeros, and
                                             added to what is there: a few of many. In BF16 that is rounded once more
    those with factors or a bias, or of      tiles with a flag are computed anew along the whole contraction
    elements that are FP8 themselves
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import APART, Fp8, Shift, spaced
from fp4dse.kernels.ops.fp8.shifting import MANTISSA, either, higher, numbers_of_codes
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import SEGMENT, Finish
from fp4dse.kernels.ops.products.triton import Tiles, constants_of, finish_tile
from fp4dse.kernels.ops.sums.trees import plus

_SEGMENT, _APART = tl.constexpr(SEGMENT), tl.constexpr(APART)
_NOTES = tl.constexpr(2048)
"""Notes, or words of four, that are read at a time."""
_AT_A_TIME = tl.constexpr(32)
"""Segments whose flags are the bits of a number."""
_TILES_AT_A_TIME, _WORDS = tl.constexpr(16), tl.constexpr(512)
"""Tiles of a program that are looked at together, and words of four flags of each that are read at a time."""
TILES, PROGRAMS, REGISTERS = Tiles(64, 64, 64, 8, 2), 264, 128
"""Of the result, small ones, since a row of small gradients has flags and its neighbours have none; programs a lane at
most, and registers of a thread, so that all of these run at a time: most only find that there is nothing to do."""


@triton.jit
def _noted(a_ptr, b_ptr, lane, count_a, count_b):
    """Notes of a lane, as many as were found, of each operand: read side by side, since most programs do no more."""
    found_a, found_b = tl.full((_NOTES,), 0, tl.int32), tl.full((_NOTES,), 0, tl.int32)
    for start in range(0, tl.maximum(count_a, count_b), _NOTES):
        at = start + tl.arange(0, _NOTES)
        if a_ptr is not None:
            found_a |= tl.load(a_ptr + lane * count_a + at, at < count_a, 0).to(tl.int32)
        if b_ptr is not None:
            found_b |= tl.load(b_ptr + lane * count_b + at, at < count_b, 0).to(tl.int32)
    both = tl.reduce((found_a != 0).to(tl.int32) | (found_b != 0).to(tl.int32) << 16, 0, plus)
    return both & 0xFFFF, both >> 16


@triton.jit
def _any_of(ptr, noted, lane, begin, lines, segments, LINES: tl.constexpr):
    """1 where an operand has a flag in its LINES lines from `begin` on, int32 [n], else 0; they may lie beyond all.
    noted: 0 if none of the lane has one."""
    found = tl.full((begin.shape[0], _WORDS), 0, tl.int32)
    if noted > 0:
        words = tl.minimum(LINES, lines - begin) * segments // 4
        for start in range(0, LINES * segments // 4, _WORDS):
            at = start + tl.arange(0, _WORDS)[None, :]
            of_line = (lane * lines + begin)[:, None] * segments // 4
            found |= tl.load(ptr.to(tl.pointer_type(tl.int32)) + of_line + at, at < words[:, None], 0)
    return (tl.reduce(found, 1, either) != 0).to(tl.int32)


@triton.jit
def _flagged(ptr, noted, lane, line, lines, start, segments):
    """The segments from `start` on that have a flag in some lines of an operand, a bit each, int32. noted: 0 if none
    of the lane has one."""
    bits = tl.full((), 0, tl.int32)
    if noted > 0:
        place = tl.arange(0, _AT_A_TIME)
        at = (lane * lines + line)[:, None] * segments + (start + place)[None, :]
        flags = tl.load(ptr + at, (line < lines)[:, None] & (start + place < segments)[None, :], 0)
        bits = tl.reduce(tl.reduce(flags.to(tl.int32), 0, higher) << place, 0, either)
    return bits


@triton.jit
def _held(ptr, power_ptr, lane, line, lines, along, length, MANTISSA: tl.constexpr):
    """Some lines of an operand as FP8 has them, float32: zeros where there is a flag."""
    at = (lane * lines + line)[:, None] * length + along[None, :]
    codes = tl.load(ptr + at, (line < lines)[:, None] & (along < length)[None, :], 0)
    x = numbers_of_codes(codes, MANTISSA)
    if power_ptr is not None:
        x = x * tl.load(power_ptr + lane * _APART)
    return x


@triton.jit
def _wide(flags_ptr, wide_ptr, lane, line, lines, segment, along, length):
    """Some lines of an operand as BF16 has them, a part of a segment: float32, zeros elsewhere; and where that is."""
    segments = (length + _SEGMENT - 1) // _SEGMENT
    flags = tl.load(flags_ptr + (lane * lines + line) * segments + segment, line < lines, 0)
    is_wide = (flags > 0)[:, None] & (along < length)[None, :]
    x = tl.load(wide_ptr + (lane * lines + line)[:, None] * length + along[None, :], is_wide, 0.0)
    return x.to(tl.float32), is_wide


@triton.jit
def _exact(ptr, power_ptr, flags_ptr, wide_ptr, lane, line, lines, segment, along, length, MANTISSA: tl.constexpr):
    """Some lines of an operand in BF16, a part of a segment."""
    x = _held(ptr, power_ptr, lane, line, lines, along, length, MANTISSA)
    if flags_ptr is not None:
        wide, is_wide = _wide(flags_ptr, wide_ptr, lane, line, lines, segment, along, length)
        x = tl.where(is_wide, wide, x)
    return x.to(tl.bfloat16)


@triton.jit
def _of_flagged(a, b, tile, noted, sizes, ALONG: tl.constexpr, MANTISSA_A: tl.constexpr, MANTISSA_B: tl.constexpr):
    """A tile's products of what is wide in either operand, float32. a, b: values, power, flags and wide of each; tile:
    lane, rows and columns; noted: as in `_flagged`, of each; sizes: rows, columns and contraction of the product."""
    lane, row, column = tile
    rows, columns, length = sizes
    segments = (length + _SEGMENT - 1) // _SEGMENT
    out = tl.full((row.shape[0], column.shape[0]), 0.0, tl.float32)
    for first in range(0, segments, _AT_A_TIME):
        in_a, in_b = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        if a[2] is not None:
            in_a = _flagged(a[2], noted[0], lane, row, rows, first, segments)
        if b[2] is not None:
            in_b = _flagged(b[2], noted[1], lane, column, columns, first, segments)
        for place in range(tl.where((in_a | in_b) != 0, _AT_A_TIME, 0)):
            segment = first + place
            if (in_a >> place & 1) > 0:
                for start in range(segment * _SEGMENT, (segment + 1) * _SEGMENT, ALONG):
                    along = start + tl.arange(0, ALONG)
                    x = _wide(a[2], a[3], lane, row, rows, segment, along, length)[0]
                    y = _exact(*b, lane, column, columns, segment, along, length, MANTISSA_B)
                    out = tl.dot(x.to(tl.bfloat16), tl.trans(y), out)
            if (in_b >> place & 1) > 0:
                for start in range(segment * _SEGMENT, (segment + 1) * _SEGMENT, ALONG):
                    along = start + tl.arange(0, ALONG)
                    x = _held(a[0], a[1], lane, row, rows, along, length, MANTISSA_A)
                    y = _wide(b[2], b[3], lane, column, columns, segment, along, length)[0]
                    out = tl.dot(x.to(tl.bfloat16), tl.trans(y.to(tl.bfloat16)), out)
    return out


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
    ADDED: tl.constexpr,
):
    """Tiles of a lane, as many apart as there are programs, finished as by `finish_tile`. Of operands that are held
    everywhere, pointers are None. out_lane: numbers from a lane of the result to the next. ADDED: segments with a flag
    are added to the result, else tiles with a flag are computed anew."""
    lane, segments = tl.program_id(1).to(tl.int64), (length + _SEGMENT - 1) // _SEGMENT
    down, across = (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
    noted = _noted(notes_a_ptr, notes_b_ptr, lane, notes_a, notes_b)
    tiles = tl.where(noted[0] + noted[1] > 0, down * across, 0)
    apart, together = tl.num_programs(0), tl.arange(0, _TILES_AT_A_TIME)
    for first in range(tl.program_id(0), tiles, apart * _TILES_AT_A_TIME):
        tile = first + together * apart
        found = tl.full((_TILES_AT_A_TIME,), 0, tl.int32)
        if flags_a_ptr is not None:
            begin = tl.where(tile < tiles, tile // across * ROWS, rows)
            found |= _any_of(flags_a_ptr, noted[0], lane, begin, rows, segments, ROWS)
        if flags_b_ptr is not None:
            begin = tl.where(tile < tiles, tile % across * COLUMNS, columns)
            found |= _any_of(flags_b_ptr, noted[1], lane, begin, columns, segments, COLUMNS)
        of_tiles = tl.reduce(found << together, 0, either)
        for n in range(tl.where(of_tiles != 0, _TILES_AT_A_TIME, 0)):
            if (of_tiles >> n & 1) > 0:
                number = first + n * apart
                row = number // across * ROWS + tl.arange(0, ROWS)
                column = number % across * COLUMNS + tl.arange(0, COLUMNS)
                a = a_ptr, power_a_ptr, flags_a_ptr, wide_a_ptr
                b = b_ptr, power_b_ptr, flags_b_ptr, wide_b_ptr
                if ADDED:
                    of_tile, sizes = (lane, row, column), (rows, columns, length)
                    out = _of_flagged(a, b, of_tile, noted, sizes, ALONG, MANTISSA_A, MANTISSA_B)
                else:
                    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
                    for start in range(0, length, ALONG):
                        along, segment = start + tl.arange(0, ALONG), start // _SEGMENT
                        x = _exact(*a, lane, row, rows, segment, along, length, MANTISSA_A)
                        y = _exact(*b, lane, column, columns, segment, along, length, MANTISSA_B)
                        out = tl.dot(x, tl.trans(y), out)
                place_of = lane, row, rows, column, columns
                out = finish_tile(out, factor_a_ptr, factor_b_ptr, bias_ptr, *place_of, OF_A, OF_B, BIAS)
                at = lane * out_lane + row.to(tl.int64)[:, None] * columns + column[None, :]
                inside = (row < rows)[:, None] & (column < columns)[None, :]
                if ADDED:
                    out += tl.load(out_ptr + at, inside, 0.0).to(tl.float32)
                tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), inside)


def widen(out: Tensor, a: Fp8, b: Fp8, finish: Finish) -> Tensor:
    """A finished product [L, R, S] of what FP8 holds, each lane in one piece, made that of the whole operands; other
    arguments as in `fp8.multiply`."""
    if a.shift is None and b.shift is None:
        return out
    lanes, rows, columns = out.shape
    values = [of.values.contiguous() for of in (a, b)]
    factors, constants = constants_of(finish, out, TILES)
    constants |= {f"MANTISSA_{name}": MANTISSA[of.dtype] for name, of in zip("AB", values, strict=True)}
    # elements that are FP8 themselves may be infinite, and what met zeros in the place of a segment is NaN
    is_finite = a.shift is not None and b.shift is not None
    constants["ADDED"] = is_finite and finish.is_of_dtype_alone
    tiles = triton.cdiv(rows, TILES.rows) * triton.cdiv(columns, TILES.columns)
    codes = (of.view(torch.uint8) for of in values)
    shifts = [_pointers(of.shift) for of in (a, b)]
    notes = (0 if pointers[2] is None else pointers[2].shape[1] for pointers in shifts)
    sizes = rows, columns, values[0].shape[2], out.stride(0), *notes
    pointers = *codes, *shifts[0], *shifts[1]
    _wide_kernel[launch_grid(min(tiles, PROGRAMS), lanes)](
        *pointers, out, *factors, *sizes, **constants, maxnreg=REGISTERS
    )
    return out


def _pointers(shift: Shift | None) -> list[Tensor | None]:
    """A shift as the kernel takes it: notes four at a time where that is possible."""
    if shift is None:
        return [None] * 4
    flags, notes, wide = (t.contiguous() for t in shift[1:])
    whole = not (notes.shape[1] % 4 or notes.data_ptr() % 4)
    return [spaced(shift.power), flags, notes.view(torch.int32) if whole else notes, wide]
