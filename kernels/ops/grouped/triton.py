"""Products of groups on a GPU: a program makes one tile of one group's result, along what is filled of the contraction.

How many rows are filled lies on the device, so that a captured step goes by the router's choice of each batch: there
are programs for all rows that there is room for, and those of empty tiles write zeros without a load. Tiles follow from
the room alone, and every sum is of one program, in the order of K: a group has the same bits whatever the other groups
have, and whatever is empty behind it, since zeros add nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid

_LEAST, _MOST, _BYTES = 16, 128, 128
"""Edges of a tile of the result, those of FP32 numbers half as long at most, and bytes of K that are loaded at a
time."""


@triton.jit
def _grouped_kernel(
    a_ptr,
    b_ptr,
    count_ptr,
    out_ptr,
    rows,
    columns,
    length,
    a_group,
    a_row,
    a_along,
    b_group,
    b_row,
    b_along,
    CONTRACTED: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
):
    """One tile. CONTRACTED: `count` is of numbers along the contraction, not of rows."""
    group = tl.program_id(1).to(tl.int64)
    across = (columns + COLUMNS - 1) // COLUMNS
    down, place = tl.program_id(0) // across, tl.program_id(0) % across
    row = (down * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (place * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    count = tl.load(count_ptr + group).to(tl.int32)
    if CONTRACTED:
        filled, last = row < rows, tl.minimum(count, length)
    else:
        filled, last = row < tl.minimum(count, rows), tl.where(down * ROWS < count, length, 0)
    a_ptr, b_ptr = a_ptr + group * a_group + row[:, None] * a_row, b_ptr + group * b_group + column[None, :] * b_row
    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, last, ALONG):
        along = start + tl.arange(0, ALONG).to(tl.int64)
        a = tl.load(a_ptr + along[None, :] * a_along, filled[:, None] & (along < last)[None, :], 0.0)
        b = tl.load(b_ptr + along[:, None] * b_along, (column < columns)[None, :] & (along < last)[:, None], 0.0)
        out = tl.dot(a, b, out, input_precision=PRECISION)
    at = (group * rows + row)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, out, (row < rows)[:, None] & (column < columns)[None, :])


def grouped(a: Tensor, b: Tensor, count: Tensor, contracted: bool, fp32: str) -> Tensor:
    """`grouped` of its definition, of bfloat16 operands or of float32 ones as `fp32` says."""
    (groups, rows, length), columns = a.shape, b.shape[1]
    halves = a.element_size() == 2
    most = _MOST if halves else _MOST // 2
    tile, other = (min(max(triton.next_power_of_2(n), _LEAST), most) for n in (rows, columns))
    out = a.new_empty(groups, rows, columns, dtype=torch.float32)
    tiles = {"ROWS": tile, "COLUMNS": other, "ALONG": _BYTES // a.element_size()}
    # at most 97 KiB of shared memory, of which sm_89 and sm_120 have 99
    warps, stages = 8 if tile * other > 2**13 else 4, 3 if halves else 2
    how = {"PRECISION": fp32, "num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    programs = launch_grid(triton.cdiv(rows, tile) * triton.cdiv(columns, other), groups)
    sizes = rows, columns, length, *a.stride(), *b.stride()
    _grouped_kernel[programs](a, b, count, out, *sizes, CONTRACTED=contracted, **tiles, **how)
    return out
