"""MixFP4 (2605.31035): each block as E2M1 or as E1M2, whichever is nearer, each with a scale of its own.

E1M2 is 0, ½ … 3½. Its block maximum is mapped to 3½; stored is half the scale, by which its elements are the integers
0 … 7. With s of the general codec for E2M1, mult its multiplier, and t, mult' the same for a maximum mapped to 7:

    e = E2M1(min(|x| · mult, 6)),  i = round(min(|x| · mult', 7)),  z = |x| · mult, which may be above 6
    E2M1 is kept iff  Σ (e - z)² < Σ (i · (t/s) - z)²;  of equal errors it is E1M2 (Algorithm 1's else)

The format keeps the choice in the sign bit of the block's scale, which costs nothing. Errors are compared in units of
E2M1's scale, where small and large tensors lose nothing; t/s is one FP32 rounding. A block whose scale is stored as
zero is lost in either type. Stochastic rounding gives both types the same random bits; as the choice looks at the
rounding noise, the result is not unbiased.
"""

from __future__ import annotations

import torch

from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, block_scales, elements
from fp4dse.kernels.quant.spec.codecs.if4 import integers


def mixfp4(b: Blocks) -> Encoded:
    """q: E2M1 values, or integers: twice E1M2's values. scale: of the type that is kept. meta: `e1m2` [L, n], bool."""
    uniform = b._replace(f=b.f | integers(b.f))
    # 1/7 to one rounding where a maximum is mapped to 6: the product is 1
    to_seven = b.f["inv_val_max"] * b.f["elem_max"] / uniform.f["elem_max"]
    magnitude = b.x.abs()
    scale, mult = block_scales(b.amax, b.enc, b.f["inv_val_max"], b.f, b.i, b.scale_random)
    scale2, mult2 = block_scales(b.amax, b.enc, to_seven, b.f, b.i, b.scale_random)
    real, whole = elements(b, magnitude, mult), elements(uniform, magnitude, mult2)
    z = magnitude * (mult * b.prescale)[:, :, None]
    first, second = real - z, whole * (scale2 / scale)[:, :, None] - z
    e1m2 = ~(lane_sum(first * first, 2) < lane_sum(second * second, 2))
    q = torch.where(e1m2[:, :, None], whole, real)
    return Encoded(torch.copysign(q, b.x), torch.where(e1m2, scale2, scale), {"e1m2": e1m2})
