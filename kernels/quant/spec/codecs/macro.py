"""Macro-block scaling: a mantissa factor per 128 elements above MXFP4's powers of two (arXiv 2603.08713).

    f     = 1 + (top 8 mantissa bits of FP32(elem_max / amax_macro)) / 256          amax_macro over 128 elements
    power = 2^(exponent of amax·f by the lane's E8M0 rule)                          a block
    q     = round(x · f / power),   x̂ = q · (power / f)

Three definitions of f are in use. This is the one of AMD's ALTO; another truncates the mantissa of amax_macro/1.5 and
divides by it, and a third has 3 bits (1 + m/8). ALTO's is taken because it lifts amax_macro to elem_max · 2^k, or to
less than 1/256 below: the largest element gets the largest code, and under no rule is it clipped. f is 1 where
elem_max / amax_macro is infinite (zero or subnormal macro blocks). NaN or Inf in a macro block is NaN in all of it,
since its factor is shared.

`power / f` is one FP32 division, so that q · scale is x̂ with two roundings. Stored are power and f.
"""

from __future__ import annotations

import torch

from fp4dse.dse.quantizer import MACRO_BLOCK
from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, e8m0, elements

_ONE, _TOP_MANTISSA = 0x3F800000, 0x007F8000


def macro(b: Blocks) -> Encoded:
    """Blocks of B elements, of which 128/B consecutive ones share a factor. meta: factor [L, n·B/128]."""
    lanes, n, size = b.x.shape
    share = MACRO_BLOCK // size
    amax = b.amax.view(lanes, n // share, share).amax(dim=2)
    factor = ((b.f["elem_max"] / amax).view(torch.int32) & _TOP_MANTISSA | _ONE).view(torch.float32)
    factor = torch.where(torch.isfinite(amax), factor, float("nan"))
    f = factor.repeat_interleave(share, dim=1)  # [L, n]
    power = e8m0(b.amax * f, b.i)
    q = elements(b, b.x.abs(), f / power)
    return Encoded(torch.copysign(q, b.x), power / f, {"factor": factor})
