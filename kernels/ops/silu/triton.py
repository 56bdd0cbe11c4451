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
def quotient(a, e):
    """a / (1 + e), rounded once, where a is 1 or e, from exp(-87) to 1. The tests have a twin: the interpreter runs no
    assembly.

    It is instructions that bound SiLU, and division of any two numbers takes twice as many. Here nothing overflows and
    no remainder is subnormal, so that a reciprocal off by one ulp at most, improved once, and one correction by the
    remainder give the rounded quotient. So it is for all 1.06e9 numbers e with every such reciprocal (tried one by
    one), but for 1 / (2 - 2^-23), which needs the nearest.
    """
    d = 1.0 + e
    near = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], tl.float32, is_pure=True, pack=1)
    near = tl.fma(near, tl.fma(-d, near, 1.0), near)
    q = a * near
    return tl.fma(tl.fma(-d, q, a), near, q)


@triton.jit
def sigmoid(x):
    """`silu.sigmoid`, operation by operation."""
    e = exp_nonpositive(-tl.abs(x))
    return quotient(tl.where(x >= 0, 1.0, e), e)


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
