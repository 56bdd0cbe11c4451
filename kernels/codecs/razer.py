"""RaZeR: the code of -0 stands for +5 or -5, by choice of the block.

The scale is that of the general codec. With z = x · mult, at most 6 in magnitude:

    q± = the nearest to z of the 15 levels of E2M1 and ±5
    q+ is kept, unless Σ (q- - z)² < Σ (q+ - z)²

Between two levels of E2M1 a tie goes where the lane's rounding says; between a level of E2M1 and the special one it
goes to E2M1's. There is no -0. Errors are compared in units of the block's scale, where nothing overflows or vanishes.
This is the published choice for activations; that for weights, E3M3 scales and ±8 besides, is not built.
"""

from __future__ import annotations

import torch

from fp4dse.kernels.codecs.block import Blocks, Encoded, block_scales, payload
from fp4dse.kernels.grid import round_elements
from fp4dse.kernels.reduce import lane_sum

SPECIAL = 5.0


def razer(b: Blocks) -> Encoded:
    """meta: special [L, n], what -0 stands for: 5 or -5."""
    scale, mult = block_scales(b.amax, b.enc, b.f["inv_val_max"], b.f, b.i, b.scale_random)
    z = payload(b, b.x.abs(), mult)
    plain = round_elements(z, b.f, b.i, b.random)
    nearer = (z - SPECIAL).abs() < (z - plain).abs()
    negative = b.x < 0
    candidates = [torch.where(nearer & (negative == sign), SPECIAL, plain) for sign in (False, True)]
    errors = [lane_sum((q - z) * (q - z), 2) for q in candidates]
    minus = errors[1] < errors[0]
    q = torch.where(minus[:, :, None], candidates[1], candidates[0])
    q = torch.where(negative & (q != 0), -q, q)
    return Encoded(q, scale, {"special": torch.where(minus, -SPECIAL, SPECIAL)})
