"""RMS norm of rows (1910.07467), and of the sum of a residual stream and a branch.

    y = g x / sqrt(mean x² + eps)

Sums are lane sums, all else is single IEEE operations. Whatever dtype comes in, it computes in FP32 and rounds what
leaves once, to that dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.sums import lane_sum

EPS = 1e-5
_RMS_NORM = Operation(__name__)


class _RmsNorm(Function[tuple[Any, Tensor]]):
    """(h + branch, its norm); (None, the norm of h) where there is no branch."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, branch: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor | None, Tensor]:
        if kernels := _RMS_NORM.kernels(h):
            h, y, inverse = kernels.rms_norm(h, gain, eps, branch)
        else:
            h = h if branch is None else h + branch
            wide = h.to(torch.float32)
            inverse = 1.0 / sqrt(_row_mean(wide * wide) + eps)  # [L, …, 1]
            y = (wide * inverse * _beside(gain, h)).to(h.dtype)
        ctx.save_for_backward(h, inverse, gain)
        ctx.adds = branch is not None
        ctx.set_materialize_grads(False)
        return (h if ctx.adds else None), y

    @staticmethod
    def backward(ctx: Any, passing: Tensor | None, g: Tensor) -> tuple[Tensor | None, ...]:
        h, inverse, gain = ctx.saved_tensors
        if kernels := _RMS_NORM.kernels(h):
            dh, d_gain = kernels.rms_norm_gradient(h, inverse, gain, g, passing)
        else:
            normal, g = h.to(torch.float32) * inverse, g.to(torch.float32)
            along = g * normal
            d_gain = lane_sum(along.reshape(len(h), -1, h.shape[-1]), 1)
            g = g * _beside(gain, h)
            dh = ((g - normal * _row_mean(g * normal)) * inverse).to(h.dtype)
            dh = dh if passing is None else dh + passing
        return dh, (dh if ctx.adds else None), d_gain, None


def rms_norm(x: Tensor, gain: Tensor, eps: float = EPS) -> Tensor:
    """x [L, …, D] with mean square 1 along its rows, times gain [L, D]."""
    return _RmsNorm.apply(x, None, gain, eps)[1]


def added_rms_norm(h: Tensor, branch: Tensor | None, gain: Tensor, eps: float = EPS) -> tuple[Tensor, Tensor]:
    """h + branch, or h where there is none, and its RMS norm times gain [L, D]; h, branch [L, …, D]."""
    return (h, rms_norm(h, gain, eps)) if branch is None else _RmsNorm.apply(h, branch, gain, eps)


def _row_mean(x: Tensor) -> Tensor:
    return lane_sum(x, x.dim() - 1)[..., None] * (1.0 / x.shape[-1])


def _beside(gain: Tensor, x: Tensor) -> Tensor:
    return gain.view(len(gain), *[1] * (x.dim() - 2), -1)
