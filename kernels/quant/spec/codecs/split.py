"""AMXFP4 (2411.09909): positive and negative elements of a block each have a scale of their own.

    scale⁺ = round(max(x, 0) · (enc · (1/val_max)))          from the largest positive element
    scale⁻ = round(max(-x, 0) · (enc · (1/val_max)))         from the largest negative one

and each element is encoded as in the general codec with the scale of its sign. As published the scales are E5M2 or
E4M3, a scale of zero becomes 1, and there is no tensor scale. Where scales are rounded stochastically the two of a
block use the same random number.
"""

from __future__ import annotations

import torch

from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, block_scales, elements


def split(b: Blocks) -> Encoded:
    """scale [L, n, B], each element's own. meta: scale_positive and scale_negative [L, n]."""
    maxima = torch.clamp(b.x.amax(dim=2), min=0), torch.clamp(-b.x.amin(dim=2), min=0)
    (positive, up), (negative, down) = (
        block_scales(amax, b.enc, b.f["inv_val_max"], b.f, b.i, b.scale_random) for amax in maxima
    )
    is_negative = torch.signbit(b.x)
    q = elements(b, b.x.abs(), torch.where(is_negative, down[:, :, None], up[:, :, None]))
    scale = torch.where(is_negative, negative[:, :, None], positive[:, :, None])
    return Encoded(torch.copysign(q, b.x), scale, {"scale_positive": positive, "scale_negative": negative})
