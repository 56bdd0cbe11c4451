"""Numbers under a power of two as codes of FP8, and back, on a GPU. Powers are given by their biased exponents."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.fp8 import BIAS, CARRY, E4M3, E5M2, HEADROOM, INFINITE, MOST, TOPS
from fp4dse.kernels.quant.triton.numbers import as_float, as_int, upward

MANTISSA = {dtype: 2 if dtype == E5M2 else 3 for dtype in TOPS}
"""Bits of a format's mantissa, by which kernels know it."""
_CARRY, _INFINITE = tl.constexpr(CARRY), tl.constexpr(INFINITE)
_BIAS, _LEAST, _MOST = tl.constexpr(BIAS), tl.constexpr(BIAS - MOST), tl.constexpr(BIAS + MOST)
_BELOW_2, _BELOW_3 = (tl.constexpr(HEADROOM[dtype] - TOPS[dtype]) for dtype in (E5M2, E4M3))


@triton.jit
def higher(a, b):
    """The larger of two integers. Tests: a twin that the interpreter is quick at."""
    return tl.maximum(a, b)


@triton.jit
def either(a, b):
    """The bits of either integer."""
    return a | b


@triton.jit
def top_of(bits):
    """`fp8.top_of` of numbers whose magnitudes have these bits, int32 [n, m]."""
    finite = tl.where(bits < _INFINITE, bits, 0)
    return tl.reduce(tl.reduce(finite, 1, higher), 0, higher) + _CARRY >> 23


@triton.jit
def exponent_of(top, MANTISSA: tl.constexpr):
    """The exponent of an operand's power by its history."""
    BELOW: tl.constexpr = _BELOW_2 if MANTISSA == 2 else _BELOW_3
    exponent = tl.where(top > 0, top + BELOW, _BIAS)
    return tl.minimum(tl.maximum(exponent, _LEAST), _MOST)


@triton.jit
def limit_of(exponent, MANTISSA: tl.constexpr):
    """The bits of the largest number that FP8 holds under a power."""
    TOP: tl.constexpr = 15 if MANTISSA == 2 else 8
    return (exponent + TOP << 23) + 0x600000


@triton.jit
def shifted(x, exponent, MANTISSA: tl.constexpr):
    """Segments x, float32 [n, 128], as codes of FP8, int32; and flags of those that are not held, int32 [n], whose
    codes are zeros.

    Scaled so that FP8's subnormal numbers are float32's, codes are the upper bits, and what is not held has others.
    """
    UNIT: tl.constexpr = 2.0**-112 if MANTISSA == 2 else 2.0**-120
    LOWER: tl.constexpr = (1 << 23 - MANTISSA) - 1
    magnitude = as_int(x) & 0x7FFFFFFF
    scaled = as_int(upward(upward(as_float(magnitude), as_float(254 - exponent << 23)), UNIT))
    fits = tl.reduce(magnitude, 1, higher) <= limit_of(exponent, MANTISSA)
    held = (tl.reduce(scaled & LOWER, 1, higher) == 0) & fits
    codes = scaled >> 23 - MANTISSA | (as_int(x) >> 24 & 0x80)
    return tl.where(held[:, None], codes, 0), tl.where(held, 0, 1)


@triton.jit
def numbers_of_codes(codes, MANTISSA: tl.constexpr):
    """Codes of FP8, uint8, as float32."""
    KIND: tl.constexpr = tl.float8e5 if MANTISSA == 2 else tl.float8e4nv
    return codes.to(KIND, bitcast=True).to(tl.float32)
