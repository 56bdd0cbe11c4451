"""The attention core with quantized operands (dse/attention.py), in all lanes.

    S = q kᵀ / sqrt d     P = softmax(S)     o = P v          each operand as its quantizer has it, S, P and o in FP32
    dv = Pᵀ do            dS = P ∘ (do vᵀ - rowsum(do ∘ o))                P made anew of the operands of S, dS in FP32
    dq = dS k / sqrt d    dk = dSᵀ q / sqrt d

An operand [N, R, C], N = lanes × batch × heads, is quantized along its contraction C as one matrix [L, N/L · R, C] of
each lane: a tensor scale is of all heads and samples together, and blocks along C are the same as in each head by
itself. With BF16 operands it has the roundings of ops/attention, which computes recipes that quantize nothing here.

The definition has the matrix of weights in memory, which grows with the square of the length. On a CUDA device kernels
compute it without (triton.py), of operands that they take; the others, and passes that count what quantizers lose, are
the definition's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from fp4dse.dse.attention import ATTENTION_PRODUCTS, Attention, stages_of
from fp4dse.dse.quantizer import BF16
from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.gemm import GEMMS, pick, product
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.backend import Backend
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.records import Operand, Use
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.spec import blocks

if TYPE_CHECKING:
    from fp4dse.kernels.lanes.stages import LaneStages

_CORE = Operation(__name__)

CORE = 1 << 16
"""Added to the number of a layer: keys of its attention's random numbers are beyond those of all layers."""
MOST_SLOTS = 6
"""Of a layer, as far as keys of random numbers reach: the core counts as two layers."""


