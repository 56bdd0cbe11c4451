"""(out - y)², element by element, and its gradient 2 · g · (out - y)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation

_SQUARED_ERROR = Operation(__name__)


class _SquaredError(Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(out, y)
        if kernels := _SQUARED_ERROR.kernels(out, y):
            return kernels.squared_error(out, y)
        error = out - y
        return error * error

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        out, y = ctx.saved_tensors
        if kernels := _SQUARED_ERROR.kernels(out, y):
            of_out = kernels.squared_error_gradient(out, y, g)
        else:
            of_out = 2.0 * (g * (out - y))
        of_y = (-of_out).sum_to_size(y.shape) if ctx.needs_input_grad[1] else None
        return of_out.sum_to_size(out.shape) if ctx.needs_input_grad[0] else None, of_y


_apply: Callable[..., Tensor] = _SquaredError.apply


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    """(out - y)², of the shape that both have; float32."""
    return _apply(out, y)
