"""Lane sums on a GPU: `sums.lane_sum`, some levels of its tree in each launch.

A sum of many rows of some columns takes tiles of rows and columns, [2^K, W]. One along short rows takes whole rows.
Else every program makes each of its sums from 16 numbers, read where they lie.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.sums.trees import column_sum, leaf
from fp4dse.kernels.ops.sums.trees import lane_sum as row_sum

_LEVELS, _SUMS = 4, 256  # of a lane sum element by element in one launch, and its tile
_ROW, _HELD = 11, 13  # levels of a sum of one program, and of all that it sums
_WIDE, _LITTLE = 16, 1 << 21  # columns that are worth a tile of them, and numbers that are quickly read
_FAR = 1 << 31  # sums that 32 bits do not count


@triton.jit
def _level0(x_ptr, at, m, mask):
    return tl.load(x_ptr + at * m, mask, 0.0).to(tl.float32)


@triton.jit
def _level1(x_ptr, at, m, mask, n0):
    low = _level0(x_ptr, at, m, mask)
    paired = at < n0 // 2
    return tl.where(paired, low + _level0(x_ptr, at + (n0 + 1) // 2, m, mask & paired), low)


@triton.jit
def _level2(x_ptr, at, m, mask, n0, n1):
    low = _level1(x_ptr, at, m, mask, n0)
    paired = at < n1 // 2
    return tl.where(paired, low + _level1(x_ptr, at + (n1 + 1) // 2, m, mask & paired, n0), low)


@triton.jit
def _level3(x_ptr, at, m, mask, n0, n1, n2):
    low = _level2(x_ptr, at, m, mask, n0, n1)
    paired = at < n2 // 2
    return tl.where(paired, low + _level2(x_ptr, at + (n2 + 1) // 2, m, mask & paired, n0, n1), low)


@triton.jit
def _sum_kernel(x_ptr, out_ptr, total, m, n0, n1, n2, n3, n4, FAR: tl.constexpr, TILE: tl.constexpr):
    """Four levels of the tree: x [A, n0, m] -> [A, n4, m], `total` numbers. To row j of n comes row j + ⌈n/2⌉, if
    there is one."""
    at = tl.program_id(0).to(tl.int64 if FAR else tl.int32) * TILE + tl.arange(0, TILE)
    mask = at < total
    row, column = (at // m % n4).to(tl.int64), at % m
    start = x_ptr + (at // (n4 * m)).to(tl.int64) * n0 * m + column
    low = _level3(start, row, m, mask, n0, n1, n2)
    paired = row < n3 // 2
    high = _level3(start, row + (n3 + 1) // 2, m, mask & paired, n0, n1, n2)
    tl.store(out_ptr + at, tl.where(paired, low + high, low), mask)


@triton.jit
def _column_kernel(x_ptr, out_ptr, n, m, roots, LEVELS: tl.constexpr, COLUMNS: tl.constexpr):
    """LEVELS levels of the tree: x [A, n, m] -> [A, roots, m]. A program has some columns under one sum."""
    blocks = (m + COLUMNS - 1) // COLUMNS
    block, root = tl.program_id(0) % blocks, tl.program_id(0) // blocks % roots
    a = (tl.program_id(0) // blocks // roots).to(tl.int64)
    row, column = leaf(tl.arange(0, 1 << LEVELS), root, n, LEVELS), block * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < n)[:, None] & (column < m)[None, :]
    x = tl.load(x_ptr + ((a * n + row) * m)[:, None] + column[None, :], mask, -0.0).to(tl.float32)
    tl.store(out_ptr + (a * roots + root) * m + column, column_sum(x), column < m)


@triton.jit
def _row_kernel(x_ptr, out_ptr, total, n, m, LEVELS: tl.constexpr, ROWS: tl.constexpr):
    """All levels: x [A, n, m] -> [A, m], `total` numbers."""
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    number = leaf(tl.arange(0, 1 << LEVELS), 0, n, LEVELS)
    start = (at // m).to(tl.int64) * n * m + at % m
    mask = (at < total)[:, None] & (number < n)[None, :]
    x = tl.load(x_ptr + start[:, None] + (number * m)[None, :], mask, -0.0)
    tl.store(out_ptr + at, row_sum(x.to(tl.float32)), at < total)


def lane_sum(x: Tensor, dim: int) -> Tensor:
    """`sums.lane_sum` of x, as float32, over one dimension that is not empty."""
    kept = [size for d, size in enumerate(x.shape) if d != dim % x.dim()]
    before, n = x.shape[: dim % x.dim()].numel(), x.shape[dim]
    m = x.numel() // (before * n)
    x = x.contiguous().view(before, n, m)
    while x.shape[1] > 1:
        x = _some_levels(x)
    return x.view(kept).to(torch.float32)


def _some_levels(x: Tensor) -> Tensor:
    """[A, n, m] -> [A, fewer, m], in one launch; which levels it has does not change the order of additions."""
    before, n, m = x.shape
    levels = (n - 1).bit_length()
    if m < _WIDE and levels <= _ROW:
        out, rows = _empty(x, 1), 1 << max(_ROW - levels, 0)
        programs = launch_grid(triton.cdiv(out.numel(), rows))
        _row_kernel[programs](x, out, out.numel(), n, m, LEVELS=levels, ROWS=rows, num_warps=2, enable_fp_fusion=False)
    elif m < _WIDE or levels <= _LEVELS:
        sizes = [n]
        for _ in range(_LEVELS):
            sizes.append((sizes[-1] + 1) // 2)
        out = _empty(x, sizes[-1])
        tile = min(_SUMS, triton.next_power_of_2(out.numel()))
        flags = {"FAR": out.numel() >= _FAR, "TILE": tile, "num_warps": max(1, tile // 64), "enable_fp_fusion": False}
        _sum_kernel[launch_grid(triton.cdiv(out.numel(), tile))](x, out, out.numel(), m, *sizes, **flags)
    else:
        wide = min((m - 1).bit_length(), 5)  # 128 bytes
        if x.numel() <= _LITTLE and levels <= _ROW:  # it is rather done in one launch
            wide = min(wide, max(_HELD - levels, 2))
        levels = min(levels, _HELD - wide)
        roots = triton.cdiv(n, 1 << levels)
        out = _empty(x, roots)
        programs, warps = before * roots * triton.cdiv(m, 1 << wide), max(1, 1 << levels + wide >> 10)
        flags = {"LEVELS": levels, "COLUMNS": 1 << wide, "num_warps": warps, "enable_fp_fusion": False}
        _column_kernel[launch_grid(programs)](x, out, n, m, roots, **flags)
    return out


def _empty(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(x.shape[0], rows, x.shape[2], dtype=torch.float32)
