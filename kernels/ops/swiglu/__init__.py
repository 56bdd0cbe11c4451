"""SwiGLU (2002.05202), silu(gate) ∘ up, computed in FP32 and rounded after each function to the dtype that came in.

It keeps its input for the backward pass, which is all that a kernel needs, and nothing of what it made of it. On
request it keeps that in MXFP8, gate and up in blocks of their own: the result stays what it was, its gradient is that
at the rounded input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4dse.kernels.autograd import Function, contraction
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.silu import silu
from fp4dse.kernels.quant.operand.in_mxfp8 import from_mxfp8, in_mxfp8

_SWIGLU = Operation(__name__)


class _SwiGlu(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, kernels: Any, keeps_mxfp8: bool, x: Tensor) -> Tensor:
        ctx.kernels, ctx.of = kernels, (x.shape, x.dtype)
        ctx.save_for_backward(*(in_mxfp8(x.unflatten(-1, (2, -1))) if keeps_mxfp8 else (x,)))
        return kernels.swiglu(x) if kernels else _defined(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *scales = ctx.saved_tensors
        if scales:
            shape, dtype = ctx.of
            x = from_mxfp8(x, scales[0], (*shape[:-1], 2, shape[-1] // 2), dtype).flatten(-2)
        if ctx.kernels:
            return None, None, ctx.kernels.swiglu_gradient(x, g)
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = _defined(x)
        return None, None, torch.autograd.grad(contraction([y], [g]), x)[0]


def swiglu(x: Tensor, keeps_mxfp8: bool = False) -> Tensor:
    """silu(gate) ∘ up of x [..., 2·F], gate before up: [..., F]. keeps_mxfp8: the backward pass has x in MXFP8."""
    keeps_mxfp8 = keeps_mxfp8 and torch.is_grad_enabled() and x.requires_grad  # of other passes nothing is kept
    return _SwiGlu.apply(_SWIGLU.kernels(x), keeps_mxfp8, x)


def _defined(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return silu(gate.contiguous()) * up
