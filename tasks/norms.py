"""Norms of image models: layer, group and batch norm with the gain and the shift that follow them.

    out = (x - mean) / sqrt(variance + eps)        y = out · gain + shift
    dx = (g' - mean g' - out · mean(g' out)) / sqrt(variance + eps)        g' = g · gain

Library norms choose the order of their sums by the size of the whole tensor, and take another inverse root on each
device. Here sums are lane sums, and all else is single IEEE operations. Group and batch norm sum over pixels first,
[N, P, C] -> [N, C], then over the channels of a group; so the sums of g and g · out that are the gradients of shift and
gain also give both means, by Σ over channels of gain · d_shift and gain · d_gain.

Whatever dtype comes in, they compute in FP32 and round what leaves once, to that dtype; so do their gradients. On a GPU
they are kernels (`kernels.fused.layer_norms`, `kernels.fused.group_norms`), with the bits of what is written out here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics, lane_sum, silu
from fp4dse.kernels.arithmetic.grid import sqrt
from fp4dse.kernels.arithmetic.reduce import wide_sum
from fp4dse.kernels.devices import has_kernels

EPS = 1e-5


def divided(total: Tensor, count: int) -> Tensor:
    """total / count. By a number, a GPU would multiply with its inverse."""
    return total / torch.full_like(total, count)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, shift: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.shifts = shift is not None
        y = x.to(torch.float32) * gain[:, None]
        return (y if shift is None else y + shift[:, None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, gain = ctx.saved_tensors
        d_shift = wide_sum(g, 1).to(gain.dtype) if ctx.shifts else None
        g, dtype = g.to(torch.float32), gain.dtype
        return (g * gain[:, None]).to(x.dtype), lane_sum(g * x, 1).to(dtype), d_shift


def affine(x: Tensor, gain: Tensor, shift: Tensor | None = None) -> Tensor:
    """x [N, M, C] · gain [N, C] + shift [N, C]."""
    return _Affine.apply(x, gain, shift)


def _layer_kernels(h: Tensor) -> Any:
    """The module of the kernels, if h is where they run and its rows are not too long for them."""
    if not has_kernels(h):
        return None
    from fp4dse.kernels.fused import layer_norms

    return layer_norms if layer_norms.why_not(h) is None else None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
        if kernels := _layer_kernels(h):
            _, y, mean, inverse = kernels.layer_norm(h, gain, shift, EPS)
        else:
            wide = h.to(torch.float32)
            mean = _row_mean(wide)
            centred = wide - mean
            inverse = 1.0 / sqrt(_row_mean(centred * centred) + EPS)
            y = _scaled(centred * inverse, gain, shift).to(h.dtype)
        ctx.save_for_backward(h, gain, mean, inverse)
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        h, gain, mean, inverse = ctx.saved_tensors
        if kernels := _layer_kernels(h):
            return kernels.layer_norm_gradient(h, mean, inverse, gain, g)
        out, g = (h.to(torch.float32) - mean) * inverse, g.to(torch.float32)
        d_gain = d_shift = None
        if gain is not None:
            d_gain, d_shift = (lane_sum(t, t.dim() - 2).to(gain.dtype) for t in (g * out, g))
            g = g * gain[..., None, :]
        return ((g - _row_mean(g) - out * _row_mean(g * out)) * inverse).to(h.dtype), d_gain, d_shift


def layer_norm(h: Tensor, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """h [..., T, D] over the last axis, then · gain [..., D] + shift [..., D], of one dtype, if there are."""
    return _LayerNorm.apply(h, gain, shift)


class _AddedLayerNorm(torch.autograd.Function):
    """On a GPU: the sum is read while it is there, and its two gradients are added where one is made."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, branch: Tensor, gain: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from fp4dse.kernels.fused import layer_norms

        h, y, mean, inverse = layer_norms.layer_norm(h, gain, shift, EPS, branch)
        ctx.save_for_backward(h, gain, mean, inverse)
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx: Any, passing: Tensor | None, g: Tensor) -> tuple[Tensor | None, ...]:
        from fp4dse.kernels.fused import layer_norms

        h, gain, mean, inverse = ctx.saved_tensors
        dh, d_gain, d_shift = layer_norms.layer_norm_gradient(h, mean, inverse, gain, g, passing)
        return dh, dh, d_gain, d_shift


