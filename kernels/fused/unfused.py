"""What the fused quantizers compute, by the reference in torch: their specification."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.kernels.arithmetic.philox import STREAMS, random16
from fp4dse.kernels.arithmetic.rotation import rotate
from fp4dse.kernels.packed import quantize_and_pack
from fp4dse.kernels.reference import decode_operand


def operand(
    x: Tensor,
    columns: bool,
    block: int,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    rotation: int = 0,
    signs: Tensor | None = None,
    codec: str = "block",
    *,
    decode=decode_operand,
    draws=random16,
) -> tuple[Tensor, Tensor]:
    """What `operators.operand` computes, in float32, by the reference or its twins: its specification."""
    blocks, shape, random = _blocks(x, columns, block, features, seeds, step, site, rotation, signs, draws)
    more: dict = {} if codec == "block" else {"codec": codec}
    if codec == "eden":
        at = torch.tensor(site, device=x.device)
        more["scale_random"] = random16(seeds, STREAMS["scales"], step, at, blocks.shape[1])
    values, dec = decode(blocks, floats, ints, random, features[2], **more)
    return values.view(shape), dec


def packed(
    x: Tensor,
    columns: bool,
    block: int,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    quantizers: Sequence[Quantizer],
    rotation: int = 0,
    signs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `operators.packed` computes, by the reference: its specification. quantizers: of the tables, one a lane."""
    blocks, shape, random = _blocks(x, columns, block, features, seeds, step, site, rotation, signs, random16)
    codes, scales, dec = quantize_and_pack(blocks, floats, ints, random, features[2], quantizers)
    return codes.view(*shape[:2], -1), scales.view(*shape[:2], -1), dec


def _blocks(x, columns, block, features, seeds, step, site, rotation, signs, draws):
    """Blocks of the rotated operand, float32 [L, n, B], the operand's shape, and its random bits or None."""
    x = (x.mT if columns else x).to(torch.float32).contiguous()
    if rotation:
        x = rotate(x, rotation, 2, signs)
    blocks = x.view(len(x), -1, block)
    random = None
    if features[1]:
        at = torch.tensor(site, device=x.device)
        random = draws(seeds, STREAMS["rounding"], step, at, blocks[0].numel()).view_as(blocks)
    return blocks, x.shape, random
