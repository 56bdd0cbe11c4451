"""Products of groups on a GPU: a program makes one tile of one group's result, along what is filled of the contraction.

How many rows are filled lies on the device, so that a captured step goes by the router's choice of each batch: there
are programs for all rows that there is room for, and those of empty tiles write zeros without a load. Tiles follow from
the room alone, and every sum is of one program, in the order of K: a group has the same bits whatever the other groups
have, and whatever is empty behind it, since zeros add nothing. Along K whole pieces are loaded, the last one with the
zeros that are there: a mask that ends anywhere would take numbers one by one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import SEGMENT

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
        a = tl.load(a_ptr + along[None, :] * a_along, filled[:, None] & (along < length)[None, :], 0.0)
        b = tl.load(b_ptr + along[:, None] * b_along, (column < columns)[None, :] & (along < length)[:, None], 0.0)
        out = tl.dot(a, b, out, input_precision=PRECISION)
    at = (group * rows + row)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, out, (row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _grouped_segments_kernel(
    a_ptr,
    b_ptr,
    factor_a_ptr,
    factor_b_ptr,
    count_ptr,
    out_ptr,
    rows,
    columns,
    segments,
    a_group,
    a_row,
    a_along,
    b_group,
    b_row,
    b_along,
    CONTRACTED: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """One tile: the sum of each segment that is filled, scaled, is added to those before it."""
    group = tl.program_id(1).to(tl.int64)
    across = (columns + COLUMNS - 1) // COLUMNS
    down, place = tl.program_id(0) // across, tl.program_id(0) % across
    row = (down * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (place * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    count = tl.load(count_ptr + group).to(tl.int32)
    if CONTRACTED:
        filled, last = row < rows, tl.minimum((count + SEGMENT - 1) // SEGMENT, segments)
    else:
        filled, last = row < tl.minimum(count, rows), tl.where(down * ROWS < count, segments, 0)
    a_ptr, b_ptr = a_ptr + group * a_group + row[:, None] * a_row, b_ptr + group * b_group + column[None, :] * b_row
    factor_a_ptr += (group * rows + row) * segments
    factor_b_ptr += (group * columns + column) * segments
    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for number in range(last):
        part = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in tl.static_range(0, SEGMENT, ALONG):
            along = number * SEGMENT + start + tl.arange(0, ALONG).to(tl.int64)
            a = tl.load(a_ptr + along[None, :] * a_along, filled[:, None], 0.0)
            b = tl.load(b_ptr + along[:, None] * b_along, (column < columns)[None, :], 0.0)
            part = tl.dot(a, b, part, input_precision=PRECISION)
        if HAS_A:
            part = part * tl.load(factor_a_ptr + number, filled, 0.0)[:, None]
        if HAS_B:
            part = part * tl.load(factor_b_ptr + number, column < columns, 0.0)[None, :]
        out = out + part
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


def grouped_in_segments(
    a: Tensor,
    b: Tensor,
    factor_a: Tensor | None,
    factor_b: Tensor | None,
    count: Tensor,
    contracted: bool,
    fp32: str,
) -> Tensor:
    """`grouped_in_segments` of its definition, operands as in `grouped`."""
    (groups, rows, length), columns = a.shape, b.shape[1]
    halves = a.element_size() == 2
    tile = min(max(triton.next_power_of_2(rows), _LEAST), _MOST // 2)
    other = min(max(triton.next_power_of_2(columns), _LEAST), _MOST if halves else _MOST // 2)
    out = a.new_empty(groups, rows, columns, dtype=torch.float32)
    factors = [out if f is None else f.contiguous() for f in (factor_a, factor_b)]
    constants = {"CONTRACTED": contracted, "HAS_A": factor_a is not None, "HAS_B": factor_b is not None}
    tiles = {"ROWS": tile, "COLUMNS": other, "ALONG": _BYTES // a.element_size(), "SEGMENT": SEGMENT}
    # two stages of all pieces of a segment: 96 KiB of shared memory
    how = {"PRECISION": fp32, "num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    programs = launch_grid(triton.cdiv(rows, tile) * triton.cdiv(columns, other), groups)
    sizes = rows, columns, length // SEGMENT, *a.stride(), *b.stride()
    _grouped_segments_kernel[programs](a, b, *factors, count, out, *sizes, **constants, **tiles, **how)
    return out
