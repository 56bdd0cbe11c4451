"""One rounding for each stored number: what the chain of FP32 operations of the general codec approximates.

    g = FP32(amax_tensor / (target · val_max))          1 without a tensor scale, or if amax_tensor is 0
    s = round(min(amax / (val_max · g), scale_max))     to the scale format
    q = RNE(min(|x| / (s · g), elem_max))
    x̂ = (q · s) · g

Each quotient is that of exact inputs and of numbers as they are stored, and is rounded once. It is computed in float64:
products in it are exact, since a scale has at most 24 significant bits, g has 24, and val_max 3. A quotient in float64
is itself rounded, which changes no stored number: with a divisor of m bits and a midpoint of p bits, a quotient that is
not the midpoint differs from it by more than 2^-(m+p), relatively. Float64 tells that apart for m + p ≤ 53, and the
widest case, FP32 scales with E4M3 elements, has 48 + 5. g is at least the smallest and at most the largest FP32
number, so that no tensor is divided by zero or multiplied by infinity. target · val_max is the FP32 constant of the
descriptor.
"""

from __future__ import annotations

import torch

from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded
from fp4dse.kernels.quant.spec.grid import FLT_MAX, round_elements, round_scale

_SMALLEST = 2.0**-149
_TINY = torch.finfo(torch.float64).tiny  # a divisor for lost blocks: their elements saturate, or are zero


def exact(b: Blocks) -> Encoded:
    """Scale and elements from float64 quotients; the decode factor is the stored g."""
    tensor_amax = b.amax.amax(dim=1, keepdim=True)  # [L, 1]
    scaled = (b.f["tensor_target"] > 0) & (tensor_amax > 0)
    g = (tensor_amax.double() / b.f["tensor_target"].double()).to(torch.float32)
    g = torch.where(scaled, torch.clamp(g, _SMALLEST, FLT_MAX), 1.0)
    val_max = b.f["elem_max"].double()
    wanted = torch.minimum(b.amax.double() / (val_max * g.double()), b.f["scale_max"].double())
    scale = round_scale(wanted, b.f, b.i, b.scale_random).to(torch.float32)
    scale = torch.where(scale == 0, b.f["scale_zero"], scale)
    divisor = torch.clamp(scale.double() * g.double(), min=_TINY) * b.prescale
    y = torch.minimum(b.x.abs().double() / divisor[:, :, None], b.f["elem_max"].double()[:, :, None])
    q = round_elements(y, b.f, b.i, None).to(torch.float32)
    return Encoded(torch.copysign(q, b.x), scale, dec=g)
