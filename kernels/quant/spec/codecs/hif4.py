"""HiFloat4 (2602.11287): 64 numbers share an E6M2 scale, every 8 and every 4 of them have an exponent bit below it.

The conversion takes BF16, to which x is rounded first. Of what follows 1/7, the product with it and 1/scale are rounded
to BF16; products with r are exact, of two BF16 numbers in FP32:

    V16, V8, Vm = max |x| over each 4, each 8, all 64
    scale = E6M2(clamp(BF16(Vm · BF16(1/7)), 2^-48, 1.5 · 2^15))  2 mantissa bits, nearest even
    r     = BF16(1/scale)
    e8    = [V8 · r >= 4]
    e16   = [V16 · r · 2^-e8 >= 2]
    p/4   = round(min(|x| · r · 2^-(e8 + e16), 7/4))              S1P2: 0 … 7/4 in steps of 1/4, ties away
    x̂    = ±p/4 · 2^(e8 + e16) · scale

A finite number beyond BF16's range saturates like any that is too large.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded
from fp4dse.kernels.quant.spec.grid import round_elements

SCALE_MIN, SCALE_MAX = 2.0**-48, 1.5 * 2.0**15
SEVENTH = 0.142578125  # BF16(1/7)


def hif4(b: Blocks) -> Encoded:
    """meta: e1_8 [L, n, 8] and e1_16 [L, n, 16], exponent bits of consecutive elements, uint8."""
    x = _bf16(b.x.abs()).unflatten(2, (8, 2, 4))
    v16 = x.amax(dim=4)
    v8 = v16.amax(dim=3)
    wanted = torch.clamp(_bf16(v8.amax(dim=2) * SEVENTH), SCALE_MIN, SCALE_MAX)
    scale = keep_mantissa(wanted, 2)
    r = _bf16(1 / scale)[:, :, None]
    e8 = v8 * r >= 4
    half = torch.where(e8, 0.5, 1.0)[:, :, :, None]
    e16 = v16 * r[:, :, :, None] * half >= 2
    down = (half * torch.where(e16, 0.5, 1.0))[:, :, :, :, None]  # 2^-(e8 + e16)

    y = x * r[:, :, :, None, None] * down * b.prescale[:, :, None, None, None]
    y = torch.minimum(y.flatten(2), b.f["elem_max"][:, :, None])
    p = round_elements(y, b.f, b.i, b.random).view_as(x)
    q = torch.copysign((p / down).flatten(2), b.x)
    return Encoded(q, scale, {"e1_8": e8.to(torch.uint8), "e1_16": e16.flatten(2).to(torch.uint8)})


def keep_mantissa(x: Tensor, bits: int) -> Tensor:
    """x >= 0 rounded to `bits` mantissa bits, nearest even, below 2^-126 to the same step as there; NaN gives anything.

    On the bits: a compiler may drop a cast to a narrow format and back.
    """
    u, dropped = x.view(torch.int32), 23 - bits
    return (u + ((1 << dropped - 1) - 1 + (u >> dropped & 1)) >> dropped << dropped).view(torch.float32)


def _bf16(x: Tensor) -> Tensor:
    return keep_mantissa(x, 7)
