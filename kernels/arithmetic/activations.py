"""Activations whose bits do not depend on where in a tensor an element stands.

Library kernels compute exp with vector code and the last few elements of a chunk with scalar code, which differ in the
last bit, so a lane's values would depend on its neighbours and on the number of threads. These are built from single
IEEE additions and multiplications, the same on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels import native
from fp4dse.kernels.arithmetic.elementary import exp_nonpositive
from fp4dse.kernels.devices import has_kernels


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) without overflow."""
    e = exp_nonpositive(-x.abs())
    return torch.where(x >= 0, 1.0, e) / (1.0 + e)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        wide = x.detach().to(torch.float32)
        if (kernels := _kernels(wide)) is not None:
            ctx.save_for_backward(x)
            return kernels.silu(wide).to(x.dtype)
        s = sigmoid(wide)
        ctx.save_for_backward(x, *([s] if x.dtype == torch.float32 else []))  # else it would be most of what is kept
        return (wide * s).to(x.dtype)

    @staticmethod
    def backward(ctx, g: Tensor):
        x, *saved = ctx.saved_tensors
        wide, g = x.to(torch.float32), g.to(torch.float32)
        if (kernels := _kernels(wide)) is not None:
            return kernels.silu_gradient(wide, g).to(x.dtype)
        s = saved[0] if saved else sigmoid(wide)
        return (g * (s * (1.0 + wide * (1.0 - s)))).to(x.dtype)


def _kernels(x: Tensor) -> Any:
    """The module whose `silu` and `silu_gradient` are one function each, if there is one for x."""
    if x.numel() and has_kernels(x):
        from fp4dse.kernels.fused import pointwise

        return pointwise
    return native if native.takes(x) else None


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), computed in FP32 and of x's dtype. One kernel of a GPU, or native function, has the same bits,
    and another those of the gradient."""
    return _SiLU.apply(x)
