"""The quantizers that the kernels of the attention core take, and the reasons why they do not take the others."""

from __future__ import annotations

from functools import cache

from fp4dse.dse.attention import ATTENTION_PRODUCTS
from fp4dse.dse.exactness import OPERAND_FORMATS, element_grid, holds, operand_grid
from fp4dse.kernels.ops.attention_core import Product
from fp4dse.kernels.ops.attention_core.inner import quantized_tile, slot_of
from fp4dse.kernels.quant.descriptor import unheeded
from fp4dse.kernels.quant.operand.kinds import Plain, Scaled
from fp4dse.kernels.quant.operand.lane_quantizers import LaneQuantizers
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.reading import columns_read
from fp4dse.kernels.quant.spec.reference import unread
from fp4dse.kernels.quant.triton.features import Features, features_of
from fp4dse.kernels.quant.triton.launch import flags
from fp4dse.kernels.quant.triton.limits import MOST

INNER = tuple(name for name, (first, _) in ATTENTION_PRODUCTS.items() if first in ("p", "s"))
"""Products whose first operand, P or dS, exists within the kernels alone."""
BLOCKS = (16, 32, 64)
"""Elements that share a scale in these: a tile has whole blocks."""


def why_not_slot(slot: Slot, inner: bool) -> str | None:
    """The reason why the kernels do not take an operand of this slot, None if they do. inner: it is P or dS."""
    if isinstance(slot, Plain):
        return None if slot.only_bf16 else "element: found none; accepted: bf16, and block scales"
    if type(slot) is not Scaled:
        return f"found {type(slot).__name__.lower()}; accepted: one encoding, without a mean"
    of = slot.quantizers
    if of.first.factors_over != "tensor":
        return f"tensor_scale.over: found {of.first.factors_over}; accepted: tensor"
    if of.block == "tensor" or inner:
        if of.first.codec != "block":
            return f"codec: found {of.first.codec}; accepted: block"
        if inner and of.block not in (*BLOCKS, "tensor"):
            return f"block: found {of.block}; accepted: {', '.join(map(str, BLOCKS))}, tensor"
        if reason := _why_not_columns(of):
            return reason
    for q in of.each:
        grid = element_grid(q) if of.block == "tensor" else operand_grid(q)
        if grid is None or not holds(OPERAND_FORMATS["bf16"], grid):
            return f"found {q.label()}; accepted: operands that BF16 holds"
    return None


def why_not_stochastic(product: Product, heads: int, length: int) -> str | None:
    """The reason why the kernels do not draw random numbers for P or dS of so many matrices of a lane and so long a
    contraction, None if they do or nothing is drawn."""
    slot = product.slots[0]
    if not (isinstance(slot, Scaled) and slot.quantizers.features.stochastic):
        return None
    width = length + -length % product.unit
    if width % 16:
        return f"rounding: found stochastic with rows of {width}; accepted: multiples of 16"
    if heads * length * width >= MOST:
        return f"rounding: found stochastic for {heads * length * width:,} numbers of a lane; accepted: below {MOST:,}"
    return None


def _why_not_columns(of: LaneQuantizers) -> str | None:
    """The first column of the descriptor tables that some lane needs and the kernels do not heed."""
    for tables in (of.tables, of.evaluated_tables):
        known = _heeded(of.block, features_of(*tables))
        if found := unheeded(*tables, known | unread("block")):
            return found[0]
    return None


@cache
def _heeded(block: int | str, features: Features) -> frozenset[str]:
    constants = flags(features) | {"B": block if isinstance(block, int) else 1, "PLAIN": 0, "TENSOR": 1}
    return columns_read(slot_of, quantized_tile, **constants, CODEC="block")
