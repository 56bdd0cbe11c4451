"""The squared error and its gradient as kernels that read each tensor once, with the bits of their definition.

A mean's gradient is one number a lane, which autograd hands down expanded: it is read as that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import FLAT, TILE, launch_grid


@triton.jit
def _squared_error_kernel(out_ptr, y_ptr, to_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    error = tl.load(out_ptr + at, at < n, 0.0) - tl.load(y_ptr + at, at < n, 0.0)
    tl.store(to_ptr + at, error * error, at < n)


@triton.jit
def _squared_error_gradient_kernel(out_ptr, y_ptr, g_ptr, to_ptr, n, OF_LANE: tl.constexpr, TILE: tl.constexpr):
    """n: elements of a lane. OF_LANE: g has one number for each."""
    lane, at = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask, at = at < n, lane * n + at
    error = tl.load(out_ptr + at, mask, 0.0) - tl.load(y_ptr + at, mask, 0.0)
    g = tl.load(g_ptr + lane) if OF_LANE else tl.load(g_ptr + at, mask, 0.0)
    tl.store(to_ptr + at, 2.0 * (g * error), mask)


def why_not(out: Tensor, y: Tensor) -> str | None:
    """The reason why these are computed by the definition, None if they are not."""
    if out.shape != y.shape:
        return f"shapes: found {tuple(out.shape)} and {tuple(y.shape)}; accepted: equal ones"
    found = {out.dtype, y.dtype} - {torch.float32}
    return f"dtype: found {found.pop()}; accepted: float32" if found else None


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    """`squared_error` of out and y of one shape."""
    out, y, n = out.contiguous(), y.contiguous(), out.numel()
    to = torch.empty_like(out)
    _squared_error_kernel[launch_grid(triton.cdiv(n, TILE))](out, y, to, n, **FLAT)
    return to


def squared_error_gradient(out: Tensor, y: Tensor, g: Tensor) -> Tensor:
    """The gradient of out [L, …] from g, that of its squared error."""
    out, y, n = out.contiguous(), y.contiguous(), out[0].numel()
    to = torch.empty_like(out)
    of_lane = not any(g.stride()[1:])
    g = g.flatten(1)[:, 0] if of_lane else g
    tensors = out, y, g.contiguous(), to
    _squared_error_gradient_kernel[launch_grid(triton.cdiv(n, TILE), len(out))](*tensors, n, OF_LANE=of_lane, **FLAT)
    return to
