"""Layers with a lane axis whose three GEMMs are quantized slot by slot."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4dse.dse.place import Place
from fp4dse.kernels.arithmetic.reduce import lane_sum
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.operand import Kept

ANYWHERE = Place()
NOTHING_KEPT = (None,) * len(Kept._fields)


class _QuantLinear(torch.autograd.Function):
    """Y = X Wᵀ with each of the six operands quantized along its own contraction axis.

    Backward operands are made from the unquantized ones, or from the forward's copies where the recipe says so. The
    gradients pass through the forward's quantizers as the recipe's estimator says: straight, unless it names another.

    Quantizers and accumulators are FP32. The bias is added to the accumulator, and what leaves is rounded once, to
    `numerics.dtype`; the gradient of x to x's own. x is kept for the backward pass as it came.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, b: Tensor | None, numerics: LaneNumerics, layer: int) -> Tensor:
        out = numerics.forward(layer, x, w, keep=ctx.needs_input_grad[:2])
        ctx.save_for_backward(out.x, out.w, *(out.kept_x or NOTHING_KEPT), *(out.kept_w or NOTHING_KEPT))
        ctx.numerics, ctx.layer, ctx.dtype = numerics, layer, x.dtype
        y = out.y if b is None else out.y + b[:, None, :]
        return y.to(numerics.dtype)  # [L, M, N]

    @staticmethod
    @once_differentiable  # operands are detached: a derivative of this would be wrong
    def backward(ctx, g: Tensor):
        x, w, *kept = ctx.saved_tensors
        numerics, layer, dx, dw, db = ctx.numerics, ctx.layer, None, None, None
        halves = kept[: len(kept) // 2], kept[len(kept) // 2 :]
        kept_x, kept_w = (Kept(*half) if half[0] is not None else None for half in halves)
        with torch.autocast(g.device.type, enabled=False):  # or it would choose the products' dtype
            if ctx.needs_input_grad[0]:
                dx = numerics.through("x", layer, numerics.gemm("dgrad", layer, g, 2, w, 1), kept_x).to(ctx.dtype)
            if ctx.needs_input_grad[1]:
                dw = numerics.through("w", layer, numerics.gemm("wgrad", layer, g, 1, x, 1), kept_w)  # [L, N, K]
            if ctx.needs_input_grad[2]:
                db = lane_sum(g.to(torch.float32), 1)
        return dx, dw, db, None, None


class _AddBias(torch.autograd.Function):
    """y + b over the rows, [L, M, N] + [L, N], in y's dtype; the gradient of b is summed in a fixed order."""

    @staticmethod
    def forward(ctx, y: Tensor, b: Tensor) -> Tensor:
        return (y + b[:, None, :]).to(y.dtype)

    @staticmethod
    def backward(ctx, g: Tensor):
        return g, lane_sum(g.to(torch.float32), 1)


def add_bias(y: Tensor, b: Tensor) -> Tensor:
    """y [L, M, N] + b float32 [L, N], with a gradient of b that does not depend on the number of lanes."""
    return _AddBias.apply(y, b)


class QuantLinear(nn.Module):
    """A linear layer of L lanes: x [L, …, in] -> [L, …, out], every lane with its own weights and its own recipe.

    x is rounded to `numerics.dtype` if it is not of it, and the output is of it.

    weight: [L, out, in], bias: [L, out] or None. `layer` keys this layer's random numbers: no two layers of a model
    may share it. `place` is where in the model it stands: there the recipe may keep it precise. Sizes that the block
    does not divide are padded with zeros inside.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, numerics: LaneNumerics, layer: int, place: Place = ANYWHERE
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.numerics, self.layer, self.place = numerics, layer, place
        numerics.add_layer(layer, place)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.to(self.numerics.dtype).reshape(x.shape[0], -1, x.shape[-1])  # [L, M, K]
        y = _QuantLinear.apply(rows, self.weight, self.bias, self.numerics, self.layer)
        return y.view(*x.shape[:-1], y.shape[-1])
