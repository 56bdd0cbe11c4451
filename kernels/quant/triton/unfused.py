"""The fused quantizers by the reference in torch: their specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.kernels.ops.philox import STREAMS, random16
from fp4dse.kernels.ops.rotation import rotate
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.packed import quantize_and_pack
from fp4dse.kernels.quant.spec.reference import decode_operand


def operand(x: Tensor, columns: bool, call: Call) -> tuple[Tensor, Tensor]:
    """`operators.operand` in float32, by the reference: its specification."""
    blocks, shape, random, more = _blocks(x, columns, call)
    if call.codec != "block":
        more["codec"] = call.codec
    if call.codec == "eden":
        at = torch.tensor(call.site, device=x.device)
        more["scale_random"] = random16(call.seeds, STREAMS["scales"], call.step, at, blocks.shape[1])
    values, dec = decode_operand(blocks, call.floats, call.ints, random, call.features.adaptive, **more)
    return values.view(shape), dec


def packed(x: Tensor, columns: bool, call: Call, quantizers: Sequence[Quantizer]) -> tuple[Tensor, Tensor, Tensor]:
    """`operators.packed` by the reference: its specification. quantizers: of the tables, one a lane."""
    blocks, shape, random, more = _blocks(x, columns, call)
    tables = call.floats, call.ints, random, call.features.adaptive
    codes, scales, dec = quantize_and_pack(blocks, *tables, quantizers, **more)
    return codes.view(*shape[:2], -1), scales.view(*shape[:2], -1), dec


def _blocks(x: Tensor, columns: bool, call: Call) -> tuple[Tensor, torch.Size, Tensor | None, dict[str, Any]]:
    """Blocks of the rotated operand, float32 [L, n, B], the operand's shape, its random bits or None, and the maxima
    that are given."""
    x = (x.mT if columns else x).to(torch.float32).contiguous()
    if call.rotation:
        x = rotate(x, call.rotation, 2, call.signs)
    blocks = x.view(len(x), -1, call.block)
    random = None
    if call.features.stochastic:
        at = torch.tensor(call.site, device=x.device)
        random = random16(call.seeds, STREAMS["rounding"], call.step, at, blocks[0].numel()).view_as(blocks)
    return blocks, x.shape, random, {} if call.tensor_amax is None else {"tensor_amax": call.tensor_amax[:, None]}
