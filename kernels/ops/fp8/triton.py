"""FP8 operands made and multiplied on a GPU.

A product's program has one tile of the result, 128 numbers of the contraction at a time: their sum is the FP8 unit's,
and is scaled and added in FP32. Both operands lie along the contraction, as the units of sm_90 want them. What FP8 does
not hold is added by a second loop, which programs without any skip: the first one only notes that there is some.

Long contractions of results of few tiles are cut in parts, which follow from the shape and are added in a fixed order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import BIAS, CARRY, E5M2, MOST, TOPS, Fp8, Shift, empty, segments_of
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import ALIGNED, AS_IT_IS, SEGMENT, Finish, finished
from fp4dse.kernels.ops.products.triton import GROUP, Tiles, constants_of, description, finish_tile, has_copy_engine
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.triton.numbers import as_float, as_int, unknown, upward

_SEGMENT, _CARRY = tl.constexpr(SEGMENT), tl.constexpr(CARRY)
_LEAST, _MOST = tl.constexpr(BIAS - MOST), tl.constexpr(BIAS + MOST)
MANTISSA = {dtype: 2 if dtype == E5M2 else 3 for dtype in TOPS}
_MADE = {"ROWS": 32, "num_warps": 4, "enable_fp_fusion": False}
"""Rows of a program that makes FP8 of 128 numbers of each."""
TILES, FULL = Tiles(128, 128, SEGMENT, 8, 4), 132
"""Tiles of a product at most; and programs that fill a GPU: results of fewer tiles are cut along the contraction."""
PART = 1024
"""At least so many numbers of the contraction are in a part."""
NONE, POWERS, FACTORS = range(3)
"""Kinds of numbers of segments."""


@triton.jit
def higher(a, b):
    """The larger of two integers. Tests: a twin that the interpreter is quick at."""
    return tl.maximum(a, b)


@triton.jit
def exponent_of(top, MANTISSA: tl.constexpr):
    """The biased exponents of the powers of segments whose largest numbers have these bits; and whether these fit."""
    TOP: tl.constexpr = 15 if MANTISSA == 2 else 8
    LIMIT: tl.constexpr = (_MOST + TOP << 23) + 0x600000  # bits of the largest number that a power brings to FP8
    return tl.minimum(tl.maximum((top + _CARRY >> 23) - TOP, _LEAST), _MOST), top <= LIMIT


@triton.jit
def shifted(x, MANTISSA: tl.constexpr):
    """Segments x, float32 [n, 128], as codes of FP8, int32, and powers, float32 [n]; zeros both where not held.

    Scaled so that FP8's subnormal numbers are float32's, codes are the upper bits, and what is not held has others.
    """
    UNIT: tl.constexpr = 2.0**-112 if MANTISSA == 2 else 2.0**-120
    LOWER: tl.constexpr = (1 << 23 - MANTISSA) - 1
    magnitude = as_int(x) & 0x7FFFFFFF
    exponent, fits = exponent_of(tl.reduce(magnitude, 1, higher), MANTISSA)
    scaled = as_int(upward(upward(as_float(magnitude), as_float(254 - exponent << 23)[:, None]), UNIT))
    held = (tl.reduce(scaled & LOWER, 1, higher) == 0) & fits
    codes = scaled >> 23 - MANTISSA | (as_int(x) >> 24 & 0x80)
    return tl.where(held[:, None], codes, 0), tl.where(held, as_float(exponent << 23), 0.0)


@triton.jit
def _decoded(x, MANTISSA: tl.constexpr):
    """Codes of FP8, uint8, as float32."""
    code = x.to(tl.int32)
    UNIT: tl.constexpr = 2.0**112 if MANTISSA == 2 else 2.0**120
    return as_float(code << 24 & -0x80000000 | (code & 0x7F) << 23 - MANTISSA) * UNIT


@triton.jit
def _made_kernel(
    x_ptr,
    values_ptr,
    powers_ptr,
    wide_ptr,
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
    codes, powers = shifted(x.to(tl.float32), MANTISSA)
    at = (lane * rows + row)[:, None] * length + along[None, :]
    tl.store(values_ptr + at, codes.to(tl.uint8), inside)
    tl.store(wide_ptr + at, x.to(tl.bfloat16), inside & (powers == 0)[:, None])
    tl.store(powers_ptr + (lane * segments + number) * rows + row, powers, row < rows)


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
def _numbers(ptr, lane, line, lines, number, segments):
    """The powers or factors of a segment's lines, 1 beyond the last."""
    return tl.load(ptr + (lane * segments + number) * lines + line, line < lines, 1.0)


