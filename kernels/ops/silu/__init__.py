"""SiLU, whose bits do not depend on where in a tensor an element stands.

Library kernels compute exp with vector code and the last few elements of a chunk with scalar code, which differ in the
last bit, so a lane's values would depend on its neighbours and on the number of threads. These are built from single
IEEE additions and multiplications, the same on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation, by_device
from fp4dse.kernels.ops.elementary import exp_nonpositive

_SILU = Operation(__name__, native=True)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) without overflow."""
    e = exp_nonpositive(-x.abs())
    return torch.where(x >= 0, 1.0, e) / (1.0 + e)


class _SiLU(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        taken = _taken(x.detach())
        if kernels := _SILU.kernels(taken):
            ctx.save_for_backward(x)
            return kernels.silu(taken).to(x.dtype)
        wide = x.detach().to(torch.float32)
        s = sigmoid(wide)
        ctx.save_for_backward(x, *([s] if x.dtype == torch.float32 else []))  # else it would be most of what is kept
        return (wide * s).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        x, *saved = ctx.saved_tensors
        taken = _taken(x)
        if kernels := _SILU.kernels(taken):
            return kernels.silu_gradient(taken, _taken(g)).to(x.dtype)
        wide, g = x.to(torch.float32), g.to(torch.float32)
        s = saved[0] if saved else sigmoid(wide)
        return (g * (s * (1.0 + wide * (1.0 - s)))).to(x.dtype)


def _taken(x: Tensor) -> Tensor:
    """x as kernels take it: those of a GPU any dtype, native ones float32."""
    return x.to(by_device(x, cpu=torch.float32, cuda=x.dtype))


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x), computed in FP32 and of x's dtype."""
    return _SiLU.apply(x)
