"""FP8 operands made and multiplied on a GPU.

A product's program has one tile of the result, 128 numbers of the contraction at a time: their sum is the FP8 unit's,
and is added in FP32. Both operands lie along the contraction, as the units of sm_90 want them. What is large is
cuBLAS's (library.py). Tiles with numbers that FP8 does not hold are computed anew (wide.py).

Long contractions of results of few tiles are cut in parts, which follow from the shape and are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import Fp8, Shift, empty, library, segments_of
from fp4dse.kernels.ops.fp8.shifting import MANTISSA, higher, shifted
from fp4dse.kernels.ops.fp8.wide import widen
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import ALIGNED, AS_IT_IS, SEGMENT, Finish, finished
from fp4dse.kernels.ops.products.triton import GROUP, Tiles, constants_of, description, finish_tile, has_copy_engine
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.triton.numbers import as_int

_SEGMENT = tl.constexpr(SEGMENT)
_MADE = {"ROWS": 32, "num_warps": 4, "enable_fp_fusion": False}
"""Rows of a program that makes FP8 of 128 numbers of each."""
TILES, FULL = Tiles(128, 128, SEGMENT, 8, 4), 132
"""Tiles of a product at most; and programs that fill a GPU: results of fewer tiles are cut along the contraction."""
PART = 1024
"""At least so many numbers of the contraction are in a part."""


@triton.jit
def _split_kernel(
    x_ptr,
    values_ptr,
    flags_ptr,
    notes_ptr,
    wide_ptr,
    power_ptr,
    rows,
    length,
    x_lane,
    x_row,
    x_along,
    MANTISSA: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of one segment."""
    segments, lane = (length + _SEGMENT - 1) // _SEGMENT, tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) % segments
    row = (tl.program_id(0) // segments).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    along = number * _SEGMENT + tl.arange(0, _SEGMENT)
    inside = (row < rows)[:, None] & (along < length)[None, :]
    x = tl.load(x_ptr + lane * x_lane + row[:, None] * x_row + along.to(tl.int64)[None, :] * x_along, inside, 0.0)
    codes, flags = shifted(x.to(tl.float32), as_int(tl.load(power_ptr + lane)) >> 23, MANTISSA)
    at = (lane * rows + row)[:, None] * length + along[None, :]
    tl.store(values_ptr + at, codes.to(tl.uint8), inside)
    tl.store(wide_ptr + at, x.to(tl.bfloat16), inside & (flags > 0)[:, None])
    tl.store(flags_ptr + (lane * rows + row) * segments + number, flags.to(tl.uint8), row < rows)
    tl.store(notes_ptr + lane * tl.num_programs(0) + tl.program_id(0), tl.reduce(flags, 0, higher))


@triton.jit
def _loaded(x, lane, line0, lines, start, length, LINES: tl.constexpr, DESCRIBED: tl.constexpr):
    """LINES lines of a segment of a lane, FP8 [LINES, 128]."""
    if DESCRIBED:
        tile = x.load([(lane * lines + line0).to(tl.int32), start])
    else:
        line = line0 + tl.arange(0, LINES)
        along = start + tl.arange(0, _SEGMENT)
        at = (lane * lines + line)[:, None] * length + along[None, :]
        tile = tl.load(x + at, (line < lines)[:, None] & (along < length)[None, :], 0.0)
    return tile


@triton.jit
def _product_kernel(
    a,
    b,
    power_a_ptr,
    power_b_ptr,
    segment_a_ptr,
    segment_b_ptr,
    out_ptr,
    factor_a_ptr,
    factor_b_ptr,
    bias_ptr,
    count_ptr,
    rows,
    columns,
    length,
    part,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
    GROUP: tl.constexpr,
    DESCRIBED: tl.constexpr,
    FILLED: tl.constexpr,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One tile of `part` segments, finished if these are all. FILLED: 1 where `count` is of rows, 2 where it is of
    numbers along the contraction, 0 where there is none. ALONG: 128. Of powers, and of factors of segments, pointers
    are None where an operand has none."""
    tl.static_assert(ALONG == _SEGMENT)
    lane, down, across = tl.program_id(1).to(tl.int64), (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height, place = tl.minimum(down - first, GROUP), tl.program_id(0) % (GROUP * across)
    row0, column0 = (first + place % height) * ROWS, place // height * COLUMNS
    row, column = row0 + tl.arange(0, ROWS), column0 + tl.arange(0, COLUMNS)
    segments = (length + _SEGMENT - 1) // _SEGMENT
    begin = tl.program_id(2) * part
    end = tl.minimum(begin + part, segments)
    if FILLED == 1:
        end = tl.where(row0 < tl.load(count_ptr + lane), end, begin)
    elif FILLED == 2:
        end = tl.minimum(end, (tl.load(count_ptr + lane).to(tl.int32) + _SEGMENT - 1) // _SEGMENT)
    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for number in range(begin, end):
        x = _loaded(a, lane, row0, rows, number * _SEGMENT, length, ROWS, DESCRIBED)
        y = _loaded(b, lane, column0, columns, number * _SEGMENT, length, COLUMNS, DESCRIBED)
        # the unit adds 128 numbers and no more: on sm_90 Triton's default would have it add 2^30, and none elsewhere
        sums = tl.dot(x, tl.trans(y))
        if segment_a_ptr is not None:
            sums = sums * tl.load(segment_a_ptr + (lane * segments + number) * rows + row, row < rows, 0.0)[:, None]
        if segment_b_ptr is not None:
            at_b = (lane * segments + number) * columns + column
            sums = sums * tl.load(segment_b_ptr + at_b, column < columns, 0.0)[None, :]
        out = out + sums
    if power_a_ptr is not None:
        out = out * tl.load(power_a_ptr + lane)
    if power_b_ptr is not None:
        out = out * tl.load(power_b_ptr + lane)
    out = finish_tile(out, factor_a_ptr, factor_b_ptr, bias_ptr, lane, row, rows, column, columns, OF_A, OF_B, BIAS)
    at = ((lane * tl.num_programs(2) + tl.program_id(2)) * rows + row)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), (row < rows)[:, None] & (column < columns)[None, :])


def split(x: Tensor, dtype: torch.dtype, power: Tensor) -> tuple[Tensor, Shift]:
    """`fp8.split`."""
    lanes, rows, length = x.shape
    programs = triton.cdiv(rows, _MADE["ROWS"]) * segments_of(length)
    values, shift = empty(x, x.shape, dtype, programs)
    outputs = values.view(torch.uint8), shift.flags, shift.notes, shift.wide
    sizes = rows, length, *x.stride()
    _split_kernel[launch_grid(programs, lanes)](x, *outputs, power, *sizes, MANTISSA=MANTISSA[dtype], **_MADE)
    return values, shift._replace(power=power)


def multiply(
    a: Fp8, b: Fp8, finish: Finish = AS_IT_IS, count: Tensor | None = None, contracted: bool = False
) -> Tensor:
    """`fp8.multiply`."""
    if count is None and library.why_not(a, b, finish) is None:
        out = library.multiply(a, b, finish)
    else:
        tiles = tiles_of(a.values.shape[1], b.values.shape[1])
        out = multiply_in_tiles(a, b, finish, tiles, count, contracted)
    return widen(out, a, b, finish, count, contracted)


def tiles_of(rows: int, columns: int) -> Tiles:
    """Tiles of a product whose result has so many rows and columns."""
    sizes = (min(max(triton.next_power_of_2(n), 64), most) for n, most in zip((rows, columns), TILES[:2], strict=True))
    tile, other = sizes
    return TILES._replace(rows=tile, columns=other, warps=TILES.warps if tile * other > 2**13 else 4)


def multiply_in_tiles(
    a: Fp8, b: Fp8, finish: Finish, tiles: Tiles, count: Tensor | None = None, contracted: bool = False
) -> Tensor:
    """The product in these tiles, without what is wide."""
    (lanes, rows, length), columns = a.values.shape, b.values.shape[1]
    x, y = a.values.contiguous(), b.values.contiguous()
    number, segments = triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns), segments_of(length)
    part = part_of(segments, number)
    parts = max(1, triton.cdiv(segments, part))
    within = finish if parts == 1 else AS_IT_IS
    out = x.new_empty(lanes, parts, rows, columns, dtype=within.dtype)
    factors, constants = constants_of(within, out, tiles)
    described = has_copy_engine(x.device) and length > 0 and length % ALIGNED == 0
    operands = [description(t, n, SEGMENT) if described else t for t, n in ((x, tiles.rows), (y, tiles.columns))]
    powers = [None if of.shift is None else of.shift.power for of in (a, b)]
    of_segments = [None if of.factor is None else of.factor.mT.contiguous() for of in (a, b)]
    kinds: dict[str, Any] = {"DESCRIBED": described, "GROUP": GROUP, "FILLED": 0 if count is None else 1 + contracted}
    programs = launch_grid(number, lanes, parts)
    sizes = rows, columns, length, part
    inputs = *operands, *powers, *of_segments
    _product_kernel[programs](*inputs, out, *factors, out if count is None else count, *sizes, **kinds, **constants)
    product = out[:, 0] if parts == 1 else lane_sum(out.view(lanes, parts, -1), 1).view(lanes, rows, columns)
    return product if within is finish else finished(product, finish)


def part_of(segments: int, tiles: int) -> int:
    """Segments that a program takes of a product whose result has so many tiles."""
    parts = max(1, min(FULL // tiles, segments * SEGMENT // PART))
    return max(1, triton.cdiv(segments, parts))
