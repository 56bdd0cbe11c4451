"""RMS norm of rows, forward and backward, in one kernel each that reads every row once.

    y = x · inverse · gain        inverse = 1 / sqrt(mean x² + eps)
    dx = (g' - n · mean(g' n)) · inverse        g' = g · gain, n = x · inverse        dgain = Σ over rows of g n

Sums have the order of `sums.lane_sum`, whatever the width (`trees`). Every operation is a single IEEE rounding in
the order of the definition, so that the bits are its.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.sums import lane_sum as sum_of_lanes
from fp4dse.kernels.ops.sums.trees import columns, lane_sum, leaf

_LEVELS = 11
"""2^11 numbers are a warp's: then the sums of most rows need no shared memory."""


@triton.jit
def _forward_kernel(
    x_ptr,
    branch_ptr,
    gain_ptr,
    sum_ptr,
    y_ptr,
    inverse_ptr,
    rows,
    gain_stride,
    eps,
    ADDS: tl.constexpr,
    D: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    lane = tl.program_id(1).to(tl.int64)
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), columns(D, LEVELS)
    at = (lane * rows + row)[:, None] * D + column[None, :]
    mask = (row < rows)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
    if ADDS:
        added = (x + tl.load(branch_ptr + at, mask, 0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, added, mask)
        x = added.to(tl.float32)
    mean = lane_sum(tl.where(mask, x * x, -0.0)) * (1.0 / D)
    inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    gain = tl.load(gain_ptr + lane * gain_stride + column, column < D, 0.0)
    tl.store(inverse_ptr + lane * rows + row, inverse, row < rows)
    tl.store(y_ptr + at, (x * inverse[:, None] * gain[None, :]).to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _backward_kernel(
    x_ptr,
    inverse_ptr,
    gain_ptr,
    g_ptr,
    passing_ptr,
    dx_ptr,
    d_gain_ptr,
    rows,
    roots,
    gain_stride,
    ADDS: tl.constexpr,
    D: tl.constexpr,
    LEVELS: tl.constexpr,
    ROW_LEVELS: tl.constexpr,
):
    """The rows under one sum of the tree of d_gain, of which there are `roots` a lane."""
    lane, root = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row, column = leaf(tl.arange(0, 1 << ROW_LEVELS), root, rows, ROW_LEVELS), columns(D, LEVELS)
    at = (lane * rows + row)[:, None] * D + column[None, :]
    mask = (row < rows)[:, None] & (column < D)[None, :]
    inverse = tl.load(inverse_ptr + lane * rows + row, row < rows, 0.0)[:, None]
    gain = tl.load(gain_ptr + lane * gain_stride + column, column < D, 0.0)[None, :]
    normal = tl.load(x_ptr + at, mask, 0.0).to(tl.float32) * inverse
    g = tl.load(g_ptr + at, mask, 0.0).to(tl.float32)
    d_gain = lane_sum(tl.trans(tl.where(mask, g * normal, -0.0)))
    tl.store(d_gain_ptr + (lane * roots + root) * D + column, d_gain, column < D)
    g = g * gain
    mean = lane_sum(tl.where(mask, g * normal, -0.0)) * (1.0 / D)
    dx = ((g - normal * mean[:, None]) * inverse).to(dx_ptr.dtype.element_ty)
    if ADDS:
        dx = (dx.to(tl.float32) + tl.load(passing_ptr + at, mask, 0.0).to(tl.float32)).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + at, dx, mask)


def rms_norm(x: Tensor, gain: Tensor, eps: float, branch: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [L, …, D], plus `branch` of its shape and dtype if there is one: that sum, its RMS norm times gain [L, D]
    float32, both in x's dtype, and float32 [L, …] inverses of the root mean squares."""
    x, gain = x.contiguous(), gain if gain.stride(-1) == 1 else gain.contiguous()
    total = x if branch is None else torch.empty_like(x)
    y, inverse = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    rows, levels, row_levels, warps = _sizes(x)
    tensors = x, x if branch is None else branch.contiguous(), gain, total, y, inverse
    flags = {"ADDS": branch is not None, "D": x.shape[-1], "LEVELS": levels, "ROWS": 1 << row_levels}
    programs = launch_grid(triton.cdiv(rows, 1 << row_levels), len(x))
    _forward_kernel[programs](*tensors, rows, gain.stride(0), eps, **flags, num_warps=warps, enable_fp_fusion=False)
    return total, y, inverse


def rms_norm_gradient(
    x: Tensor, inverse: Tensor, gain: Tensor, g: Tensor, passing: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of x [L, …, D] and gain [L, D] from g, that of the norm of x; `passing`, the gradient that x has from
    elsewhere, is added to that of x."""
    x, g, gain = x.contiguous(), g.contiguous(), gain if gain.stride(-1) == 1 else gain.contiguous()
    rows, levels, row_levels, warps = _sizes(x)
    roots = triton.cdiv(rows, 1 << row_levels)
    dx, d_gain = torch.empty_like(x), x.new_empty(len(x), roots, x.shape[-1], dtype=torch.float32)
    tensors = x, inverse, gain, g, x if passing is None else passing.contiguous(), dx, d_gain
    flags = {"ADDS": passing is not None, "D": x.shape[-1], "LEVELS": levels, "ROW_LEVELS": row_levels}
    sizes = rows, roots, gain.stride(0)
    _backward_kernel[launch_grid(roots, len(x))](*tensors, *sizes, **flags, num_warps=warps, enable_fp_fusion=False)
    return dx, sum_of_lanes(d_gain, 1)


def _sizes(x: Tensor) -> tuple[int, int, int, int]:
    """Rows of a lane, levels of the tree of a row, levels of rows that one program takes, and its warps."""
    width = x.shape[-1]
    levels = (width - 1).bit_length()
    row_levels = min(max(_LEVELS - levels, 0), 3)
    of_a_warp = _LEVELS if width == 1 << levels else _LEVELS - 2  # numbers of leaves take registers, too
    return x[0].numel() // width, levels, row_levels, min(1 << max(levels + row_levels - of_a_warp, 0), 8)
