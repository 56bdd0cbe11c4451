"""The arithmetic of the fused kernels: rounding, random numbers and rotation with the reference's bits.

    to nearest   with C = 1.5 · 2^23 grid steps, (y + C) - C is y rounded to nearest even on the grid of its binade
    down         scaled so that its subnormal numbers are float32's, a format's grid is every 2^(23 - mantissa)-th
                 float32: what is added to the bits is added in grid steps, and cutting off the bits rounds down. Bits
                 that scaling drops decide nothing if they are dropped toward zero
    codes        for the same reason the number of a grid point is the upper bits of the scaled number
    fma          only where the product is exact, so that it equals the two operations; the compiler may fuse none

Formats have at most 18 mantissa bits, and 2^24 times their largest value is a float32; others: `round_wide`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.philox.triton import words_of_runs

_ALL = tl.constexpr(tl.PropagateNan.ALL)
_FLT_MIN = tl.constexpr(2.0**-126)
_EXPONENT = tl.constexpr(0x7F800000)
_HALF_RANGE = tl.constexpr(0x7F000000)  # see spec/grid.py
_BACK = tl.constexpr(2.0**126)
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it leaves integers, ties to even, on both sides of zero
_EXPONENT_64, _HALF_RANGE_64 = tl.constexpr(0x7FF << 52), tl.constexpr(0x7FE << 52)
_TO_INTEGER_64 = tl.constexpr(2.0**52)
_CHANCE = tl.constexpr(2.0**-17)
SIGNS = tl.constexpr(-0x7F7F7F80)
"""Bit 7 of each byte of a word."""


@triton.jit
def none():
    """A tuple that grows."""
    return ()


@triton.jit
def in_four(words):
    """The four parts of words [..., 2, 2], in their order."""
    even, odd = tl.split(words)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_int(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def inverse_of_power(x):
    return as_float(-as_int(x) + _HALF_RANGE)


@triton.jit
def mantissa_of(inv_ulps):
    """Mantissa bits of a format with 1/inv_ulps grid points in a binade."""
    return 127 - (as_int(inv_ulps) >> 23)


@triton.jit
def power_below(x):
    """The largest power of two that is at most x >= 0; 0 for zero and subnormal x, Inf for Inf and NaN."""
    return as_float(as_int(x) & _EXPONENT)


@triton.jit
def smaller(a, b):
    """The smaller of two numbers, NaN if one is."""
    return tl.minimum(a, b, propagate_nan=_ALL)


@triton.jit
def binade_of(y, pmin):
    """The power of two below y, at least pmin."""
    return tl.maximum(power_below(y), pmin)


@triton.jit
def nearest(y, pmin, inv_ulps):
    """y >= 0 to the nearest number of a grid with 1/inv_ulps steps a binade, ties to even."""
    binade = binade_of(y, pmin)
    magic = inv_ulps * _TO_INTEGER
    return tl.fma(binade, -magic, tl.fma(binade, magic, y))


@triton.jit
def toward_zero(y, power):
    """y · power, rounded toward zero. The tests have a twin: the interpreter runs no assembly."""
    return tl.inline_asm_elementwise("mul.rz.f32 $0, $1, $2;", "=f,f,f", [y, power], tl.float32, is_pure=True, pack=1)


@triton.jit
def upward(y, power):
    """y · power, rounded away from zero, so that only zero becomes zero; y >= 0. Tests: a twin, as of `toward_zero`."""
    return tl.inline_asm_elementwise("mul.rp.f32 $0, $1, $2;", "=f,f,f", [y, power], tl.float32, is_pure=True, pack=1)


@triton.jit
def eight_bits(x, MANTISSA: tl.constexpr):
    """The codes of FP8 numbers x, float32, uint8: E5M2 with 2 bits of mantissa, E4M3 with 3. Tests: a twin."""
    HEAD: tl.constexpr = "{ .reg .b16 a, b; cvt.rn.satfinite."
    KIND: tl.constexpr = "e5m2x2" if MANTISSA == 2 else "e4m3x2"
    return tl.inline_asm_elementwise(
        HEAD + KIND + ".f32 a, $2, $1; cvt.rn.satfinite." + KIND + ".f32 b, $4, $3; mov.b32 $0, {a, b}; }",
        "=r,f,f,f,f",
        [x],
        tl.uint8,
        is_pure=True,
        pack=4,
    )


@triton.jit
def unknown(x):
    """x, int32, in a way that the compiler cannot look through. The tests have a twin, as of `toward_zero`."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, is_pure=False, pack=1)


@triton.jit
def saturated(x, factor, add):
    """x · factor + add, rounded once, then clamped to [0, 1]; NaN gives 0. The tests have a twin."""
    return tl.inline_asm_elementwise(
        "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, factor, add], tl.float32, is_pure=True, pack=1
    )


