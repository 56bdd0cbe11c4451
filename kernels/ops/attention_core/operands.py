"""Operands of the core's kernels that are tensors, q, k, v and do: quantized for both of their products from one read,
where that is possible."""

from __future__ import annotations

from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from fp4dse.kernels.ops.attention_core import CoreUse, Product
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.operand.kinds import Plain, Scaled
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.spec import blocks
from fp4dse.kernels.quant.triton import operators as fused

BF16 = torch.bfloat16


class Along(NamedTuple):
    """An operand along the queries or keys, as arguments of a kernel: bfloat16 values, from one to the next of lanes,
    heads, rows and numbers along the contraction, and a factor a lane, float32 [L]."""

    values: Tensor
    of_lane: int
    of_head: int
    of_row: int
    of_number: int
    factor: Tensor


def across(product: Product, index: int, x: Tensor, use: CoreUse) -> tuple[Tensor, Tensor]:
    """x [N, T, d] quantized along d by slot `index` of the product: bfloat16 [N, T, padded d], and factors [L]."""
    rows = blocks.pad(x.reshape(use.numerics.lanes, -1, x.shape[2]), 2, product.unit)
    values, factor = _quantized(product.slots[index], rows, use_of(product, index, use, x.shape[2]))
    return values.view(*x.shape[:2], -1), factor


def along(product: Product, x: Tensor, use: CoreUse) -> Along:
    """x [N, T, d], the second operand of a product, quantized along T.

    Only where the order of elements counts, or blocks do not end with the matrix, is it transposed first.
    """
    lanes, (number, length, size), slot = use.numerics.lanes, x.shape, product.slots[1]
    at, heads, rows = use_of(product, 1, use, length), number // lanes, x.reshape(lanes, -1, size)
    if not _is_ordered(slot):
        if _block(slot) == "tensor":
            return _as_it_lies(*_quantized(slot, rows, at), x, heads)
        if isinstance(_block(slot), int) and not length % product.unit:
            return _down(*_quantized(slot, rows, replace(at, dim=1)), x, heads)
    rows = blocks.pad(x.mT.reshape(lanes, heads * size, length), 2, product.unit)
    values, factor = _quantized(slot, rows, at)
    width = values.shape[2]
    return Along(values, heads * size * width, size * width, width, 1, factor)


def both(
    product: Product, index: int, other: Product, x: Tensor, use: CoreUse, low: Tensor | None = None
) -> tuple[tuple[Tensor, Tensor], Along]:
    """`across` of a product and `along` of the other one. low: x in BF16 for slots that round to it, if it is there."""
    slots, heads = (product.slots[index], other.slots[1]), len(x) // use.numerics.lanes
    of_each = [x if low is None or isinstance(slot, Scaled) else low for slot in slots]
    if not (x.shape[2] % product.unit or x.shape[1] % other.unit or _is_ordered(slots[1])):
        if _are_alike(*slots):
            values, factor = across(product, index, of_each[0], use)
            return (values, factor), _as_it_lies(values, factor, x, heads)
        if all(map(_has_kernel_of_both, slots)):
            rows = x.reshape(use.numerics.lanes, -1, x.shape[2])
            calls = _call(product, index, rows, x.shape[2], use), _call(other, 1, rows, x.shape[1], use, columns=True)
            values, factor, down, factor_down = fused.both(rows, calls, BF16)
            return (values.view(x.shape), factor), _down(down, factor_down, x, heads)
    return across(product, index, of_each[0], use), along(other, of_each[1], use)


def use_of(product: Product, index: int, use: CoreUse, length: int) -> Use:
    """The use of the slot with this index in a product, of a contraction of this length."""
    return product.use(index, use.numerics.use(use.layer), use.layer, length, BF16)


def _call(product: Product, index: int, x: Tensor, length: int, use: CoreUse, columns: bool = False) -> Call:
    """The record of a slot with blocks for a kernel that takes x [L, R, C], or its columns."""
    slot = product.slots[index]
    assert isinstance(slot, Scaled)
    at = replace(use_of(product, index, use, length), dim=1 if columns else 2)
    return slot.quantizers.call_for(x, int(slot.quantizers.block), at, columns)


def _quantized(slot: Slot, x: Tensor, at: Use) -> tuple[Tensor, Tensor]:
    """x [L, R, C] by a slot: bfloat16 [L, R, C], contiguous, and factors [L]."""
    if isinstance(slot, Scaled) and slot.quantizers.block == "tensor":
        from fp4dse.kernels.quant.triton.of_tensor import of_tensor

        return of_tensor(x, slot.quantizers.call_for(x, x[0].numel(), at))
    [term] = slot.quantize(x, at).terms
    factor = torch.ones(len(x), device=x.device) if term.factor is None else term.factor
    return term.values.to(BF16).contiguous(), factor


def _as_it_lies(values: Tensor, factor: Tensor, x: Tensor, heads: int) -> Along:
    """Values in the order of x [N, T, d]."""
    _, length, size = x.shape
    return Along(values, heads * length * size, length * size, 1, size, factor)


def _down(values: Tensor, factor: Tensor, x: Tensor, heads: int) -> Along:
    """Values [L, d, N/L · T] of x [N, T, d]: all of a lane quantized down its columns."""
    _, length, size = x.shape
    return Along(values, size * heads * length, length, heads * length, 1, factor)


def _block(slot: Slot) -> int | str:
    """Elements that share a scale; an operand without one is as one that shares it all over."""
    return slot.quantizers.block if isinstance(slot, Scaled) else "tensor"


def _is_ordered(slot: Slot) -> bool:
    """True if numbers depend on the order in which elements or blocks are counted."""
    return isinstance(slot, Scaled) and (slot.quantizers.features.stochastic or slot.quantizers.stochastic_scales)


def _are_alike(one: Slot, other: Slot) -> bool:
    """True if both make the same of a tensor, in any order of its elements."""
    if isinstance(one, Plain) and isinstance(other, Plain):
        return True
    if not (isinstance(one, Scaled) and isinstance(other, Scaled) and _block(one) == _block(other) == "tensor"):
        return False
    return one.quantizers.each == other.quantizers.each and not one.quantizers.maxima.has_state


def _has_kernel_of_both(slot: Slot) -> bool:
    """True if the kernel that quantizes rows and columns of a tensor from one read takes the slot."""
    if not (isinstance(slot, Scaled) and isinstance(slot.quantizers.block, int)):
        return False
    of = slot.quantizers
    return of.backend.operand is fused.operand and of.why_not_operand is None and of.first.codec == "block"
