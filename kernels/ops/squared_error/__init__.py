"""(out - y)² and its gradient 2 · g · (out - y), element by element or as the mean over a lane.

All of it is in FP32. Outputs may be BF16: then their gradient is, too, and nothing is converted on the way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.sums import divided, lane_mean

_SQUARED_ERROR = Operation(__name__)


class _SquaredError(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, out: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(out, y)
        if kernels := _SQUARED_ERROR.kernels(out, y):
            return kernels.squared_error(out, y)
        error = out.to(torch.float32) - y
        return error * error

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        out, y = ctx.saved_tensors
        if kernels := _SQUARED_ERROR.kernels(out, y):
            of_out = kernels.squared_error_gradient(out, y, g, torch.float32)
        else:
            of_out = 2.0 * (g * (out.to(torch.float32) - y))
        of_y = (-of_out).sum_to_size(y.shape) if ctx.needs_input_grad[1] else None
        return of_out.sum_to_size(out.shape).to(out.dtype) if ctx.needs_input_grad[0] else None, of_y


class _MeanSquaredError(Function[Tensor]):
    """By kernels alone, without a gradient of y."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(out, y)
        kernels = _SQUARED_ERROR.kernels(out, y)
        assert kernels
        return divided(kernels.squared_error_sum(out, y), out[0].numel())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        out, y = ctx.saved_tensors
        kernels = _SQUARED_ERROR.kernels(out, y)
        assert kernels
        of_each = divided(g, out[0].numel()).view(-1, *[1] * (out.dim() - 1)).expand(out.shape)
        return kernels.squared_error_gradient(out, y, of_each, out.dtype), None


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    """(out - y)², float32, of the shape that both have; out: float32 or bfloat16, y: float32."""
    return _SquaredError.apply(out, y)


def mean_squared_error(out: Tensor, y: Tensor) -> Tensor:
    """The mean of (out - y)² over all but the lane axis, float32 [L]: `lane_mean` of `squared_error`, whose errors are
    not written anywhere where kernels compute it."""
    if not y.requires_grad and _SQUARED_ERROR.kernels(out, y):
        return _MeanSquaredError.apply(out, y)
    return lane_mean(squared_error(out, y))