@triton.jit
def prmt(a, b, SELECTOR: tl.constexpr):
    """Four bytes of a (0 to 3) and b (4 to 7), int32, lowest first; with 8 more, only their signs. Tests: a twin."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, SELECTOR], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def permuted(a, b, selector):
    """The four bytes that the lower 16 bits of selector, int32, name as in `prmt`. Tests: a twin."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, selector], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def address(start, n, apart):
    """start + n · apart, int64, of int32 n and apart, where it is needed: nothing of it is kept. Tests: a twin."""
    return tl.inline_asm_elementwise(
        "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [n, apart, start], tl.int64, is_pure=False, pack=1
    )


@triton.jit
def opaque(x):
    """x, float32, in a way that the compiler cannot look through. The tests have a twin, as of `toward_zero`."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def larger_of_pairs(a, b):
    """The larger magnitudes of two pairs of bfloat16 numbers, NaN if one is, with any signs. Tests: a twin."""
    return tl.inline_asm_elementwise(
        "max.NaN.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1
    )


@triton.jit
def unit_of(pmin):
    """The factor that makes the subnormal numbers of a format those of float32.

    Then the bits of a grid point count the grid's points from zero, in their upper 9 + mantissa bits.
    """
    return inverse_of_power(pmin) * _FLT_MIN


@triton.jit
def down(y, add, pmin, mantissa):
    """y >= 0, and `add` more, to the grid point below. add: int32, in 2^(mantissa - 23) grid steps."""
    bits = as_int(toward_zero(y, unit_of(pmin))) + add
    return as_float(bits & -(1 << 23 - mantissa)) * _BACK * pmin


@triton.jit
def random_steps(chunk, shift, mantissa, key):
    """(2r+1) / 2^(b+1) grid steps for b = 16 - shift random bits r, in the units of `down`: int32 [n, 16].

    chunk: numbers in the lane of runs of 16, [n]. Eight consecutive elements share a counter.
    """
    words = words_of_runs(chunk, key)
    draws = tl.join(words * (1 << 7 - mantissa).to(tl.uint32), words >> 9 + mantissa).to(tl.int32, bitcast=True)
    kept = 0x10000 - (1 << shift)
    return tl.reshape(draws, (chunk.shape[0], 16)) & (kept << 7 - mantissa) | (1 << shift + 6 - mantissa)


@triton.jit
def round_scale_by_chance(y, pmin, inv_ulps, drawn, by_chance):
    """y >= 0 to a scale format, up by chance where `by_chance`, else to nearest even: `grid.round_scale` with random
    bits drawn, int32 of y's shape."""
    binade = binade_of(y, pmin)
    t = y * inverse_of_power(binade) * inverse_of_power(inv_ulps)
    low = tl.floor(t)
    threshold = 1.0 - (2 * drawn + 1).to(tl.float32) * _CHANCE
    even = tl.where(t < 8388608.0, (t + 8388608.0) - 8388608.0, t)
    return tl.where(by_chance > 0, tl.where(t - low >= threshold, low + 1.0, low), even) * (binade * inv_ulps)


@triton.jit
def keep_mantissa(x, BITS: tl.constexpr):
    """`codecs.hif4.keep_mantissa`: x >= 0 rounded to so many mantissa bits, nearest even."""
    DROPPED: tl.constexpr = 23 - BITS
    u = as_int(x)
    return as_float(u + ((1 << DROPPED - 1) - 1 + (u >> DROPPED & 1)) >> DROPPED << DROPPED)


@triton.jit
def round_wide(y, pmin, ulps, up):
    """Round y >= 0 to a scale format of any range and precision, to nearest even, or up where `up`; as round_scale."""
    binade = binade_of(y, pmin)
    t = y * inverse_of_power(binade) * ulps
    even = tl.where(t < 8388608.0, (t + 8388608.0) - 8388608.0, t)
    low = tl.where(even > t, even - 1.0, even)
    above = tl.where(t - low >= _FLT_MIN, low + 1.0, low)
    return tl.where(up > 0, above, even) * (binade * inverse_of_power(ulps))


@triton.jit
def round_double(y, pmin, inv_ulps, log_ties, up):
    """Round y >= 0, float64, to a format with at most 24 significant bits: to nearest even, or up where `up`."""
    binade = tl.maximum((y.to(tl.int64, bitcast=True) & _EXPONENT_64).to(tl.float64, bitcast=True), pmin.to(tl.float64))
    exponent = binade.to(tl.int64, bitcast=True)
    inverse = (-exponent + _HALF_RANGE_64).to(tl.float64, bitcast=True)
    t = y * inverse * inverse_of_power(inv_ulps).to(tl.float64)
    even = (t + _TO_INTEGER_64) - _TO_INTEGER_64
    # a power of two's own binade has one grid point: the exponent of float32 is as odd as that of float64
    even = tl.where((t == 1.5) & ((exponent >> 52 & 1) < log_ties), 1.0, even)
    low = tl.floor(t)
    above = tl.where(t - low >= _FLT_MIN, low + 1.0, low)
    return tl.where(up > 0, above, even) * (binade * inv_ulps.to(tl.float64))
