"""Group norm of images, channels last, with the gain and the shift that follow it and the SiLU after those.

    out = (x - mean) / sqrt(variance + eps)        y = out · gain + shift
    dx = (g' - mean g' - out · mean(g' out)) / sqrt(variance + eps)        g' = g · gain

Sums go over pixels first, [N, P, C] -> [N, C], then over the channels of a group; so the sums of g and g · out that are
the gradients of shift and gain also give both means, by Σ over channels of gain · d_shift and gain · d_gain. Sums,
dtypes and roundings are those of `layer_norm`. Batch norm is this with the pixels of a lane as those of one image.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.layer_norm import EPS, scaled
from fp4dse.kernels.ops.silu import silu
from fp4dse.kernels.ops.sums import divided, lane_sum

_GROUP_NORM = Operation(__name__)


class _GroupNorm(Function[tuple[Tensor, Tensor, Tensor]]):
    """The norm of x [N, P, C] over P and each of `groups` of neighbouring channels, and its moments [N, groups]. Where
    there are kernels, also SiLU of it; `smooths` is for them alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor | None, shift: Tensor | None, groups: int, smooths: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if kernels := _GROUP_NORM.kernels(x, groups):
            y, mean, variance, inverse = kernels.group_norm(x, groups, gain, shift, EPS, smooths)
        else:
            wide = x.to(torch.float32)
            mean = _group_mean(lane_sum(wide, 1), x, groups)
            centred = wide - _of_channels(mean, x)
            variance = _group_mean(lane_sum(centred * centred, 1), x, groups)
            inverse = 1.0 / sqrt(variance + EPS)
            y = scaled(centred * _of_channels(inverse, x), gain, shift).to(x.dtype)
        ctx.save_for_backward(x, gain, shift, mean, inverse)
        ctx.groups, ctx.smooths = groups, smooths
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        x, gain, shift, mean, inverse = ctx.saved_tensors
        if kernels := _GROUP_NORM.kernels(x, ctx.groups):
            of_all = kernels.group_norm_gradient(x, ctx.groups, mean, inverse, gain, shift, g, ctx.smooths)
            return *of_all, None, None
        inverse, g = _of_channels(inverse, x), g.to(torch.float32)
        out = (x.to(torch.float32) - _of_channels(mean, x)) * inverse
        along, level = sums = lane_sum(g * out, 1), lane_sum(g, 1)  # [N, C]
        if gain is not None:
            along, level, g = along * gain, level * gain, g * gain[:, None]
        along, level = (_of_channels(_group_mean(t, x, ctx.groups), x) for t in (along, level))
        dx = ((g - level - out * along) * inverse).to(x.dtype)
        d_gain, d_shift = (None if gain is None else t.to(gain.dtype) for t in sums)
        return dx, d_gain, d_shift, None, None


def batch_norm(x: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x [L, M, C], each channel of a lane to mean 0 and variance 1, · gain [L, C] + shift [L, C]; its means and
    variances [L, C]."""
    return _GroupNorm.apply(x, gain, shift, x.shape[-1], False)


def group_norm(x: Tensor, groups: int, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """x [L, B, H, W, C]: each image's `groups` of neighbouring channels to mean 0 and variance 1, then · gain [L, B, C]
    + shift [L, B, C], of one dtype, if there are."""
    return _GroupNorm.apply(*_images(x, gain, shift), groups, False)[0].view_as(x)


def smooth_group_norm(x: Tensor, groups: int, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """SiLU of `group_norm`."""
    if _GROUP_NORM.kernels(x, groups):
        return _GroupNorm.apply(*_images(x, gain, shift), groups, True)[0].view_as(x)
    return silu(group_norm(x, groups, gain, shift))


def _images(x: Tensor, *of_each: Tensor | None) -> tuple[Tensor | None, ...]:
    """x [N, P, C], and what each image has, [N, C]."""
    flat = (None if t is None else t.flatten(0, 1) for t in of_each)
    return x.reshape(x.shape[0] * x.shape[1], -1, x.shape[-1]), *flat


def _group_mean(sums: Tensor, x: Tensor, groups: int) -> Tensor:
    """Sums [N, C] over the pixels of what is as large as x -> means [N, groups]."""
    of_group = x.shape[2] // groups
    return divided(lane_sum(sums.view(-1, groups, of_group), 2), x.shape[1] * of_group)


def _of_channels(moment: Tensor, x: Tensor) -> Tensor:
    """Numbers of groups, [N, groups] -> the same for each of their channels, beside pixels, [N, 1, C]."""
    return moment.repeat_interleave(x.shape[2] // moment.shape[1], dim=1)[:, None]
