"""Layers with a lane axis, whose three products are quantized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4dse.dse.layers.place import Place
from fp4dse.kernels.autograd import Function
from fp4dse.kernels.block_scales import BlockScales, trained_scales
from fp4dse.kernels.destination import destination_of
from fp4dse.kernels.factors import Factors, layers_of_factors, trained_factors
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.learned import PREFIX, ClipParameter, clip_parameter, starts
from fp4dse.kernels.ops.affine import affine
from fp4dse.kernels.ops.columns import Window, col2im, im2col
from fp4dse.kernels.ops.rounded import rounded
from fp4dse.kernels.ops.sums import wide_sum
from fp4dse.kernels.quant.operand.records import Stored

ANYWHERE = Place()
WHY_IMAGES = "convolutions: they keep images, and columns of these are made and quantized again"


class _QuantLinear(Function[Tensor]):
    """Y = X Wᵀ + b, each of the six operands quantized along its own contraction axis.

    Backward operands are made from the unquantized ones, or from the forward pass's quantized copies where the recipe
    says so. Gradients pass through the forward quantizers as the recipe's estimator says: straight, unless it names
    another.

    Quantizers and accumulators are FP32. The bias is added to the accumulator, and what leaves is rounded once, to
    `numerics.dtype`; the gradient of x to x's own. What all products of a tensor round it to is made of it first.
    With a window, x are images and X their columns; images are smaller, so they are saved where their columns can be
    made and quantized again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, numerics: LaneNumerics, layer: int, window: Window | None
    ) -> Tensor:
        rows = _columns(x, window, numerics, "fprop", layer) if window else _rounded("x", x, numerics, layer)
        ctx.destination = destination_of(w)
        w = _rounded("w", w, numerics, layer)
        ctx.needs_forward_x = numerics.needs_forward_x(layer)
        ctx.saves_images = window is not None and (not ctx.needs_forward_x or numerics.can_requantize_x(layer))
        if ctx.saves_images and numerics.keeps_codes(layer):
            numerics.unpacked.add(WHY_IMAGES)
        save_x, save_w = ctx.needs_input_grad[:2]
        save = save_x and not ctx.saves_images, save_w
        out = numerics.forward(layer, rows, w, save, not ctx.saves_images, b)
        codes = out.x if isinstance(out.x, Stored) else None
        saved = codes, out.saved_x, out.saved_w
        ctx.kinds = [type(of) if of else None for of in saved]
        kept = x if ctx.saves_images else None if codes else out.x
        ctx.save_for_backward(kept, out.w, *(t for of in saved if of for t in of))
        ctx.numerics, ctx.layer, ctx.window, ctx.shape, ctx.dtype = numerics, layer, window, x.shape, x.dtype
        return out.y  # [L, M, N]

    @staticmethod
    @once_differentiable  # operands are detached: a derivative of this would be wrong
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w, *saved = ctx.saved_tensors
        codes, saved_x, saved_w = _unpacked(ctx.kinds, iter(saved))
        numerics, layer, dx, dw, db = ctx.numerics, ctx.layer, None, None, None
        if ctx.needs_input_grad[2]:
            db = wide_sum(g, 1)
        g = _rounded("g", g, numerics, layer)
        with torch.autocast(g.device.type, enabled=False):  # or it would choose the products' dtype
            if codes is not None:
                x = numerics.restored_x(layer, codes, w.shape[2])
            if ctx.saves_images:
                x = _columns(x, ctx.window, numerics, "fprop" if ctx.needs_forward_x else "wgrad", layer)
                if ctx.needs_forward_x:
                    x, saved_x = numerics.requantize_x(layer, x)
            wants_both = all(ctx.needs_input_grad[:2])
            of_dx, of_dw = (wants_both and numerics.both_of_gradient(layer, g, x, w)) or (None, None)
            if ctx.needs_input_grad[1]:
                to = None if ctx.destination is None or saved_w or codes is not None else ctx.destination.free
                dw = numerics.gemm("wgrad", layer, g, 1, x, 1, out=to, made=of_dw)
                dw = dw[:, :, : w.shape[2]]  # of codes also what pads x
                dw = numerics.backward("w", layer, dw, saved_w)  # [L, N, K]
                dw = dw if ctx.destination is None else ctx.destination.take(dw)
            x = of_dw = None  # columns take much, and so do their gradients
            if ctx.needs_input_grad[0]:
                dtype = torch.float32 if ctx.window or saved_x else ctx.dtype
                dx = numerics.backward(
                    "x", layer, numerics.gemm("dgrad", layer, g, 2, w, 1, dtype, made=of_dx), saved_x
                )
                dx = col2im(dx, ctx.window, ctx.shape, ctx.dtype) if ctx.window else dx.to(ctx.dtype)
        return dx, dw, db, None, None, None


def _rounded(operand: str, x: Tensor, numerics: LaneNumerics, layer: int) -> Tensor:
    """x, w or g, rounded to what all products that take it round it to first: once, and what is saved is smaller."""
    return rounded(x, numerics.common_dtype(operand, layer, x.dtype))


def _columns(x: Tensor, window: Window, numerics: LaneNumerics, stage: str, layer: int) -> Tensor:
    """The columns of images x, rounded beforehand where the stage rounds them anyway."""
    return im2col(x.to(numerics.input_dtype(stage, layer, x.dtype)), window)


