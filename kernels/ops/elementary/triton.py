"""Exponential, power and logarithm as Triton code: `arithmetic.elementary`, operation by operation, with its bits."""

from __future__ import annotations

import math

import triton
import triton.language as tl

from fp4dse.kernels.ops import elementary

_ALL = tl.constexpr(tl.PropagateNan.ALL)
_LOG2E = tl.constexpr(elementary._LOG2E)
_LN2_HIGH, _LN2_LOW = tl.constexpr(elementary._LN2_HIGH), tl.constexpr(elementary._LN2_LOW)
_C0, _C1, _C2, _C3, _C4, _C5 = (tl.constexpr(c) for c in elementary._COEFFICIENTS[:6])
_TO_INTEGER = tl.constexpr(12582912.0)  # as in numbers
_TO_INTEGER_64 = tl.constexpr(1.5 * 2.0**52)
_MANTISSA, _BIAS = tl.constexpr(elementary._MANTISSA), tl.constexpr(elementary._BIAS)
_ONE = tl.constexpr(elementary._BIAS << 52)
_SQRT2, _LN2 = tl.constexpr(math.sqrt(2)), tl.constexpr(math.log(2))
_A0, _A1, _A2, _A3, _A4 = (tl.constexpr(c) for c in elementary._ATANH)
_E0, _E1, _E2, _E3, _E4, _E5, _E6, _E7 = (tl.constexpr(c) for c in elementary._EXP2)
_INF = tl.constexpr(math.inf)


@triton.jit
def exp_nonpositive(x):
    """exp(max(x, -87)) of float32 x <= 0."""
    y = tl.maximum(x, -87.0, propagate_nan=_ALL)
    sum_ = y * _LOG2E + _TO_INTEGER  # n, to nearest with ties to even, in its last bits
    n = sum_ - _TO_INTEGER
    r = (y - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * _C0 + _C1
    p = p * r + _C2
    p = p * r + _C3
    p = p * r + _C4
    p = p * r + _C5
    p = p * r + 1.0
    p = p * r + 1.0
    return p * (sum_.to(tl.int32, bitcast=True) + 127 << 23).to(tl.float32, bitcast=True)  # shifts all but n out


@triton.jit
def power(x, p):
    """x^p of float32 x >= 0 and a float64 number p."""
    y = _log2(x) * p
    n = tl.minimum(tl.maximum(y, -1000.0), 1000.0)
    n = (n + _TO_INTEGER_64) - _TO_INTEGER_64
    t = y - n
    out = t * _E0 + _E1
    out = out * t + _E2
    out = out * t + _E3
    out = out * t + _E4
    out = out * t + _E5
    out = out * t + _E6
    out = out * t + _E7
    out = out * (n.to(tl.int64) + _BIAS << 52).to(tl.float64, bitcast=True)
    at_zero = tl.where(p < 0, _INF, tl.where(p == 0, 1.0, 0.0))
    return tl.where(x > 0, out.to(tl.float32), tl.where(x == 0, at_zero, float("nan")))


@triton.jit
def log(x):
    """ln x of float32 x > 0, -inf for 0."""
    return tl.where(x > 0, (_log2(x) * _LN2).to(tl.float32), tl.where(x == 0, -_INF, float("nan")))


@triton.jit
def _log2(x):
    """float64, of x > 0 and finite."""
    bits = x.to(tl.float64).to(tl.int64, bitcast=True)
    m = (bits & _MANTISSA | _ONE).to(tl.float64, bitcast=True)
    large = m > _SQRT2
    m = tl.where(large, m * 0.5, m)
    e = (bits >> 52) - _BIAS + large.to(tl.int64)
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    p = t * _A0 + _A1
    p = p * t + _A2
    p = p * t + _A3
    p = p * t + _A4
    return p * s + e.to(tl.float64)
