"""SwiGLU (2002.05202), silu(gate) ∘ up, computed in FP32 and rounded after each function to the dtype that came in.

It keeps its input for the backward pass, which is all that a kernel needs, and nothing of what it made of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.silu import silu

_SWIGLU = Operation(__name__)


class _SwiGlu(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, kernels: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        return kernels.swiglu(x) if kernels else _defined(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        [x] = ctx.saved_tensors
        if ctx.kernels:
            return None, ctx.kernels.swiglu_gradient(x, g)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = _defined(x)
        return None, torch.autograd.grad(y, x, g)[0]


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) ∘ up of x [..., 2·F], gate before up: [..., F]."""
    return _SwiGlu.apply(_SWIGLU.kernels(x), x)


def _defined(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate.contiguous()) * up