class Product(msgspec.Struct):
    """One of the six products in all lanes: its slots in the order of the product, and its backend (gemm.GEMMS)."""

    slots: Sequence[Slot]
    numbers: Sequence[int]
    gemm: str

    @property
    def unit(self) -> int:
        """The contraction is padded with zeros to a multiple of it."""
        return max(of.unit for of in self.slots)

    def use(self, index: int, use: Use, layer: int, length: int, dtype: torch.dtype) -> Use:
        """The use of the slot with this index in the product (0 or 1), of a contraction of this length, by a layer."""
        return replace(use, layer=CORE + 2 * layer + self.numbers[index] // MOST_SLOTS, length=length, dtype=dtype)

    def operands(self, a: Tensor, b: Tensor, use: Use, layer: int) -> list[Operand]:
        """a [N, R, C] and b [N, S, C] quantized along C, as one matrix of each lane."""
        gemm, found = GEMMS[self.gemm], []
        dtype = torch.float32 if gemm.whole else gemm.operand
        for index, x in enumerate((a, b)):
            length = x.shape[2]
            x = blocks.pad(x.reshape(len(use.seeds), -1, length), 2, self.unit)
            operand = self.slots[index].quantize(x, self.use(index, use, layer, length, dtype))
            found.append(operand.whole() if gemm.whole else operand)
        return found

    def multiply(self, operands: Sequence[Operand], count: int) -> Tensor:
        """The product of these operands as `count` matrices, float32 [N, R, S]."""
        gemm, out = GEMMS[self.gemm], None
        for s in operands[0].terms:
            for t in operands[1].terms:
                along = _along(s.factor, count), _along(t.factor, count)
                part = product(gemm, (_apart(s.values, count), _apart(t.values, count)), along)
                part = part * _factor(s.factor, count, 2) * _factor(t.factor, count, 1)
                out = part if out is None else out + part
        assert out is not None
        return out

    def __call__(self, a: Tensor, b: Tensor, use: Use, layer: int) -> Tensor:
        """a [N, R, C] · b [N, S, C]ᵀ, float32 [N, R, S], quantized along C."""
        return self.multiply(self.operands(a, b, use, layer), len(a))


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
    """The products of lanes whose recipes have one layout of attention, one a lane.

    first       the first lane's recipe: which operands are quantized and how they are made ready is that of all
    normalized  weights are divided by their sums before they are quantized
    exact       products are exact, as with `gemm = "exact"`
    slots       by the names that counts and reasons have
    """

    def __init__(self, recipes: Sequence[Attention], device: torch.device, backend: Backend, gemm: str) -> None:
        gemm = "exact" if GEMMS.get(gemm, GEMMS["fp32"]).fp8 else gemm  # its kernels multiply in BF16
        self.first, self.exact = recipes[0], gemm == "exact"
        self.normalized = {"normalized": True, "unnormalized": False}[self.first.weights]
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
        bf16 = [BF16] * len(recipes)
        slots = [slot_of(bf16, 0, device, backend)] * 2
        self.plain = Product(slots, (0, 0), pick(str(device), bf16, bf16)[0])


class CoreUse(NamedTuple):
    """One use of the core by a layer; `numerics` are at the moment of the pass. causal: no query sees later keys. save:
    the backward pass will follow."""

    core: AttentionCore
    numerics: LaneStages
    layer: int
    causal: bool
    save: bool = True

    def product(self, name: str) -> Product:
        """The product of this name, in BF16 in the steps in which the recipe's stages are."""
        of = stages_of(name)
        return self.core.plain if all(map(self.numerics.is_precise, of)) else self.core.products[name]

    def multiplied(self, name: str, a: Tensor, b: Tensor) -> Tensor:
        """The product of this name of a [N, R, C] and b [N, S, C], float32 [N, R, S]."""
        return self.product(name)(a, b, self.numerics.use(self.layer), self.layer)


class Scores(NamedTuple):
    """The product S, and its operands as they were quantized: what S is made anew of in the backward pass."""

    product: Product
    operands: list[Operand]


def attention_core(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, core: AttentionCore, numerics: LaneStages, layer: int
) -> Tensor:
    """softmax(q kᵀ / sqrt d) v of [N, T, d] each, N = lanes × batch × heads, in v's dtype; layer keys the random
    numbers."""
    save = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    return _Core.apply(q, k, v, CoreUse(core, numerics, layer, causal, save))


class _Core(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, use: CoreUse) -> Tensor:
        ctx.use, ctx.dtypes = use, (q.dtype, k.dtype, v.dtype)
        if use.core.first.smooth_k:
            k = k.to(torch.float32)
            k = k - k.mean(dim=1, keepdim=True)
        ctx.kernels = None if use.numerics.counting else _CORE.kernels(q, k, v, use)
        if ctx.kernels:
            out, ctx.kept = ctx.kernels.forward(q, k, v, use)
            ctx.save_for_backward(out)
            return out
        out, ctx.kept = _forward(q, k, v, use)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        *operands, out = ctx.saved_tensors
        if ctx.kernels:
            return *ctx.kernels.backward(g, out, ctx.kept, ctx.use, ctx.dtypes), None
        q, k, v = operands
        gradients = _backward(g, q, k, v, out, ctx.kept, ctx.use)
        return *(x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), None


def _forward(q: Tensor, k: Tensor, v: Tensor, use: CoreUse) -> tuple[Tensor, Scores]:
    product = use.product("scores")
    kept = Scores(product, product.operands(_wide(q), _wide(k), use.numerics.use(use.layer), use.layer))
    scores = _scores(kept, q, use.causal)
    if use.core.normalized:
        out = use.multiplied("context", torch.softmax(scores, dim=-1), _wide(v).mT)
    else:
        weights = torch.exp(scores - scores.amax(dim=2, keepdim=True))
        out = use.multiplied("context", weights, _wide(v).mT) / weights.sum(dim=2, keepdim=True)
    return out.to(v.dtype), kept


def _backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Scores, use: CoreUse
) -> tuple[Tensor, Tensor, Tensor]:
    g, scale = _wide(g).contiguous(), q.shape[-1] ** -0.5
    weights = torch.softmax(_scores(kept, q, use.causal), dim=-1)
    mean = lane_sum(g * out, 2)[..., None]
    dv = use.multiplied("dv", weights.mT, g.mT)
    d_scores = weights * (use.multiplied("dp", g, _wide(v)) - mean)
    dq = use.multiplied("dq", d_scores, _wide(k).mT) * scale
    return dq, use.multiplied("dk", d_scores.mT, _wide(q).mT) * scale, dv


def _wide(x: Tensor) -> Tensor:
    return x.detach().to(torch.float32)


def _scores(kept: Scores, q: Tensor, causal: bool) -> Tensor:
    """q kᵀ / sqrt d, float32 [N, T, T]; -inf for keys that come later, where causal."""
    scores = kept.product.multiply(kept.operands, len(q)) * q.shape[-1] ** -0.5
    if not causal:
        return scores
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf"))
