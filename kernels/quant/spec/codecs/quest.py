"""Quartet's forward quantizer: power-of-two scales from the standard deviation (QuEST, arXiv 2502.05003, 2505.14669).

    std   = √(Σ(x - mean)² / B)                             of the block, its mean subtracted
    scale = 2^floor(log2(std · 2.92247856/6 + 1e-8))        exponent from the bits
    q     = RNE(min(|x| / scale, 6))

2.92247856σ is where clipping a normal variable costs E2M1 the least squared error; the power of two below makes that
1.46σ to 2.92σ. std is the population's, divided by B and not B - 1, as in the authors' kernel. The E8M0 rule has no
part in it. Deviations are squared in units of the power of two below the block's maximum, where nothing overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, elements, multiplier
from fp4dse.kernels.quant.spec.grid import FLT_MIN, inverse_of_power, power_below

OPTIMAL_CLIP = 2.92247856
"""In standard deviations, for E2M1 and normal numbers."""


def quest(b: Blocks) -> Encoded:
    """Scales from standard deviations; elements saturate."""
    wanted = standard_deviation(b.x, b.amax) * (OPTIMAL_CLIP / 6) + 1e-8
    scale = torch.clamp(power_below(wanted), max=2.0**127)
    q = elements(b, b.x.abs(), multiplier(scale, torch.ones_like(scale)))
    return Encoded(torch.copysign(q, b.x), scale)


def standard_deviation(x: Tensor, amax: Tensor) -> Tensor:
    """√(mean of (x - mean)²) of blocks x [L, n, B] with maxima amax [L, n]: [L, n]."""
    unit = safe_unit(amax)
    z = x * inverse_of_power(unit)[:, :, None]
    centred = z - (lane_sum(z, 2) / x.shape[2])[:, :, None]
    return sqrt(lane_sum(centred * centred, 2) / x.shape[2]) * unit


def safe_unit(amax: Tensor) -> Tensor:
    """A power of two of about amax: in units of it squares are finite, and its inverse is exact."""
    return torch.clamp(power_below(amax), min=FLT_MIN, max=2.0**126)
