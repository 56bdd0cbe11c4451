"""The products of a layer whose lanes compute alike: forward, what the backward pass takes of it, and backward.

Each is computed by the stage that the layer takes now (stages.py); a clip that is learned bounds operands before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from fp4dse.dse import STAGES
from fp4dse.kernels.lanes.stages import LaneStages
from fp4dse.kernels.learned import Inside, clipped
from fp4dse.kernels.ops.attention import attention, heads_joined
from fp4dse.kernels.ops.attention_core import attention_core
from fp4dse.kernels.ops.products import Finish
from fp4dse.kernels.quant.operand.records import Operand, Rotation, Saved, Stored
from fp4dse.kernels.quant.operand.stored import restored, stored
from fp4dse.kernels.stage import Stage, operands_of_both


class Forward(NamedTuple):
    """A forward product and what its backward products need.

    y                 the product with its bias, [L, M, N] of the numerics' dtype
    x, w              what the backward products are computed from, [L, M, K] and [L, N, K]; x may be stored as codes
    saved_x, saved_w  for `LaneProducts.backward`; None where the gradient passes straight through
    """

    y: Tensor
    x: Tensor | Stored
    w: Tensor
    saved_x: Saved | None
    saved_w: Saved | None


class LaneProducts(LaneStages):
    """The products of lanes that compute alike in a layer, and their attention."""

    filled: Tensor | None = None
    """Rows of the operands that are filled, int64 [L], where those after them are zeros (experts.py); None: all may
    be."""

    def gemm(
        self,
        stage: str,
        layer: int,
        a: Tensor,
        a_dim: int,
        b: Tensor | Stored,
        b_dim: int,
        dtype: torch.dtype = torch.float32,
        out: Tensor | None = None,
        made: Operand | None = None,
    ) -> Tensor:
        """The product of one stage, contracted over dimension `a_dim` of a and `b_dim` of b (1 or 2): [L, R, S] of a
        dtype. out: where it is written, of its shape and dtype and each lane in one piece; None: a new tensor.

        a, b: float32 or bfloat16 [L, ·, ·], in the order of STAGES[stage]; b also codes that are converted, with what
        pads their rows. `layer` keys the random numbers. made: a quantized already, by `both_of_gradient`.
        """
        of, use = self.stage(stage, layer), self.use(layer)
        rotation, (first, second) = of.draw_rotation(use), STAGES[stage]
        if isinstance(b, Tensor):
            of.choose(a, b, use, (a_dim, b_dim))
        use = replace(use, takes_fp8=of.takes_fp8(a, b, (a_dim, b_dim), self.filled))
        qa = of.operand(first, a, replace(use, dim=a_dim), rotation) if made is None else made
        qb = of.operand(second, b, replace(use, dim=b_dim), rotation)
        return of.multiply(qa, qb, self.filled, Finish(dtype=dtype, out=out))

    def both_of_gradient(self, layer: int, g: Tensor, x: Tensor | Stored, w: Tensor) -> tuple[Operand, ...]:
        """g [L, M, N] as dgrad and wgrad take it, for `gemm`, from one read of it; empty where they are made apart.

        x, w: what it is multiplied with.
        """
        if self.backend.both_fp8 is None:
            return ()
        dgrad, wgrad, use = self.stage("dgrad", layer), self.stage("wgrad", layer), self.use(layer)
        if dgrad.takes_fp8(g, w, (2, 1), self.filled) and wgrad.takes_fp8(g, x, (1, 1), self.filled):
            return operands_of_both("g", (dgrad, wgrad), g, replace(use, takes_fp8=True))
        return ()

    def forward(
        self,
        layer: int,
        x: Tensor,
        w: Tensor,
        save: tuple[bool, bool] = (False, False),
        copy_x: bool = True,
        b: Tensor | None = None,
    ) -> Forward:
        """Y = X Wᵀ + b of x [L, M, K], w [L, N, K] and b [L, N] or None. save: whether `backward` will be called for x,
        for w. copy_x: False leaves x as it is in what is returned, for callers that call `requantize_x` later."""
        stage, use = self.stage("fprop", layer), self.use(layer)
        rotation = stage.draw_rotation(use)
        stage.choose(x, w, use, (2, 2))
        use = replace(use, takes_fp8=stage.takes_fp8(x, w, (2, 2), self.filled))
        is_made_again = self.journal is not None and self.journal.mode == "first"  # of this pass nothing is kept
        copies = copy_x and "wgrad" in self.requantized and not is_made_again
        packs = copies and self.keeps_codes(layer)
        use_x = replace(use, save=save[0], keeping=packs, clip=self._bounds("x", layer))
        qx = stage.operand("x", x, use_x, rotation)
        qw = stage.operand("w", w, replace(use, save=save[1], clip=self._bounds("w", layer)), rotation)
        back_x: Tensor | Stored = x
        if copies:
            back_x = self._copy(stage, qx, rotation, x.shape[2], packs)
        back_w = qw.restored(rotation, w.shape[2]) if "dgrad" in self.requantized else w
        y = stage.multiply(qx, qw, self.filled, Finish(bias=b, dtype=self.dtype))
        return Forward(y, back_x, back_w, qx.saved, qw.saved)

    @staticmethod
    def _copy(stage: Stage, x: Operand, rotation: Rotation | None, length: int, packs: bool) -> Tensor | Stored:
        """The forward's copy of x, [L, M, length], or its codes."""
        if packs:
            return x.stored or stored(x.terms[0], stage.slots["x"].each)
        return x.restored(rotation, length)

    def restored_x(self, layer: int, x: Stored, length: int) -> Tensor | Stored:
        """The x that backward products are computed from, float32 [L, M, length], of the one that `forward` stored; its
        codes where these are converted."""
        if self.converts(layer):
            return x
        stage = self.stage("fprop", layer)
        rotation = stage.draw_rotation(self.use(layer))
        term = restored(x, stage.slots["x"].each)
        return Operand([term], term.values).restored(rotation, length)

    def requantize_x(self, layer: int, x: Tensor) -> tuple[Tensor | Stored, Saved | None]:
        """`Forward.x` and `Forward.saved_x` of x [L, M, K], made again."""
        stage, converts = self.stage("fprop", layer), self.converts(layer)
        use = replace(self.use(layer), counting=False, save=True, keeping=converts)
        rotation, use = stage.draw_rotation(use), replace(use, clip=self._bounds("x", layer))
        operand = stage.operand("x", x, use, rotation)
        if "wgrad" not in self.requantized:
            return x, operand.saved
        return self._copy(stage, operand, rotation, x.shape[2], converts), operand.saved

    def backward(self, operand: str, layer: int, g: Tensor, saved: Saved | None) -> Tensor:
        """The gradient of `x` or `w` [L, ·, K] from g, that of what the forward product took for it; saved: as
        `forward` returned it."""
        if saved is None:
            return g
        use = replace(self.use(layer), counting=False)  # in the forward pass alone
        return self.stage("fprop", layer).backward(operand, g, saved, use)

    def clipped(self, operand: str, layer: int, x: Tensor) -> Tensor:
        """An operand [L, …] as it enters its quantizer: clamped where a clip is learned."""
        alpha = self.clip(operand, layer)
        if alpha is None or (unit := self.stage("fprop", layer).slots[operand].lsq) is None:
            return clipped(x, alpha)

        def decoded(x: Tensor) -> Tensor:
            return self.decoded(operand, layer, x.reshape(len(x), -1, x.shape[-1])).view(x.shape)

        return clipped(x, alpha, Inside(decoded, unit))

    def decoded(self, operand: str, layer: int, x: Tensor) -> Tensor:
        """The operand that the forward product takes for x [L, ·, K] where all lanes compute alike, decoded and rotated
        back, float32, as under evaluation, with the same random signs in every step; NaN in lanes where it is not
        block-scaled. No state changes."""
        stage, use = self.stage("fprop", layer), replace(self.use(layer), training=False, evaluating=True, fixed=True)
        if stage.slots[operand].maxima is None:
            return torch.full_like(x, torch.nan)
        rotation, use = stage.draw_rotation(use), replace(use, clip=self._bounds(operand, layer))
        x = clipped(x, self.clip(operand, layer))
        return stage.operand(operand, x, use, rotation).restored(rotation, x.shape[2])

    def _bounds(self, operand: str, layer: int) -> Tensor | None:
        """`clip` as the tensor maxima of an operand that is clamped already, [L]."""
        alpha = self.clip(operand, layer)
        return None if alpha is None else alpha.detach()[:, 0]

    def attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, heads: int = 1) -> Tensor:
        """softmax(q kᵀ / sqrt d) v of [N, T, d] each, N = lanes × batch × heads, in v's dtype: [N / heads, T, heads ·
        d]. layer: of the projections of q, k and v; it keys the random numbers. causal: to no later key."""
        if self.core is None or self.evaluation == "bf16":
            return attention(q, k, v, causal, heads)
        return heads_joined(attention_core(q, k, v, causal, self.core, self, layer), heads)
