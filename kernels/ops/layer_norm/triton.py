"""Layer norm of rows with the gain and shift of their image, forward and backward, in one kernel each that reads every
row once.

    out = (x - mean) · inverse        inverse = 1 / sqrt(mean (x - mean)² + eps)        y = out · gain + shift
    dx = (g' - mean g' - out · mean(g' out)) · inverse, g' = g · gain        dgain = Σ over rows of g out, dshift = Σ g

Every operation is a single IEEE rounding in the order of its definition, sums in that of `sums.lane_sum`
(`trees`), so that the bits are theirs. Rows of one image, [T, D], share gain and shift.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.sums import lane_sum as sum_of_lanes
from fp4dse.kernels.ops.sums.trees import column_sum, columns, lane_sum, leaf

_LEVELS = 11
"""2^11 numbers are a warp's, as in `norms`."""
_SUMMED = 12
"""2^12 numbers, of eight warps, where rows are summed, too: the more there are, the fewer sums are left to add."""
_LONGEST = 1 << 14


@triton.jit
def _mean(x, mask, count):
    return tl.div_rn(lane_sum(tl.where(mask, x, -0.0)), count)[:, None]


@triton.jit
def _forward_kernel(
    x_ptr,
    branch_ptr,
    gain_ptr,
    shift_ptr,
    sum_ptr,
    y_ptr,
    mean_ptr,
    inverse_ptr,
    rows,
    blocks,
    gain_stride,
    shift_stride,
    count,
    eps,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    D: tl.constexpr,
    LEVELS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Some of the `rows` of one image."""
    image = (tl.program_id(0) // blocks).to(tl.int64)
    row, column = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), columns(D, LEVELS)
    at = (image * rows + row)[:, None] * D + column[None, :]
    mask = (row < rows)[:, None] & (column < D)[None, :]
    x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
    if ADDS:
        added = (x + tl.load(branch_ptr + at, mask, 0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, added, mask)
        x = added.to(tl.float32)
    mean = _mean(x, mask, count)
    centred = x - mean
    inverse = tl.div_rn(1.0, tl.sqrt_rn(_mean(centred * centred, mask, count) + eps))
    y = centred * inverse
    if SCALES:
        gain = tl.load(gain_ptr + image * gain_stride + column, column < D, 0.0).to(tl.float32)
        shift = tl.load(shift_ptr + image * shift_stride + column, column < D, 0.0).to(tl.float32)
        y = y * gain[None, :] + shift[None, :]
    of_row = (image * rows + row)[:, None]
    tl.store(mean_ptr + of_row, mean, (row < rows)[:, None])
    tl.store(inverse_ptr + of_row, inverse, (row < rows)[:, None])
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask)


@triton.jit
def _backward_kernel(
    x_ptr,
    mean_ptr,
    inverse_ptr,
    gain_ptr,
    g_ptr,
    passing_ptr,
    dx_ptr,
    d_gain_ptr,
    d_shift_ptr,
    rows,
    roots,
    gain_stride,
    count,
    ADDS: tl.constexpr,
    SCALES: tl.constexpr,
    D: tl.constexpr,
    LEVELS: tl.constexpr,
    ROW_LEVELS: tl.constexpr,
):
    """The rows of an image under one sum of the trees of d_gain and d_shift, of which it has `roots`."""
    image, root = (tl.program_id(0) // roots).to(tl.int64), tl.program_id(0) % roots
    row, column = leaf(tl.arange(0, 1 << ROW_LEVELS), root, rows, ROW_LEVELS), columns(D, LEVELS)
    at = (image * rows + row)[:, None] * D + column[None, :]
    mask = (row < rows)[:, None] & (column < D)[None, :]
    of_row = (image * rows + row)[:, None]
    mean = tl.load(mean_ptr + of_row, (row < rows)[:, None], 0.0)
    inverse = tl.load(inverse_ptr + of_row, (row < rows)[:, None], 0.0)
    out = (tl.load(x_ptr + at, mask, 0.0).to(tl.float32) - mean) * inverse
    g = tl.load(g_ptr + at, mask, 0.0).to(tl.float32)
    if SCALES:
        of_root = (image * roots + root) * D + column
        tl.store(d_gain_ptr + of_root, column_sum(tl.where(mask, g * out, -0.0)), column < D)
        tl.store(d_shift_ptr + of_root, column_sum(tl.where(mask, g, -0.0)), column < D)
        gain = tl.load(gain_ptr + image * gain_stride + column, column < D, 0.0).to(tl.float32)
        g = g * gain[None, :]
    dx = (g - _mean(g, mask, count) - out * _mean(g * out, mask, count)) * inverse
    dx = dx.to(dx_ptr.dtype.element_ty)
    if ADDS:
        dx = (dx.to(tl.float32) + tl.load(passing_ptr + at, mask, 0.0).to(tl.float32)).to(dx_ptr.dtype.element_ty)
    tl.store(dx_ptr + at, dx, mask)


def why_not(x: Tensor) -> str | None:
    """The reason why the kernels do not take rows of x [..., D], or None if they do."""
    if x.numel() == 0 or x.shape[-1] > _LONGEST:
        return f"x: found {tuple(x.shape)}; accepted: rows of 1 to {_LONGEST} numbers"
    return None


def layer_norm(
    x: Tensor, gain: Tensor | None, shift: Tensor | None, eps: float, branch: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [..., T, D], plus `branch` of its shape and dtype if there is one: that sum and its layer norm, both in x's
    dtype, and float32 means and inverses [..., T, 1]. gain, shift [..., D]: of each [T, D], or None both."""
    x = x.contiguous()
    total = x if branch is None else torch.empty_like(x)
    y, mean = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    inverse = torch.empty_like(mean)
    images, rows, levels, row_levels, warps = _sizes(x, gain is not None)
    gain, shift = (y if t is None else rows_of(t) for t in (gain, shift))
    blocks = triton.cdiv(rows, 1 << row_levels)
    tensors = x, x if branch is None else branch.contiguous(), gain, shift, total, y, mean, inverse
    sizes = rows, blocks, gain.stride(-2), shift.stride(-2), float(x.shape[-1]), eps
    flags = {"ADDS": branch is not None, "SCALES": gain is not y, "D": x.shape[-1], "LEVELS": levels}
    _forward_kernel[launch_grid(images * blocks)](
        *tensors, *sizes, **flags, ROWS=1 << row_levels, num_warps=warps, enable_fp_fusion=False
    )
    return total, y, mean, inverse


def layer_norm_gradient(
    x: Tensor, mean: Tensor, inverse: Tensor, gain: Tensor | None, g: Tensor, passing: Tensor | None = None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, gain and shift from g, that of the norm of x; `passing`, the gradient that x has from elsewhere,
    is added to that of x."""
    x, g = x.contiguous(), g.contiguous()
    images, rows, levels, row_levels, warps = _sizes(x, gain is not None)
    roots, width = triton.cdiv(rows, 1 << row_levels), x.shape[-1]
    dx, none = torch.empty_like(x), gain is None
    sums = x.new_empty(2, 0 if gain is None else images, roots, width, dtype=torch.float32)
    scale = x if gain is None else rows_of(gain)
    tensors = x, mean, inverse, scale, g, x if passing is None else passing.contiguous(), dx, *sums
    sizes = rows, roots, scale.stride(-2), float(width)
    flags = {"ADDS": passing is not None, "SCALES": not none, "D": width, "LEVELS": levels, "ROW_LEVELS": row_levels}
    _backward_kernel[launch_grid(images * roots)](*tensors, *sizes, **flags, num_warps=warps, enable_fp_fusion=False)
    if gain is None:
        return dx, None, None
    d_gain, d_shift = sum_of_lanes(sums, 2).to(gain.dtype).view(2, *gain.shape).unbind(0)
    return dx, d_gain, d_shift


def rows_of(t: Tensor) -> Tensor:
    """t [..., D] as rows of which each lies in one piece, without copying where that can be."""
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(-1) == 1 else t.contiguous()


def _sizes(x: Tensor, scales: bool) -> tuple[int, int, int, int, int]:
    """Images, rows of each (all are one image where none has a gain), levels of the tree of a row, levels of rows that
    one program takes, and its warps."""
    width = x.shape[-1]
    rows = x.shape[-2] if scales else x.numel() // width
    levels = (width - 1).bit_length()
    if scales:
        row_levels = min(max(_SUMMED - levels, 0), (rows - 1).bit_length())
        warps = min(1 << max(levels + row_levels - 9, 0), 16)
    else:
        row_levels = min(max(_LEVELS - levels, 0), 3)
        of_a_warp = _LEVELS if width == 1 << levels else _LEVELS - 2  # numbers of leaves take registers, too
        warps = min(1 << max(levels + row_levels - of_a_warp, 0), 16)
    return x.numel() // (rows * width), rows, levels, row_levels, warps
