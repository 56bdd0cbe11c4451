"""RaZeR (2501.04052): the code of -0 stands for +5 or -5, by choice of the block.

The scale is that of the general codec. With z = x · mult, at most 6 in magnitude:

    q± = the nearest to z of the 15 levels of E2M1 and ±5
    q+ is kept, unless Σ (q- - z)² < Σ (q+ - z)²

Between two levels of E2M1 a tie goes where the lane's rounding says; between a level of E2M1 and the special one it
goes to E2M1's. There is no -0. A 5 in the place of 4 or 6 makes the squared error less by 1 - 2·| |z| - 5 |, where
that is positive: a multiple of 2^-20, so that blocks of 16 are compared exactly.

This is the published choice for activations; that for weights, E3M3 scales and ±8 besides, is not built.
"""

from __future__ import annotations

import torch

from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, block_scales, payload
from fp4dse.kernels.quant.spec.grid import round_elements

SPECIAL = 5.0


def razer(b: Blocks) -> Encoded:
    """meta: special [L, n], what -0 stands for: 5 or -5."""
    scale, mult = block_scales(b.amax, b.enc, b.f["inv_val_max"], b.f, b.i, b.scale_random)
    z = payload(b, b.x.abs(), mult)
    negative = b.x < 0
    gain = torch.clamp(1 - 2 * (z - SPECIAL).abs(), min=0)
    minus = lane_sum(torch.where(negative, -gain, gain), 2) < 0
    is_special = (gain > 0) & (negative == minus[:, :, None])
    q = torch.where(is_special, SPECIAL, round_elements(z, b.f, b.i, b.random))
    q = torch.where(negative & (q != 0), -q, q)
    return Encoded(q, scale, {"special": torch.where(minus, -SPECIAL, SPECIAL)})
