"""Layers with a lane axis whose three GEMMs are quantized slot by slot."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4dse.dse.place import Place
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.operand import Kept
from fp4dse.kernels.ops.columns import Window, col2im, im2col
from fp4dse.kernels.ops.sums import wide_sum

ANYWHERE = Place()
NOTHING_KEPT = (None,) * len(Kept._fields)


class _QuantLinear(torch.autograd.Function):
    """Y = X Wᵀ with each of the six operands quantized along its own contraction axis.

    Backward operands are made from the unquantized ones, or from the forward's copies where the recipe says so. The
    gradients pass through the forward's quantizers as the recipe's estimator says: straight, unless it names another.

    Quantizers and accumulators are FP32. The bias is added to the accumulator, and what leaves is rounded once, to
    `numerics.dtype`; the gradient of x to x's own. x is kept for the backward pass as it came, and with a window X is
    made of it again.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, w: Tensor, b: Tensor | None, numerics: LaneNumerics, layer: int, window: Window | None
    ) -> Tensor:
        rows = _columns(x, window, numerics, "fprop", layer) if window else x
        looks_back = numerics.looks_back(layer)
        ctx.again = window is not None and (not looks_back or numerics.repeats(layer))
        keep_x, keep_w = ctx.needs_input_grad[:2]
        out = numerics.forward(layer, rows, w, keep=(keep_x and not ctx.again, keep_w), copies_x=not ctx.again)
        kept = x if ctx.again else out.x
        ctx.save_for_backward(kept, out.w, *(out.kept_x or NOTHING_KEPT), *(out.kept_w or NOTHING_KEPT))
        ctx.numerics, ctx.layer, ctx.window, ctx.shape, ctx.dtype = numerics, layer, window, x.shape, x.dtype
        ctx.looks_back = looks_back
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
            if ctx.again:
                x = _columns(x, ctx.window, numerics, "fprop" if ctx.looks_back else "wgrad", layer)
                if ctx.looks_back:
                    x, kept_x = numerics.again(layer, x)
            if ctx.needs_input_grad[1]:
                dw = numerics.through("w", layer, numerics.gemm("wgrad", layer, g, 1, x, 1), kept_w)  # [L, N, K]
            x = None  # columns take much, and so do their gradients
            if ctx.needs_input_grad[0]:
                dx = numerics.through("x", layer, numerics.gemm("dgrad", layer, g, 2, w, 1), kept_x)
                dx = col2im(dx, ctx.window, ctx.shape, ctx.dtype) if ctx.window else dx.to(ctx.dtype)
            if ctx.needs_input_grad[2]:
                db = wide_sum(g, 1)
        return dx, dw, db, None, None, None


def _columns(x: Tensor, window: Window, numerics: LaneNumerics, stage: str, layer: int) -> Tensor:
    """The columns of images x, rounded already if that is all that the stage does to them."""
    return im2col(x.to(numerics.enough(stage, layer, x.dtype)), window)


def product(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    numerics: LaneNumerics,
    layer: int,
    window: Window | None = None,
) -> Tensor:
    """X Wᵀ + b of w [L, N, K] and b [L, N], quantized: [L, M, N] of `numerics.dtype`, which x is rounded to.

    X [L, M, K] is x itself, or the columns of images x [L, B, H, W, C] that the window sees.
    """
    return _QuantLinear.apply(x.to(numerics.dtype), w, b, numerics, layer, window)


class _AddBias(torch.autograd.Function):
    """y + b over the rows, [L, M, N] + [L, N], in y's dtype; the gradient of b is summed in a fixed order."""

    @staticmethod
    def forward(ctx, y: Tensor, b: Tensor) -> Tensor:
        return (y + b[:, None, :]).to(y.dtype)

    @staticmethod
    def backward(ctx, g: Tensor):
        return g, wide_sum(g, 1)


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
        rows = x.reshape(x.shape[0], -1, x.shape[-1])  # [L, M, K]
        y = product(rows, self.weight, self.bias, self.numerics, self.layer)
        return y.view(*x.shape[:-1], y.shape[-1])
