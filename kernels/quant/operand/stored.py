"""An operand as it is stored between the passes: codes and scales in place of decoded values, which are made of them
again in the backward pass, bit for bit.

    4 bits   two codes a byte and a byte for each scale (quant/packed.py). A GPU's kernel writes them (paths.py); else
             they are found from the decoded values, so that it does not matter which path quantized: q · s of a block
             is exact, so s is the block's largest magnitude over one of the format's, and of those that are scales and
             give every element, the first will do
    FP8      elements under factors in FP32 of the tensor, of rows or of 128 numbers; of MXFP8 elements and
             a byte for each block's power of two, the least under which its largest is an element
    BF16     what is not quantized

The tensor's factor, or those of rows and segments, stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.dse.own_formats import element_format, element_name
from fp4dse.dse.quantizer import tile
from fp4dse.dse.scale import E8M0, One
from fp4dse.kernels.ops.fp8 import CARRY, INFINITE, TOPS
from fp4dse.kernels.ops.unpacked import unpacked
from fp4dse.kernels.quant.operand.records import Stored, Term
from fp4dse.kernels.quant.packed import pack, scales_in_order, why_not_packed
from fp4dse.kernels.quant.spec.codecs import Encoded

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_BIAS = 127
"""Of float32's exponents, and of E8M0's."""


def why_not_stored(q: Quantizer) -> str | None:
    """The reason why operands of a canonical quantizer are not stored as codes, None if they are."""
    if q.is_plain:
        return None if q.element == "bf16" else f"element: found {element_name(q.element)}; accepted: bf16"
    if q.element in FP8 and isinstance(q.scale, One):
        return None
    if not _length(q):
        return f"block: found {q.block}; accepted: a number of elements along the contraction, or a tile"
    if q.element in FP8 and isinstance(q.scale, E8M0) and q.codec == "block":
        return None
    return why_not_packed(q)


def stored(term: Term, quantizers: Sequence[Quantizer]) -> Stored:
    """The term of canonical quantizers of one layout, one a lane, none of which `why_not_stored` has a reason
    against."""
    values, first = term._replace(factor=None).decoded(), quantizers[0]
    nothing = values.new_empty(0)
    factor = nothing if term.factor is None else term.factor
    if first.is_plain:
        return Stored(values.to(torch.bfloat16), nothing, factor)
    if first.element in FP8:
        dtype = FP8[str(first.element)]
        if isinstance(first.scale, One):
            return Stored(values.to(dtype), nothing, factor)
        return Stored(*_under_powers(values, _length(first), dtype), factor)
    encoded = encoded_blocks(values.reshape(len(values), -1, _length(first)), quantizers)
    codes, scales = (x.view(*values.shape[:2], -1) for x in pack(encoded, quantizers))
    return Stored(codes, scales, factor)


def restored(of: Stored, quantizers: Sequence[Quantizer]) -> Term:
    """The term that was stored, its values float32; arguments as in `stored`."""
    factor = of.factor if of.factor.numel() else None
    if of.codes.dtype != torch.uint8:
        values = of.codes.to(torch.float32)
        if of.scales.numel():
            values = (values.unflatten(2, (of.scales.shape[2], -1)) * _power(of.scales)[..., None]).flatten(2)
        return Term(values, factor)
    return Term(unpacked(of.codes, of.scales, quantizers), factor)


def _under_powers(values: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 elements [L, R, C] and the codes of their E8M0 scales, uint8 [L, R, C / length], of decoded float32 values.

    The least power under which the block's largest is a number of FP8: the quantizer's own is that or a larger one, and
    a finer grid has all its numbers. What is not finite is an element under 1.
    """
    blocks = values.unflatten(2, (-1, length))
    bits = blocks.abs().amax(3).view(torch.int32)
    codes = torch.where(bits < INFINITE, torch.clamp(((bits + CARRY) >> 23) - TOPS[dtype], min=0), _BIAS)
    elements = blocks * _power(2 * _BIAS - codes)[..., None]
    return elements.to(dtype).flatten(2), codes.to(torch.uint8)


def _power(codes: Tensor) -> Tensor:
    """The powers of two, float32, of codes of E8M0 but NaN's."""
    codes = codes.to(torch.int32)
    return torch.where(codes > 0, codes << 23, 1 << 22).view(torch.float32)


def encoded_blocks(values: Tensor, quantizers: Sequence[Quantizer]) -> Encoded:
    """Elements [L, n, B] and scales [L, n] of decoded blocks float32 [L, n, B] without the tensor's factor.

    ValueError for a block that has none.
    """
    lanes = [_encoded_lane(x, q) for x, q in zip(values, quantizers, strict=True)]
    q, scale = map(torch.stack, zip(*lanes, strict=True))
    return Encoded(q, scale)


def _encoded_lane(x: Tensor, quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    magnitudes = torch.tensor(element_format(quantizer.element).magnitudes(), device=x.device)
    grid = scales_in_order(quantizer.scale).to(x.device)
    amax = x.abs().amax(1)
    q, scale = x.clone(), grid[:1].repeat(len(x))
    [left] = torch.where((amax > 0) & torch.isfinite(amax))  # a block with NaN decodes to NaN
    for largest in magnitudes[1:].flip(0):
        if not len(left):
            break
        blocks, tried = x[left], amax[left] / largest
        elements = blocks / tried[:, None]
        holds = torch.isin(elements.abs(), magnitudes) & (elements * tried[:, None] == blocks)
        takes = torch.isin(tried, grid) & holds.all(1)
        q[left[takes]], scale[left[takes]] = elements[takes], tried[takes]
        left = left[~takes]
    if len(left):
        raise ValueError(f"values: found a block that is no {quantizer.label()}; accepted: decoded ones")
    return q, scale


def _length(q: Quantizer) -> int:
    """Elements along a row that share a scale; 0 where that depends on the tensor."""
    return q.block if isinstance(q.block, int) else tile(q.block)
