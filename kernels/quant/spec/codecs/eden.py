"""MS-EDEN: rounded to nearest, then made unbiased by the scales, which are rounded stochastically (arXiv 2601.22813).

    s = RNE(amax · enc / val_max)             val_max = 6/(0.93 · 17/16) = 6.0721: the largest elements clip a little
    y = |x| · enc / s,   q = RNE(min(y, elem_max))
    S = Σ y² / Σ y·q                          over the block; 1 if all q are zero
    scale = SR(min(s · S, scale_max))         to the scale format; q stays

⟨x, x̂⟩ = ⟨x, x⟩ in expectation for every block, which makes x̂ unbiased on average over random rotations of x: a recipe
must have one (dse/rules). The error is near that of rounding to nearest. S is that of each scale block, as in the paper
and its kernel; S per 128 elements, as in its simulator, is worse. Sums are those of y, which is x in units of the
block's scale, so that they neither overflow nor underflow; where x has outgrown an old tensor maximum, y counts as 2^48
at most, which leaves its block's scale at the largest.
"""

from __future__ import annotations

import torch

from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, block_scales, elements
from fp4dse.kernels.quant.spec.grid import round_scale

LARGEST = 2.0**48
"""Of y in the sums."""


def eden(b: Blocks) -> Encoded:
    """Nearest elements, corrected scales."""
    magnitude = b.x.abs()
    scale, mult = block_scales(b.amax, b.enc, b.f["inv_val_max"], b.f, b.i, None)  # None: to nearest
    q = elements(b, magnitude, mult)
    y = torch.clamp(magnitude * (mult * b.prescale)[:, :, None], max=LARGEST)
    norm, product = lane_sum(y * y, 2), lane_sum(y * q, 2)
    kept = (product == 0) | (scale == 0)
    corrected = torch.where(kept, scale, scale * (norm / product))
    scale = round_scale(torch.minimum(corrected, b.f["scale_max"]), b.f, b.i, b.scale_random)
    return Encoded(torch.copysign(q, b.x), scale)
