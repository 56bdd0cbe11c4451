"""Exponential, power, logarithm and square root whose bits are the same on every device and everywhere in a tensor.

    x^p = 2^(p · log2 x),    log2 x = e + (2/ln 2) · atanh((m - 1) / (m + 1)),  x = 2^e m,  m in [√½, √2]
    2^y = 2^n · exp(r ln 2),  n = round(y),  |r| <= 1/2

Both series are cut where the next term is below 1e-8 and are evaluated in float64 by single IEEE additions and
multiplications; the exponent is taken from the bits and put back into them. One rounding to float32 follows, so the
result is within 1 ulp. The exponential, of which activations have many, is computed in float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fp4dse.kernels.dispatch import by_device

_MANTISSA = (1 << 52) - 1
_BIAS = 1023
_ATANH = tuple(2 / math.log(2) / n for n in range(9, 0, -2))
_EXP2 = tuple(math.log(2) ** n / math.factorial(n) for n in range(7, -1, -1))


_LOG2E = 1.44269504
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # Cody–Waite: the high part has few bits, so n · high is exact
_COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)  # Taylor on |r| <= ln2/2: 2 ulp


def sqrt(x: Tensor) -> Tensor:
    """Square root of float32 x, rounded once, as on a GPU and in native code.

    PyTorch's own on a CPU is one ulp off for a sixth of all numbers. A root in float64, one ulp off or not, is farther
    from any midpoint of float32 than its own error.
    """
    wide = by_device(x, cpu=torch.float64, cuda=torch.float32)
    return torch.sqrt(x.to(wide)).to(torch.float32)


def exp_nonpositive(x: Tensor) -> Tensor:
    """exp(max(x, -87)) for x <= 0, float32, within 2 ulp. NaN stays NaN."""
    x = torch.clamp(x, min=-87.0)
    n = torch.round(x * _LOG2E)
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = torch.full_like(r, _COEFFICIENTS[0])
    for c in _COEFFICIENTS[1:]:
        p = p * r
        p = p + c
    return p * (n.to(torch.int32) + 127 << 23).view(torch.float32)


def power(x: Tensor, p: float) -> Tensor:
    """x^p, float32, for x >= 0, float32 and finite. 0^p is inf, 1 or 0 by the sign of p; NaN stays NaN."""
    y = _log2(x) * p
    n = torch.round(torch.clamp(y, -1000.0, 1000.0))  # beyond, float32 is 0 or inf
    out = _polynomial(y - n, _EXP2) * (n.to(torch.int64) + _BIAS << 52).view(torch.float64)
    at_zero = math.inf if p < 0 else float(p == 0)
    return torch.where(x > 0, out.to(torch.float32), torch.where(x == 0, at_zero, torch.nan))


def log(x: Tensor) -> Tensor:
    """ln x, float32, for x > 0, float32 and finite; -inf for 0; NaN stays NaN."""
    out = (_log2(x) * math.log(2)).to(torch.float32)
    return torch.where(x > 0, out, torch.where(x == 0, -math.inf, torch.nan))


def _log2(x: Tensor) -> Tensor:
    """float64, for x > 0 and finite."""
    bits = x.double().view(torch.int64)  # a float32 number is normal there
    e = (bits >> 52) - _BIAS
    m = (bits & _MANTISSA | _BIAS << 52).view(torch.float64)
    large = m > math.sqrt(2)
    m, e = torch.where(large, m * 0.5, m), e + large
    s = (m - 1) / (m + 1)
    return _polynomial(s * s, _ATANH) * s + e.double()


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Horner, the highest power first."""
    p = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        p.mul_(x).add_(c)  # two roundings: a fused one would have other bits
    return p
