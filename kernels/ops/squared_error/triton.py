"""The squared error and its gradient as kernels that read each tensor once, with the bits of their definition.

A mean's gradient is one number a lane, which autograd hands down expanded: it is read as that.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import FLAT, TILE, launch_grid
from fp4dse.kernels.ops.sums.trees import column_sum, leaf
from fp4dse.kernels.ops.sums.triton import lane_sum

_LEVELS, _SUMS = 6, 64
"""Of the tree that one program has: sums beside one another, of numbers that lie beside one another."""


@triton.jit
def _squared_error_kernel(out_ptr, y_ptr, to_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    error = tl.load(out_ptr + at, at < n, 0.0).to(tl.float32) - tl.load(y_ptr + at, at < n, 0.0)
    tl.store(to_ptr + at, error * error, at < n)


@triton.jit
def _squared_error_sum_kernel(
    out_ptr, y_ptr, to_ptr, n, sums, LEVELS: tl.constexpr, SUMS: tl.constexpr, WHOLE: tl.constexpr
):
    """LEVELS levels of the tree of a lane's sum (sums.trees), over errors of its n numbers: [L, n] -> [L, sums].

    WHOLE: n is sums · 2^LEVELS, and sums a multiple of SUMS. Then the leaves of a sum are those of the first one,
    moved, which takes fewer instructions than to find each.
    """
    lane, number = tl.program_id(1).to(tl.int64), tl.program_id(0) * SUMS + tl.arange(0, SUMS)
    position = tl.arange(0, 1 << LEVELS)
    out_ptr, y_ptr = out_ptr + lane * n, y_ptr + lane * n
    if WHOLE:
        at = tl.multiple_of(leaf(position, 0, n, LEVELS), SUMS)[:, None] + number[None, :]
        error = tl.load(out_ptr + at).to(tl.float32) - tl.load(y_ptr + at)
        errors = error * error
    else:
        at = leaf(position[:, None], number[None, :], n, LEVELS)
        mask = (at < n) & (number < sums)[None, :]
        error = tl.load(out_ptr + at, mask, 0.0).to(tl.float32) - tl.load(y_ptr + at, mask, 0.0)
        errors = tl.where(mask, error * error, -0.0)
    tl.store(to_ptr + lane * sums + number, column_sum(errors), number < sums)


@triton.jit
def _squared_error_gradient_kernel(out_ptr, y_ptr, g_ptr, to_ptr, n, OF_LANE: tl.constexpr, TILE: tl.constexpr):
    """n: elements of a lane. OF_LANE: g has one number for each."""
    lane, at = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask, at = at < n, lane * n + at
    error = tl.load(out_ptr + at, mask, 0.0).to(tl.float32) - tl.load(y_ptr + at, mask, 0.0)
    g = tl.load(g_ptr + lane) if OF_LANE else tl.load(g_ptr + at, mask, 0.0)
    tl.store(to_ptr + at, (2.0 * (g * error)).to(to_ptr.dtype.element_ty), mask)


def why_not(out: Tensor, y: Tensor) -> str | None:
    """The reason why these are computed by the definition, None if they are not."""
    if out.shape != y.shape:
        return f"shapes: found {tuple(out.shape)} and {tuple(y.shape)}; accepted: equal ones"
    if out.dtype not in (torch.float32, torch.bfloat16):
        return f"dtype of outputs: found {out.dtype}; accepted: float32, bfloat16"
    return None if y.dtype == torch.float32 else f"dtype of targets: found {y.dtype}; accepted: float32"


def squared_error(out: Tensor, y: Tensor) -> Tensor:
    """`squared_error` of out and y of one shape."""
    out, y, n = out.contiguous(), y.contiguous(), out.numel()
    to = torch.empty_like(out, dtype=torch.float32)
    _squared_error_kernel[launch_grid(triton.cdiv(n, TILE))](out, y, to, n, **FLAT)
    return to


def squared_error_sum(out: Tensor, y: Tensor) -> Tensor:
    """The lane sum [L] of `squared_error` of out and y, [L, …] both."""
    out, y, n = out.contiguous(), y.contiguous(), out[0].numel()
    sums = triton.cdiv(n, 1 << _LEVELS)
    to = torch.empty(len(out), sums, dtype=torch.float32, device=out.device)
    whole = n == sums << _LEVELS and sums % _SUMS == 0
    flags = {"LEVELS": _LEVELS, "SUMS": _SUMS, "WHOLE": whole, "num_warps": 8, "enable_fp_fusion": False}
    _squared_error_sum_kernel[launch_grid(triton.cdiv(sums, _SUMS), len(out))](out, y, to, n, sums, **flags)
    return lane_sum(to, 1)


def squared_error_gradient(out: Tensor, y: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient of out [L, …], rounded to a dtype, from g, that of its squared error."""
    out, y, n = out.contiguous(), y.contiguous(), out[0].numel()
    to = torch.empty_like(out, dtype=dtype)
    of_lane = not any(g.stride()[1:])
    g = g.flatten(1)[:, 0] if of_lane else g
    tensors = out, y, g.contiguous(), to
    _squared_error_gradient_kernel[launch_grid(triton.cdiv(n, TILE), len(out))](*tensors, n, OF_LANE=of_lane, **FLAT)
    return to
