"""A gain and a shift for each row of channels: x · gain + shift, with the gradients of all three.

Whatever dtype comes in, it computes in FP32 and rounds what leaves once, to that dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.ops.sums import lane_sum, wide_sum


class _Affine(Function[Tensor]):
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
