"""Maxima with feedback: powers of two that a tensor scale follows, moved by one factor of two a step (GradScale).

    power <- power · 2     after a step whose maximum was above it: the tensor overflowed and saturated
    power <- power / 2     after one whose maximum was at most half of it
    power                  between these, and after a tensor of zeros, NaN or Inf

The first step takes the least power of two that its own maximum does not exceed. GradScale (Sun et al. 2020) gives each
layer's gradients a scale that grows where their maximum underflows the top of the format, shrinks where it overflows it
and stays in between. That much accounts of the paper say; bounds, factor and start are this project's inference.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST, MOST = 2.0**-100, 2.0**100
"""Bounds of the powers, so that scales and their inverses are normal numbers."""


def power_above(maxima: Tensor) -> Tensor:
    """The least power of two from 2^-100 to 2^100 that each maximum does not exceed, float32; 1 for 0, NaN and Inf."""
    known = torch.where((maxima > 0) & (maxima < torch.inf), maxima, 1.0).clamp(LEAST, MOST)
    return (known.view(torch.int32) + 0x7FFFFF & 0x7F800000).view(torch.float32)  # the exponent, up but for powers


def fed_back(used: Tensor, maxima: Tensor) -> Tensor:
    """The powers of two of the next step from those of this one and its maxima. A tensor of zeros says nothing, nor
    does one that is not finite."""
    smaller = torch.where((maxima > 0) & (maxima <= used / 2), used / 2, used)
    return torch.where((maxima > used) & (maxima < torch.inf), used * 2, smaller).clamp(LEAST, MOST)
