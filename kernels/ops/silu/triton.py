"""SiLU and its gradient as kernels that read each tensor once, with the bits of their definition.

They matter because a step is bound by memory: eager PyTorch reads and writes the whole tensor for each of the 25
operations of a sigmoid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.elementary.triton import exp_nonpositive
from fp4dse.kernels.ops.launching import FLAT, TILE, launch_grid


@triton.jit
def sigmoid(x):
    """`silu.sigmoid`, operation by operation."""
    e = exp_nonpositive(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0, 1.0, e), 1.0 + e)


@triton.jit
def _silu_kernel(x_ptr, y_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, at < n, 0.0).to(tl.float32)
    tl.store(y_ptr + at, (x * sigmoid(x)).to(y_ptr.dtype.element_ty), at < n)


@triton.jit
def _silu_gradient_kernel(x_ptr, g_ptr, out_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x, g = tl.load(x_ptr + at, at < n, 0.0).to(tl.float32), tl.load(g_ptr + at, at < n, 0.0).to(tl.float32)
    s = sigmoid(x)
    tl.store(out_ptr + at, (g * (s * (1.0 + x * (1.0 - s)))).to(out_ptr.dtype.element_ty), at < n)


def silu(x: Tensor) -> Tensor:
    """`silu` of float32 or bfloat16 x of any shape."""
    x, n = x.contiguous(), x.numel()
    y = torch.empty_like(x)
    _silu_kernel[launch_grid(triton.cdiv(n, TILE))](x, y, n, **FLAT)
    return y


def silu_gradient(x: Tensor, g: Tensor) -> Tensor:
    """The gradient of x from g, that of silu(x)."""
    x, g, n = x.contiguous(), g.contiguous(), x.numel()
    out = torch.empty_like(x)
    _silu_gradient_kernel[launch_grid(triton.cdiv(n, TILE))](x, g, out, n, **FLAT)
    return out
