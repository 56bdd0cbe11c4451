"""SwiGLU (2002.05202), silu(gate) ∘ up, computed in FP32 and rounded after each function to the dtype that came in."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.silu import silu

_SWIGLU = Operation(__name__)


class _SwiGlu(Function):
    @staticmethod
    def forward(ctx: Any, kernels: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return kernels.swiglu(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.kernels.swiglu_gradient(*ctx.saved_tensors, g)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) ∘ up of x [..., 2·F], gate before up: [..., F]."""
    if kernels := _SWIGLU.kernels(x):
        return _SwiGlu.apply(kernels, x)
    gate, up = x.chunk(2, dim=-1)
    return silu(gate.contiguous()) * up