def _unpacked(kinds: Sequence[Any], tensors: Iterator[Tensor]) -> Iterator[Any]:
    """Records of these kinds, of the tensors that were saved for them one after the other."""
    for kind in kinds:
        yield kind(*(next(tensors) for _ in kind._fields)) if kind else None


def product(
    x: Tensor, w: Tensor, b: Tensor | None, numerics: LaneNumerics, layer: int, window: Window | None = None
) -> Tensor:
    """X Wᵀ + b with quantized operands, [L, M, N] of `numerics.dtype`, which x is rounded to first.

    X [L, M, K]: x itself, or the columns of images x [L, B, H, W, C] under the window. w: [L, N, K], b: [L, N].
    """
    x, split = x.to(numerics.dtype), numerics.split(layer)
    if split is None:
        return _product(x, w, b, numerics, layer, window)
    biases = [None] * len(split.groups) if b is None else split.cut(b)
    groups = zip(split.groups, split.cut(x), split.cut(w), biases, strict=True)
    return split.join([_product(x, w, b, group.numerics, layer, window) for group, x, w, b in groups])


def _product(
    x: Tensor, w: Tensor, b: Tensor | None, numerics: LaneNumerics, layer: int, window: Window | None
) -> Tensor:
    """The same of lanes that compute alike, their operands clamped first where a clip is learned."""
    x, w = numerics.clipped("x", layer, x), numerics.clipped("w", layer, w)
    return _QuantLinear.apply(x, w, b, numerics, layer, window)


class _AddBias(Function[Tensor]):
    """y + b over the rows, [L, M, N] + [L, N], in y's dtype; the gradient of b is summed in a fixed order."""

    @staticmethod
    def forward(_ctx: Any, y: Tensor, b: Tensor) -> Tensor:
        return (y + b[:, None, :]).to(y.dtype)

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        return g, wide_sum(g, 1)


def add_bias(y: Tensor, b: Tensor) -> Tensor:
    """y [L, M, N] + b float32 [L, N], with a gradient of b that does not depend on the number of lanes."""
    return _AddBias.apply(y, b)


class QuantLinear(nn.Module):
    """A linear layer of L lanes: x [L, …, in] -> [L, …, out], every lane with its own weights and its own recipe.

    x is rounded to `numerics.dtype`, and the output has that dtype.

    weight  [L, out, in]; bias: [L, out] or None
    layer   keys the random numbers of this layer: no two layers of a model may share it
    place   where in the model it stands: a recipe may keep layers at some places precise

    An operand for which lanes learn a clip has the parameter `clip_x` or `clip_w`, [L, 1]. Of a weight with trained
    factors, `weight` is the rest and `factors` has these; of one with trained scales `block_scales` has them.

    Sizes that the block does not divide are padded with zeros inside.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, numerics: LaneNumerics, layer: int, place: Place = ANYWHERE
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.numerics, self.layer, self.place = numerics, layer, place
        numerics.add_layer(layer, place)
        for operand, clips in numerics.clips(layer).items():
            alpha = clip_parameter(clips, weight)
            self.register_parameter(PREFIX + operand, alpha)
            numerics.learned[operand, layer] = alpha
        self.factors: Factors | None = None
        of = trained_factors(numerics.recipes)
        if of is not None and layer not in numerics.precise_layers:
            numerics.precise_layers.update(layers_of_factors(layer))
            self.factors = Factors(weight, of)
            self.split()
        block = trained_scales(numerics.recipes)
        trains = block is not None and layer not in numerics.precise_layers
        self.block_scales = BlockScales(weight, block) if block is not None and trains else None

    def split(self) -> None:
        """Take the factors, if there are any, off the weight as it is now."""
        if self.factors is not None:
            self.factors.take_from(self.weight, self.numerics.seeds, self.layer)

    @torch.no_grad()
    def begin(self, operand: str) -> None:
        """Set the clip of an operand to its start, by the weight as it is now."""
        alpha = self.get_parameter(PREFIX + operand)
        assert isinstance(alpha, ClipParameter)
        alpha.copy_(starts(alpha.of_lanes, self.weight))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], -1, x.shape[-1])  # [L, M, K]
        y = self.product(rows)
        return y.view(*x.shape[:-1], y.shape[-1])

    def product(
        self,
        x: Tensor,
        window: Window | None = None,
        numerics: LaneNumerics | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        """`product` with the whole weight, also that in factors. numerics, weight (without the part in factors): the
        layer's own, unless others are given."""
        numerics = numerics or self.numerics
        weight = self.weight if weight is None else weight
        if self.block_scales is not None:
            in_bf16 = numerics.evaluation == "bf16"
            decoded = (lambda w: w) if in_bf16 else partial(numerics.decoded_weight, self.layer)
            weight = self.block_scales.applied(weight, decoded)
        y = product(x, weight, self.bias, numerics, self.layer, window)
        if self.factors is None:
            return y
        first, second = layers_of_factors(self.layer)
        mixed = product(x, self.factors.v, None, numerics, first, window)
        mixed = mixed if self.factors.s is None else affine(mixed, self.factors.s)
        return y + product(mixed, self.factors.u, None, numerics, second)
