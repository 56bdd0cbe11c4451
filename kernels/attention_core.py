"""The attention core with quantized operands (dse/attention.py), in all lanes: its definition, and all there is so far.

The matrix of weights is made whole, so memory grows with the square of the length; kernels that quantize it in parts do
not exist yet. With BF16 operands it has the roundings of ops/attention, which computes recipes that quantize nothing
here.

An operand [N, R, C], N = lanes × batch × heads, is quantized along its contraction C as one matrix [L, N/L · R, C] of
each lane: a tensor scale is of all heads and samples together, and blocks along C are the same as in each head by
itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from fp4dse.dse.attention import ATTENTION_PRODUCTS, FORWARD, Attention
from fp4dse.dse.quantizer import Quantizer
from fp4dse.kernels.autograd import Function
from fp4dse.kernels.gemm import GEMMS, pick, product
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.backend import Backend
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.spec import blocks

if TYPE_CHECKING:
    from fp4dse.kernels.lanes import LaneNumerics

CORE = 1 << 16
"""Added to the number of a layer: keys of its attention's random numbers are beyond those of all layers."""
MOST_SLOTS = 6
"""Of a layer, as far as keys of random numbers reach: the core counts as two layers."""


class Product(msgspec.Struct):
    """One of the six products in all lanes: its slots in the order of the product, and its backend (gemm.GEMMS)."""

    slots: Sequence[Slot]
    numbers: Sequence[int]
    gemm: str

    def __call__(self, a: Tensor, b: Tensor, use: Use, layer: int) -> Tensor:
        """a [N, R, C] · b [N, S, C]ᵀ, float32 [N, R, S], quantized along C."""
        gemm, lanes = GEMMS[self.gemm], len(use.seeds)
        operands = []
        for slot, number, x in zip(self.slots, self.numbers, (a, b), strict=True):
            length = x.shape[2]
            x = blocks.pad(x.reshape(lanes, -1, length), 2, max(of.unit for of in self.slots))
            dtype = torch.float32 if gemm.whole else gemm.operand
            at = replace(use, layer=CORE + 2 * layer + number // MOST_SLOTS, length=length, dtype=dtype)
            operand = slot.quantize(x, at)
            operands.append(operand.whole() if gemm.whole else operand)
        out = None
        for s in operands[0].terms:
            for t in operands[1].terms:
                along = _along(s.factor, len(a)), _along(t.factor, len(b))
                part = product(gemm, (_apart(s.values, len(a)), _apart(t.values, len(b))), along)
                part = part * _factor(s.factor, len(a), 2) * _factor(t.factor, len(b), 1)
                out = part if out is None else out + part
        assert out is not None
        return out


def _apart(values: Tensor, count: int) -> Tensor:
    """Rows of all heads [L, N/L · R, C] as matrices [N, R, C]."""
    return values.contiguous().view(count, -1, values.shape[-1])


def _along(factor: Tensor | None, count: int) -> Tensor | None:
    """Factors that change along the contraction, [L, N/L · R, C / 128], as those of matrices; None for others."""
    return None if factor is None or factor.ndim < 3 else _apart(factor, count)


def _factor(factor: Tensor | None, count: int, dim: int) -> Tensor | float:
    """The factor of an operand for a result [N, R, S]: of lanes [L], or of rows [L, N/L · R], which are along `dim` - 1
    in the result (dim 2: its rows, dim 1: its columns)."""
    if factor is None or factor.ndim == 3:
        return 1.0
    if factor.dim() == 1:
        return factor.repeat_interleave(count // len(factor))[:, None, None]
    return factor.reshape(count, -1).unsqueeze(dim)


class AttentionCore:
    """The products of lanes whose recipes have one layout of attention, one a lane."""

    def __init__(self, recipes: Sequence[Attention], device: torch.device, backend: Backend, gemm: str) -> None:
        self.first = recipes[0]
        self.products = {}
        self.slots: dict[str, Slot] = {}
        numbers = iter(range(2 * MOST_SLOTS))
        for name, operands in ATTENTION_PRODUCTS.items():
            quantizers = [
                [recipe.operand(f"{name}.{operand}").canonical() for recipe in recipes] for operand in operands
            ]
            mine = [next(numbers) for _ in operands]
            slots = [slot_of(q, i % MOST_SLOTS, device, backend) for q, i in zip(quantizers, mine, strict=True)]
            self.slots |= {f"attention.{name}.{operand}": slot for operand, slot in zip(operands, slots, strict=True)}
            self.products[name] = Product(slots, mine, pick(str(device), quantizers[0], quantizers[1], gemm)[0])
        bf16 = [Quantizer(element="bf16")] * len(recipes)
        slots = [slot_of(bf16, 0, device, backend)] * 2
        self.plain = Product(slots, (0, 0), pick(str(device), bf16, bf16)[0])

    def product(self, name: str, a: Tensor, b: Tensor, numerics: LaneNumerics, layer: int) -> Tensor:
        """The product of this name, in BF16 in the steps and ways of evaluation in which the recipe's stages are."""
        stages = {"fprop"} if name in FORWARD else {"dgrad", "wgrad"}
        of = self.plain if stages <= numerics.precise_stages else self.products[name]
        return of(a, b, numerics.use(layer), layer)


def attention_core(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, core: AttentionCore, numerics: LaneNumerics, layer: int
) -> Tensor:
    """softmax(q kᵀ / sqrt d) v of [N, T, d] each, N = lanes × batch × heads, in v's dtype; layer keys the random
    numbers."""
    out: Tensor = _Core.apply(q, k, v, causal, core, numerics, layer)
    return out


class _Core(Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, core: AttentionCore, numerics: LaneNumerics, layer: int
    ) -> Tensor:
        ctx.causal, ctx.core, ctx.numerics, ctx.layer = causal, core, numerics, layer
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        q, k, v = (x.detach().to(torch.float32) for x in (q, k, v))
        if core.first.smooth_k:
            k = k - k.mean(dim=1, keepdim=True)
        scores = _scores(q, k, causal, core, numerics, layer)
        if core.first.weights == "normalized":
            out = core.product("context", torch.softmax(scores, dim=-1), v.mT, numerics, layer)
        else:
            weights = torch.exp(scores - scores.amax(dim=2, keepdim=True))
            out = core.product("context", weights, v.mT, numerics, layer) / weights.sum(dim=2, keepdim=True)
        ctx.save_for_backward(q, k, v, out)
        return out.to(ctx.dtypes[2])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        core, numerics, layer = ctx.core, ctx.numerics, ctx.layer
        g, scale = g.to(torch.float32).contiguous(), q.shape[-1] ** -0.5
        weights = torch.softmax(_scores(q, k, ctx.causal, core, numerics, layer), dim=-1)
        mean = lane_sum(g * out.to(ctx.dtypes[2]), 2)[..., None]

        def product(name: str, a: Tensor, b: Tensor) -> Tensor:
            made: Tensor = core.product(name, a, b, numerics, layer)
            return made

        dv = product("dv", weights.mT, g.mT)
        d_scores = weights * (product("dp", g, v) - mean)
        dq, dk = product("dq", d_scores, k.mT) * scale, product("dk", d_scores.mT, q.mT) * scale
        gradients = zip((dq, dk, dv), ctx.dtypes, strict=True)
        return *(x.to(dtype) for x, dtype in gradients), None, None, None, None


def _scores(q: Tensor, k: Tensor, causal: bool, core: AttentionCore, numerics: LaneNumerics, layer: int) -> Tensor:
    """q kᵀ / sqrt d, float32 [N, T, T]; -inf for keys that come later, where causal."""
    scores = core.product("scores", q, k, numerics, layer) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf"))
