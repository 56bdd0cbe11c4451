"""Layer norm of rows, with the gain and the shift that follow it, and of the sum of a residual stream and a branch.

    out = (x - mean) / sqrt(variance + eps)        y = out · gain + shift
    dx = (g' - mean g' - out · mean(g' out)) / sqrt(variance + eps)        g' = g · gain

Library norms choose the order of their sums by the size of the whole tensor, and take another inverse root on each
device. Here sums are lane sums, and all else is single IEEE operations. Whatever dtype comes in, it computes in FP32
and rounds what leaves once, to that dtype; so do its gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.sums import divided, lane_sum

EPS = 1e-5
_LAYER_NORM = Operation(__name__)


class _LayerNorm(Function[tuple[Any, Tensor]]):
    """(h + branch, its norm); (None, the norm of h) where there is no branch."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, branch: Tensor | None, gain: Tensor | None, shift: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        if kernels := _LAYER_NORM.kernels(h):
            h, y, mean, inverse = kernels.layer_norm(h, gain, shift, EPS, branch)
        else:
            h = h if branch is None else h + branch
            wide = h.to(torch.float32)
            mean = _row_mean(wide)
            centred = wide - mean
            inverse = 1.0 / sqrt(_row_mean(centred * centred) + EPS)
            y = scaled(centred * inverse, gain, shift).to(h.dtype)
        ctx.save_for_backward(h, gain, mean, inverse)
        ctx.adds = branch is not None
        ctx.set_materialize_grads(False)
        return (h if ctx.adds else None), y

    @staticmethod
    def backward(ctx: Any, passing: Tensor | None, g: Tensor) -> tuple[Tensor | None, ...]:
        h, gain, mean, inverse = ctx.saved_tensors
        if kernels := _LAYER_NORM.kernels(h):
            dh, d_gain, d_shift = kernels.layer_norm_gradient(h, mean, inverse, gain, g, passing)
        else:
            out, g = (h.to(torch.float32) - mean) * inverse, g.to(torch.float32)
            d_gain = d_shift = None
            if gain is not None:
                d_gain, d_shift = (lane_sum(t, t.dim() - 2).to(gain.dtype) for t in (g * out, g))
                g = g * gain[..., None, :]
            dh = ((g - _row_mean(g) - out * _row_mean(g * out)) * inverse).to(h.dtype)
            dh = dh if passing is None else dh + passing
        return dh, (dh if ctx.adds else None), d_gain, d_shift


def layer_norm(h: Tensor, gain: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
    """h [..., T, D] over the last axis, then · gain [..., D] + shift [..., D], of one dtype, if there are."""
    return _LayerNorm.apply(h, None, gain, shift)[1]


def added_layer_norm(
    h: Tensor, branch: Tensor | None, gain: Tensor | None = None, shift: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h + branch, or h where there is none, and its layer norm as above; h, branch [..., T, D]."""
    return (h, layer_norm(h, gain, shift)) if branch is None else _LayerNorm.apply(h, branch, gain, shift)


def scaled(out: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
    """out [..., T, D] · gain [..., D] + shift [..., D], if there are."""
    return out if gain is None or shift is None else out * gain[..., None, :] + shift[..., None, :]


def _row_mean(x: Tensor) -> Tensor:
    return divided(lane_sum(x, x.dim() - 1)[..., None], x.shape[-1])
