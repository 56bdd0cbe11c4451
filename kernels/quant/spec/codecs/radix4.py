"""Radix-4 FP4: zero and seven powers of four; with its second phase for two-phase rounding (Sun et al. 2020).

    even phase  0, 4^-3 … 4^3           odd phase  0, 4^-3/2 … 4^3/2

Between neighbours `low` and `high` the fraction is (y - low)/(high - low), and y goes up from one half on: from the
arithmetic midpoint, 2.5 · low, ties included. Or it goes up with the probability of the fraction. Both phases take the
same scale, that which maps the block maximum to 4^3; the odd phase saturates at half of it. Each phase is biased, in
opposite directions: quantized with one for one product and with the other for the other, a gradient's two images have
an average that is nearly linear. Scales are those of the general codec.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, general_scales
from fp4dse.kernels.quant.spec.grid import midpoint_threshold, round_up_from


def radix4(b: Blocks) -> Encoded:
    """The general codec's scales, elements on a grid of powers of four."""
    scale, mult = general_scales(b)
    column = {name: value[:, :, None] for name, value in (b.f | b.i).items()}  # [L, 1, 1]
    y = torch.minimum(b.x.abs() * (mult * b.prescale)[:, :, None], column["elem_max"])
    threshold: Tensor | float = 0.5
    if b.random is not None:
        chance = midpoint_threshold(b.random, column["random_shift"])
        threshold = torch.where(column["stochastic"] > 0, chance, 0.5)
    low = power_of_four_below(y, column["elem_pmin"])
    step = torch.where(low > 0, 3 * low, column["elem_pmin"])
    q = low + step * round_up_from((y - low) / step, threshold)
    return Encoded(torch.copysign(q, b.x), scale)


def power_of_four_below(y: Tensor, least: Tensor) -> Tensor:
    """The largest least · 4^k, k >= 0, that is at most y >= 0; 0 where there is none."""
    exponent, least_exponent = y.view(torch.int32) >> 23, least.view(torch.int32) >> 23
    exponent = exponent - (exponent - least_exponent & 1)
    return torch.where(y < least, 0.0, (exponent << 23).view(torch.float32))