@triton.jit
def _wide(ptr, powers, wide_ptr, lane, line, lines, along, length, MANTISSA: tl.constexpr, KIND: tl.constexpr):
    """Lines of an operand in BF16, with powers, a part of a segment."""
    at = (lane * lines + line)[:, None] * length + along[None, :]
    inside = (line < lines)[:, None] & (along < length)[None, :]
    exact = _decoded(tl.load(ptr + at, inside, 0), MANTISSA)
    if KIND == 1:
        is_wide = (powers == 0)[:, None]
        exact = tl.where(is_wide, tl.load(wide_ptr + at, is_wide & inside, 0.0).to(tl.float32), exact * powers[:, None])
    return exact.to(tl.bfloat16)


@triton.jit
def _product_kernel(
    a,
    b,
    a_ptr,
    b_ptr,
    number_a_ptr,
    number_b_ptr,
    wide_a_ptr,
    wide_b_ptr,
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
    KIND_A: tl.constexpr,
    KIND_B: tl.constexpr,
    MANTISSA_A: tl.constexpr,
    MANTISSA_B: tl.constexpr,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One tile of `part` segments, finished if these are all. KIND: NONE, POWERS or FACTORS. FILLED: 1 where `count` is
    of rows, 2 where it is of numbers along the contraction, 0 where there is none. ALONG: 128."""
    tl.static_assert(ALONG == _SEGMENT)
    PIECE: tl.constexpr = 16
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
    wide_a, wide_b = tl.full((ROWS,), 0, tl.int32), tl.full((COLUMNS,), 0, tl.int32)
    for number in range(begin, end):
        start = number * _SEGMENT
        x = _loaded(a, lane, row0, rows, start, length, ROWS, DESCRIBED)
        y = _loaded(b, lane, column0, columns, start, length, COLUMNS, DESCRIBED)
        if KIND_A > 0:  # loaded while the unit multiplies
            of_a = _numbers(number_a_ptr, lane, row, rows, number, segments)
            wide_a |= (of_a == 0).to(tl.int32)
        if KIND_B > 0:
            of_b = _numbers(number_b_ptr, lane, column, columns, number, segments)
            wide_b |= (of_b == 0).to(tl.int32)
        # the unit adds 128 numbers and no more: on sm_90 Triton's default would have it add 2^30, and none elsewhere
        sums = tl.dot(x, tl.trans(y))
        if KIND_A > 0:
            sums = sums * of_a[:, None]
        if KIND_B == 1:
            out = tl.fma(sums, tl.broadcast_to(of_b[None, :], (ROWS, COLUMNS)), out)  # the product is exact
        elif KIND_B == 2:
            out = out + sums * of_b[None, :]
        else:
            out = out + sums
    if KIND_A == 1 or KIND_B == 1:  # noqa: SIM102 - known when compiling, unlike what follows
        if tl.reduce(wide_a, 0, higher) + tl.reduce(wide_b, 0, higher) > 0:
            length = unknown(length)  # so that addresses are not made before they are needed
            for number in range(begin, end):
                of_a, of_b = tl.full((ROWS,), 1.0, tl.float32), tl.full((COLUMNS,), 1.0, tl.float32)
                wide_a, wide_b = tl.full((ROWS,), 0, tl.int32), tl.full((COLUMNS,), 0, tl.int32)
                if KIND_A > 0:
                    of_a = _numbers(number_a_ptr, lane, row, rows, number, segments)
                if KIND_B > 0:
                    of_b = _numbers(number_b_ptr, lane, column, columns, number, segments)
                if KIND_A == 1:
                    wide_a = (of_a == 0).to(tl.int32)
                if KIND_B == 1:
                    wide_b = (of_b == 0).to(tl.int32)
                if tl.reduce(wide_a, 0, higher) + tl.reduce(wide_b, 0, higher) > 0:
                    sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
                    for start in tl.range(number * _SEGMENT, (number + 1) * _SEGMENT, PIECE, num_stages=1):
                        along = start + tl.arange(0, PIECE)
                        x = _wide(a_ptr, of_a, wide_a_ptr, lane, row, rows, along, length, MANTISSA_A, KIND_A)
                        y = _wide(b_ptr, of_b, wide_b_ptr, lane, column, columns, along, length, MANTISSA_B, KIND_B)
                        sums = tl.dot(x, tl.trans(y), sums)
                    if KIND_A == 2:
                        sums = sums * of_a[:, None]
                    if KIND_B == 2:
                        sums = sums * of_b[None, :]
                    out = tl.where((wide_a[:, None] | wide_b[None, :]) > 0, out + sums, out)
    out = finish_tile(out, factor_a_ptr, factor_b_ptr, bias_ptr, lane, row, rows, column, columns, OF_A, OF_B, BIAS)
    at = ((lane * tl.num_programs(2) + tl.program_id(2)) * rows + row)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), (row < rows)[:, None] & (column < columns)[None, :])


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Shift]:
    """`fp8.to_fp8`; powers of a segment's rows lie beside each other."""
    lanes, rows, length = x.shape
    values, shift = empty(x, x.shape, dtype)
    programs = launch_grid(triton.cdiv(rows, _MADE["ROWS"]) * segments_of(length), lanes)
    outputs = values.view(torch.uint8), shift.powers, shift.wide
    sizes = rows, length, *x.stride()
    _made_kernel[programs](x, *outputs, *sizes, MANTISSA=MANTISSA[dtype], **_MADE)
    return values, shift


def multiply(
    a: Fp8, b: Fp8, finish: Finish = AS_IT_IS, count: Tensor | None = None, contracted: bool = False
) -> Tensor:
    """`fp8.multiply`."""
    return multiply_in_tiles(a, b, finish, tiles_of(a.values.shape[1], b.values.shape[1]), count, contracted)


def tiles_of(rows: int, columns: int) -> Tiles:
    """Tiles of a product whose result has so many rows and columns."""
    sizes = (min(max(triton.next_power_of_2(n), 64), most) for n, most in zip((rows, columns), TILES[:2], strict=True))
    tile, other = sizes
    return TILES._replace(rows=tile, columns=other, warps=TILES.warps if tile * other > 2**13 else 4)


def multiply_in_tiles(
    a: Fp8, b: Fp8, finish: Finish, tiles: Tiles, count: Tensor | None = None, contracted: bool = False
) -> Tensor:
    """The same in these tiles."""
    (lanes, rows, length), columns = a.values.shape, b.values.shape[1]
    x, y = a.values.contiguous(), b.values.contiguous()
    number, segments = triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns), segments_of(length)
    part = part_of(segments, number)
    parts = max(1, triton.cdiv(segments, part))
    within = finish if parts == 1 else AS_IT_IS
    out = x.new_empty(lanes, parts, rows, columns, dtype=within.dtype)
    factors, constants = constants_of(within, out, tiles)
    (kind_a, number_a, wide_a), (kind_b, number_b, wide_b) = (_of_segments(of, out) for of in (a, b))
    described = has_copy_engine(x.device) and length > 0 and length % ALIGNED == 0
    operands = [description(t, n, SEGMENT) if described else t for t, n in ((x, tiles.rows), (y, tiles.columns))]
    kinds: dict[str, Any] = {"KIND_A": kind_a, "KIND_B": kind_b, "DESCRIBED": described, "GROUP": GROUP}
    kinds |= {"MANTISSA_A": MANTISSA[x.dtype], "MANTISSA_B": MANTISSA[y.dtype]}
    numbers = x.view(torch.uint8), y.view(torch.uint8), number_a, number_b, wide_a, wide_b
    kinds["FILLED"] = 0 if count is None else 1 + contracted
    programs = launch_grid(number, lanes, parts)
    _product_kernel[programs](
        *operands,
        *numbers,
        out,
        *factors,
        out if count is None else count,
        rows,
        columns,
        length,
        part,
        **kinds,
        **constants,
    )
    product = out[:, 0] if parts == 1 else lane_sum(out.view(lanes, parts, -1), 1).view(lanes, rows, columns)
    return product if within is finish else finished(product, finish)


def part_of(segments: int, tiles: int) -> int:
    """Segments that a program takes of a product whose result has so many tiles."""
    parts = max(1, min(FULL // tiles, segments * SEGMENT // PART))
    return max(1, triton.cdiv(segments, parts))


def _of_segments(x: Fp8, nothing: Tensor) -> tuple[int, Tensor, Tensor]:
    """Kind, powers or factors, those of a segment beside each other, and what is wide."""
    if x.shift is not None:
        return POWERS, x.shift.powers.mT.contiguous(), x.shift.wide
    return (NONE, nothing, nothing) if x.factor is None else (FACTORS, x.factor.mT.contiguous(), nothing)
