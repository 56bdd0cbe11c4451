"""Tiles of an operand stored, and in FP8 with what that does not hold (ops/fp8).

Of elements and scales most is known block by block: the largest number, and whether all others are multiples of the
smallest that FP8 has. Where that is so for each block of a tile, its elements are only scaled and converted. Else the
decoded numbers are looked at one by one, with the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.fp8.triton import exponent_of, higher, shifted
from fp4dse.kernels.quant.triton.blocks import decoded
from fp4dse.kernels.quant.triton.numbers import as_float, as_int, eight_bits


@triton.jit
def put(x, ptr, lane, row0, rows, column0, width, WHOLE: tl.constexpr):
    """Store a tile x at (row0, column0) of a lane's [rows, width], but for what lies beyond its end."""
    row, column = tl.arange(0, x.shape[0]), tl.arange(0, x.shape[1])
    mask = (row < rows - row0)[:, None]
    if not WHOLE:
        mask = mask & (column < width - column0)[None, :]
    there = ptr + ((lane * rows + row0) * width + column0) + row[:, None] * width + column[None, :]
    tl.store(there, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def put_blocks(
    q,
    scale,
    x,
    codes_ptr,
    powers_ptr,
    wide_ptr,
    lane,
    row0,
    rows,
    column0,
    width,
    segments,
    element,
    W: tl.constexpr,
    WHOLE: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """Store element magnitudes q [n, B] and scales [n], powers of two, of a tile [P, W] in FP8, with the signs of x.

    element: as in `numbers_of`; B divides 128. The other arguments are those of `put_fp8`.
    """
    SHARE: tl.constexpr = 128 // q.shape[1]
    COUNT: tl.constexpr = q.shape[0] // SHARE
    P: tl.constexpr = COUNT * 128 // W
    SMALLEST: tl.constexpr = 2.0**-16 if MANTISSA == 2 else 2.0**-9
    largest = tl.reduce(as_int(q), 1, higher)
    tops = tl.reshape(as_int(as_float(largest) * scale) & 0x7FFFFFFF, (COUNT, SHARE))
    exponent, fits = exponent_of(tl.reduce(tops, 1, higher), MANTISSA)
    inverse = tl.broadcast_to(as_float(254 - exponent << 23)[:, None], (COUNT, SHARE))
    scale_8 = scale * tl.reshape(inverse, scale.shape)
    step = element[0] * element[1]  # the smallest element
    unsure = tl.where((largest == 0) | (scale_8 * step >= SMALLEST), 0, 1)
    if tl.reduce(unsure, 0, higher) + tl.reduce(tl.where(fits, 0, 1), 0, higher) > 0:
        out = tl.reshape(decoded(x, q, scale), (P, W))
        pointers, place = (codes_ptr, powers_ptr, wide_ptr), (lane, row0, rows, column0, width)
        put_fp8(out, *pointers, *place, segments, WHOLE, MANTISSA)
    else:
        codes = tl.reshape(eight_bits(decoded(x, q, scale_8), MANTISSA), (P, W))
        put(codes, codes_ptr, lane, row0, rows, column0, width, WHOLE)
        put_powers(as_float(exponent << 23), powers_ptr, lane, row0, rows, column0, width, segments, W)


@triton.jit
def put_powers(powers, ptr, lane, row0, rows, column0, width, segments, W: tl.constexpr):
    """Store the powers [n] of a tile's segments: of a lane [segments, ·], where a row of the operand has so many; rows
    here may be parts of it."""
    COUNT: tl.constexpr = W // 128
    row, segment = tl.arange(0, powers.shape[0]) // COUNT, tl.arange(0, powers.shape[0]) % COUNT
    of_row = (width + 127) // 128
    number, count = (row0 + row) * of_row + column0 // 128 + segment, rows * of_row
    at = number % segments * (count // segments) + number // segments
    tl.store(ptr + lane * count + at, powers, (row < rows - row0) & (segment * 128 < width - column0))


@triton.jit
def put_fp8(
    x,
    codes_ptr,
    powers_ptr,
    wide_ptr,
    lane,
    row0,
    rows,
    column0,
    width,
    segments,
    WHOLE: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """Store a tile x, float32 [P, W], in FP8: codes uint8 [L, rows, width], powers as in `put_powers`; and in BF16 what
    it does not hold."""
    P: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    COUNT: tl.constexpr = P * W // 128
    codes, powers = shifted(tl.reshape(x, (COUNT, 128)), MANTISSA)
    put(tl.reshape(codes, (P, W)), codes_ptr, lane, row0, rows, column0, width, WHOLE)
    is_wide = tl.reshape(tl.broadcast_to((powers == 0)[:, None], (COUNT, 128)), (P, W))
    row, column = tl.arange(0, P), tl.arange(0, W)
    is_wide = is_wide & ((row < rows - row0)[:, None] & (column < width - column0)[None, :])
    there = wide_ptr + ((lane * rows + row0) * width + column0) + row[:, None] * width + column[None, :]
    tl.store(there, x.to(tl.bfloat16), is_wide)
    put_powers(powers, powers_ptr, lane, row0, rows, column0, width, segments, W)