def added_layer_norm(
    h: Tensor, branch: Tensor | None, gain: Tensor | None = None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h + branch, or h where there is none, and its layer norm as above; h, branch [..., T, D]."""
    if branch is not None and _layer_kernels(h):
        return _AddedLayerNorm.apply(h, branch, gain, shift)
    h = h if branch is None else h + branch
    return h, layer_norm(h, gain, shift)


def _row_mean(x: Tensor) -> Tensor:
    return divided(lane_sum(x, x.dim() - 1)[..., None], x.shape[-1])


def _scaled(out: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    return out if gain is None or shift is None else out * gain[..., None, :] + shift[..., None, :]


def _group_kernels(x: Tensor, groups: int) -> Any:
    if not has_kernels(x):
        return None
    from fp4dse.kernels.fused import group_norms

    return group_norms if group_norms.why_not(x, groups) is None else None


class _GroupNorm(torch.autograd.Function):
    """The norm of x [N, P, C] over P and each of `groups` of neighbouring channels, and its moments [N, groups]. Where
    there are kernels, also SiLU of it; `smooths` is for them alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor | None, shift: Tensor | None, groups: int, smooths: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if kernels := _group_kernels(x, groups):
            y, mean, variance, inverse = kernels.group_norm(x, groups, gain, shift, EPS, smooths)
        else:
            wide = x.to(torch.float32)
            mean = _group_mean(lane_sum(wide, 1), x, groups)
            centred = wide - _of_channels(mean, x)
            variance = _group_mean(lane_sum(centred * centred, 1), x, groups)
            inverse = 1.0 / sqrt(variance + EPS)
            y = _scaled(centred * _of_channels(inverse, x), gain, shift).to(x.dtype)
        ctx.save_for_backward(x, gain, shift, mean, inverse)
        ctx.groups, ctx.smooths = groups, smooths
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return y, mean, variance

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        x, gain, shift, mean, inverse = ctx.saved_tensors
        if kernels := _group_kernels(x, ctx.groups):
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


def group_norm(x: Tensor, groups: int, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """x [L, B, H, W, C]: each image's `groups` of neighbouring channels to mean 0 and variance 1, then · gain [L, B, C]
    + shift [L, B, C], of one dtype, if there are."""
    return _GroupNorm.apply(*_images(x, gain, shift), groups, False)[0].view_as(x)


def smooth_group_norm(x: Tensor, groups: int, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """SiLU of `group_norm`."""
    if _group_kernels(x, groups):
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
    """What groups have, [N, groups] -> what each of their channels has, beside pixels, [N, 1, C]."""
    return moment.repeat_interleave(x.shape[2] // moment.shape[1], dim=1)[:, None]


class BatchNorm(nn.Module):
    """Batch normalisation of each lane by itself: x [L, …, C], statistics over all between, gain and shift [L, C].

    Running mean and (unbiased) variance [L, C] are state; with them it evaluates, while `numerics.training` is False.
    """

    def __init__(self, gain: Tensor, shift: Tensor, numerics: LaneNumerics, momentum: float = 0.1) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(gain), nn.Parameter(shift)
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros_like(gain))
        self.register_buffer("variance", torch.ones_like(gain))
        self.numerics, self.momentum = numerics, momentum

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(x), -1, x.shape[-1])
        if self.numerics.training:
            out, mean, variance = _GroupNorm.apply(rows, self.gain, self.shift, x.shape[-1], False)
            n = rows.shape[1]
            new = torch._foreach_mul([mean, variance * (n / max(1, n - 1))], self.momentum)
            running = [self.mean, self.variance]  # together: on a GPU these are launches, and little else
            torch._foreach_mul_(running, 1 - self.momentum)
            torch._foreach_add_(running, new)
        else:
            out = (rows - self.mean[:, None]) * (1.0 / sqrt(self.variance + EPS))[:, None]
            out = affine(out, self.gain, self.shift).to(x.dtype)
        return out.view_as(x)
