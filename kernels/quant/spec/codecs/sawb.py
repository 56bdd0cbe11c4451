"""SAWB: the clipping value of INT4 from two moments of the tensor (Sun et al. 2020; statistics-aware weight binning).

    clip  = max(12.68 · √(mean x²) - 12.80 · mean |x|, √(mean x²))
    scale = clip / 7,   q = RNE(min(|x| / scale, 7))

The two constants were fitted for 4 bits over six kinds of distribution; a normal one is clipped at 2.466σ. The outer
maximum is ours: for data of nearly one magnitude (rms < 1.096 · mean |x|), to which nothing was fitted, the published
expression falls through zero, and its limit there, all x of one magnitude, has the rms for its right clipping value.
Moments leave out the zeros that a layer pads an operand with (`Blocks.unpadded`), and are taken in units of the power
of two below the maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, elements, multiplier
from fp4dse.kernels.quant.spec.codecs.quest import safe_unit
from fp4dse.kernels.quant.spec.grid import inverse_of_power

RMS, MEAN = 12.68, -12.80


def sawb(b: Blocks) -> Encoded:
    """Each block, a row or a tensor, clipped at a value from its moments."""
    scale, mult = sawb_scales(b)
    return Encoded(torch.copysign(elements(b, b.x.abs(), mult), b.x), scale)


def sawb_scales(b: Blocks) -> tuple[Tensor, Tensor]:
    """Scales and multipliers [L, n]."""
    count = b.unpadded or b.x.shape[2]
    unit = safe_unit(b.amax)
    z = (b.x * inverse_of_power(unit)[:, :, None]).abs()
    total, square = lane_sum(z, 2), lane_sum(z * z, 2)
    elements_of = torch.full_like(total, count)  # by a number, a GPU would multiply with its inverse
    rms = sqrt(square / elements_of)
    clip = torch.maximum(rms * RMS + total / elements_of * MEAN, rms)
    scale = clip / b.f["elem_max"] * unit
    return scale, multiplier(scale, torch.ones_like(scale))
