"""Tiles of an operand stored, and in FP8 with what that does not hold (ops/fp8).

The operand's power of two follows from the step before, as an exponent that a program reads once. Of elements and
scales most is known block by block: the largest number, and whether all others are multiples of the smallest that FP8
has. Where both are right in each block of a tile, its elements are only scaled and converted. Else the decoded numbers
are looked at one by one, with the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.fp8 import STEPS
from fp4dse.kernels.ops.fp8.shifting import exponent_of, higher, limit_of, shifted, top_of
from fp4dse.kernels.quant.triton.blocks import decoded
from fp4dse.kernels.quant.triton.numbers import as_float, as_int, eight_bits

_STEPS = tl.constexpr(STEPS)


@triton.jit
def exponent_now(tops_ptr, lane, step_ptr, MANTISSA: tl.constexpr, TRAINING: tl.constexpr):
    """The exponent of a lane's power, as `History.power` has it, and what is known of this step's largest exponent."""
    step, tops_ptr = tl.load(step_ptr), tops_ptr + lane * _STEPS
    before, now = tl.load(tops_ptr + (step + _STEPS - 1) % _STEPS), tl.load(tops_ptr + step % _STEPS)
    if not TRAINING:
        before = tl.maximum(tl.maximum(before, now), tl.load(tops_ptr + (step + 1) % _STEPS))
    return exponent_of(before, MANTISSA), now


@triton.jit
def write_top(top, known, first, tops_ptr, lane, step_ptr):
    """`History.write`, of one program. known: what it read before, which may be less than what is there by now."""
    step, tops_ptr = tl.load(step_ptr), tops_ptr + lane * _STEPS
    if top > known:
        tl.atomic_max(tops_ptr + step % _STEPS, top, sem="relaxed")
    if first:
        tl.store(tops_ptr + (step + 1) % _STEPS, 0)


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
    flags_ptr,
    wide_ptr,
    lane,
    row0,
    rows,
    column0,
    width,
    exponent,
    element,
    W: tl.constexpr,
    WHOLE: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """Store element magnitudes q [n, B] and scales [n], powers of two, of a tile [P, W] in FP8, with the signs of x.

    element: as in `numbers_of`; B divides 128. The rest is as in `put_fp8`.
    """
    P: tl.constexpr = q.shape[0] * q.shape[1] // W
    SMALLEST: tl.constexpr = 2.0**-16 if MANTISSA == 2 else 2.0**-9
    largest = tl.reduce(as_int(q), 1, higher)
    tops = as_int(as_float(largest) * scale) & 0x7FFFFFFF
    scale_8 = tl.where(largest == 0, 0.0, scale * as_float(254 - exponent << 23))
    step = element[0] * element[1]  # the smallest element
    sure = (largest == 0) | (scale_8 * step >= SMALLEST)
    sure = sure & (tops <= limit_of(exponent, MANTISSA))
    if tl.reduce(tl.where(sure, 0, 1), 0, higher) > 0:
        out = tl.reshape(decoded(x, q, scale), (P, W))
        pointers, place = (codes_ptr, flags_ptr, wide_ptr), (lane, row0, rows, column0, width)
        top, missed = put_fp8(out, *pointers, *place, exponent, WHOLE, MANTISSA)
    else:
        codes = tl.reshape(eight_bits(decoded(x, q, scale_8), MANTISSA), (P, W))
        put(codes, codes_ptr, lane, row0, rows, column0, width, WHOLE)
        put_flags(tl.full((P * W // 128,), 0, tl.int32), flags_ptr, lane, row0, rows, column0, width, W)
        top, missed = top_of(tops[:, None]), tl.full((), 0, tl.int32)
    return top, missed


@triton.jit
def put_flags(flags, ptr, lane, row0, rows, column0, width, W: tl.constexpr):
    """Store the flags [n] of a tile's segments, uint8 [L, rows, ⌈width / 128⌉]. Rows of whole segments may be seen as
    any others."""
    COUNT: tl.constexpr = W // 128
    row, segment = tl.arange(0, flags.shape[0]) // COUNT, tl.arange(0, flags.shape[0]) % COUNT
    at = (lane * rows + row0 + row) * ((width + 127) // 128) + column0 // 128 + segment
    tl.store(ptr + at, flags.to(tl.uint8), (row < rows - row0) & (segment * 128 < width - column0))


@triton.jit
def put_fp8(
    x,
    codes_ptr,
    flags_ptr,
    wide_ptr,
    lane,
    row0,
    rows,
    column0,
    width,
    exponent,
    WHOLE: tl.constexpr,
    MANTISSA: tl.constexpr,
):
    """Store a tile x, float32 [P, W], in FP8 under the power of this exponent: codes uint8 [L, rows, width], flags, and
    in BF16 what is not held. Returns the tile's largest exponent (`top_of`), and 1 if there is a flag, else 0."""
    P: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    COUNT: tl.constexpr = P * W // 128
    codes, flags = shifted(tl.reshape(x, (COUNT, 128)), exponent, MANTISSA)
    put(tl.reshape(codes, (P, W)), codes_ptr, lane, row0, rows, column0, width, WHOLE)
    is_wide = tl.reshape(tl.broadcast_to((flags > 0)[:, None], (COUNT, 128)), (P, W))
    row, column = tl.arange(0, P), tl.arange(0, W)
    is_wide = is_wide & ((row < rows - row0)[:, None] & (column < width - column0)[None, :])
    there = wide_ptr + ((lane * rows + row0) * width + column0) + row[:, None] * width + column[None, :]
    tl.store(there, x.to(tl.bfloat16), is_wide)
    put_flags(flags, flags_ptr, lane, row0, rows, column0, width, W)
    return top_of(as_int(x) & 0x7FFFFFFF), tl.reduce(flags, 0, higher)
