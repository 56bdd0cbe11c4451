"""IF4 (2603.28765): each block as E2M1 or as integers, whichever is nearer.

The scale is that of the general codec for E2M1. With z = |x| · mult, at most 6:

    e = E2M1(z)                               0 .5 1 1.5 2 3 4 6
    i = round(7z / 6)                         0 … 7, worth 6/7 each
    the integers are kept iff  Σ (6i - 7z)² < Σ (7e - 7z)²,  computed as  Σ (6i - 7e) · (6i + 7e - 14z) < 0

Elements are counted in sevenths of an E2M1 unit, 7e or 6i, and the product is multiplied by 1/7 (`postscale`): so they
are exact in 5 significant bits, and the two encodings are equal where their values are. Errors are compared in units
of the block's scale, where nothing overflows or vanishes. Stochastic rounding gives both encodings the same random
bits; as the choice looks at the rounding noise, the result is not unbiased.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.dse.formats import ELEMENTS
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, block_scales, payload
from fp4dse.kernels.quant.spec.grid import round_elements


def if4(b: Blocks) -> Encoded:
    """q in units of 1/7: seven times E2M1 values, or six times integers. meta: `integer` [L, n], bool."""
    scale, mult = block_scales(b.amax, b.enc, b.f["inv_val_max"], b.f, b.i, b.scale_random)
    z = payload(b, b.x.abs(), mult)
    z7 = z * 7
    real = round_elements(z, b.f, b.i, b.random) * 7
    six = b.f["elem_max"][:, :, None]  # a tensor: on a GPU, division by a number is not one rounding
    whole = round_elements(z7 / six, b.f | integers(b.f), b.i, b.random) * 6
    integer = lane_sum((whole - real) * (whole + real - 2 * z7), 2) < 0
    q = torch.where(integer[:, :, None], whole, real)
    return Encoded(torch.copysign(q, b.x), scale, {"integer": integer})


def integers(f: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns of the element grid for INT4."""
    grid = ELEMENTS["int4"]
    return {
        "elem_pmin": torch.full_like(f["elem_pmin"], 2.0**grid.emin),
        "elem_ulps": torch.full_like(f["elem_ulps"], 2.0**grid.mantissa),
        "elem_max": torch.full_like(f["elem_max"], grid.max),
    }
