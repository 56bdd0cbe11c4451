"""Products of narrow matrices on a GPU, in one order for every number of lanes.

Where a matrix has few rows, or its rows do not begin at multiples of 16 bytes, cuBLAS chooses between matrix-vector
kernels, kernels that cut the contraction, and others, by the number of matrices among other things: a lane would not
have the bits in company that it has alone. Here a program makes one tile of one matrix's result, along the whole
contraction; or along a part of it where that is long, as in the gradient of a first convolution, whose contraction goes
over all pixels of a batch. Parts are then added by `sums.lane_sum`. Tiles and parts follow from the shape alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import FLAT, TILE, launch_grid
from fp4dse.kernels.ops.products import SEGMENT
from fp4dse.kernels.ops.sums import lane_sum

_LEAST, _MOST, _BYTES = 16, 64, 128
"""Edges of a tile of the result, and bytes of the contraction that are loaded at a time."""
LONG, _PROGRAMS = 8192, 1024
"""Numbers of the contraction that one program takes, unless there would be more programs than so many for a matrix:
then each takes more."""


@triton.jit
def _product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    rows,
    columns,
    length,
    a_lane,
    a_row,
    a_along,
    b_lane,
    b_row,
    b_along,
    part,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One tile. PARTS: the contraction is cut in parts of `part`, which take turns along the second axis."""
    lane = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    place, first, last = tl.program_id(1), 0, length
    if PARTS:
        across = (columns + COLUMNS - 1) // COLUMNS
        number = place // across
        place, first = place % across, number * part
        last = tl.minimum(first + part, length)
        lane_out = lane * (tl.num_programs(1) // across) + number
    else:
        lane_out = lane
    column = (place * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    a_ptr, b_ptr = a_ptr + lane * a_lane + row[:, None] * a_row, b_ptr + lane * b_lane + column[None, :] * b_row
    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(first, last, ALONG):
        along = start + tl.arange(0, ALONG).to(tl.int64)
        a = tl.load(a_ptr + along[None, :] * a_along, (row < rows)[:, None] & (along < length)[None, :], 0.0)
        b = tl.load(b_ptr + along[:, None] * b_along, (column < columns)[None, :] & (along < length)[:, None], 0.0)
        out = tl.dot(a, b, out, input_precision=PRECISION)
    at = (lane_out * rows + row)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, out, (row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _segments_kernel(
    a_ptr,
    b_ptr,
    factor_a_ptr,
    factor_b_ptr,
    out_ptr,
    rows,
    columns,
    segments,
    a_lane,
    a_row,
    a_along,
    b_lane,
    b_row,
    b_along,
    HAS_A: tl.constexpr,
    HAS_B: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """One tile, along the whole contraction: the sum of a segment, scaled, is added to that of those before it."""
    lane = tl.program_id(2).to(tl.int64)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    a_ptr, b_ptr = a_ptr + lane * a_lane + row[:, None] * a_row, b_ptr + lane * b_lane + column[None, :] * b_row
    factor_a_ptr += (lane * rows + row) * segments
    factor_b_ptr += (lane * columns + column) * segments
    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for number in range(segments):
        part = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in tl.static_range(0, SEGMENT, ALONG):
            along = number * SEGMENT + start + tl.arange(0, ALONG).to(tl.int64)
            a = tl.load(a_ptr + along[None, :] * a_along, (row < rows)[:, None], 0.0)
            b = tl.load(b_ptr + along[:, None] * b_along, (column < columns)[None, :], 0.0)
            part = tl.dot(a, b, part, input_precision=PRECISION)
        if HAS_A:
            part = part * tl.load(factor_a_ptr + number, row < rows, 0.0)[:, None]
        if HAS_B:
            part = part * tl.load(factor_b_ptr + number, column < columns, 0.0)[None, :]
        out = out + part
    at = (lane * rows + row)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, out, (row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _scale_kernel(x_ptr, a_ptr, b_ptr, n, BOTH: tl.constexpr, TILE: tl.constexpr):
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + lane * n + at, at < n, 0.0) * tl.load(a_ptr + lane)
    if BOTH:
        x = x * tl.load(b_ptr + lane)
    tl.store(x_ptr + lane * n + at, x, at < n)


def multiply(a: Tensor, b: Tensor, fp32: str) -> Tensor:
    """a [L, R, K] · b [L, S, K]ᵀ in float32 [L, R, S] of bfloat16 operands, or of float32 ones as `fp32` says.

    Any strides. fp32: `ieee` or `tf32`.
    """
    (lanes, rows, length), columns = a.shape, b.shape[1]
    tile, other = (min(max(triton.next_power_of_2(n), _LEAST), _MOST) for n in (rows, columns))
    down, across = triton.cdiv(rows, tile), triton.cdiv(columns, other)
    along = _BYTES // a.element_size()
    part = part_of(length, down * across, along)
    parts = max(1, triton.cdiv(length, part))
    out = a.new_empty(lanes, parts, rows, columns, dtype=torch.float32)
    tiles = {"PRECISION": fp32, "ROWS": tile, "COLUMNS": other, "ALONG": along, "PARTS": parts > 1, "num_warps": 4}
    programs = launch_grid(down, across * parts, lanes)
    _product_kernel[programs](a, b, out, rows, columns, length, *a.stride(), *b.stride(), part, **tiles)
    return out[:, 0] if parts == 1 else lane_sum(out.view(lanes, parts, -1), 1).view(lanes, rows, columns)


def in_segments(a: Tensor, b: Tensor, factor_a: Tensor | None, factor_b: Tensor | None, fp32: str) -> Tensor:
    """`products.in_segments` of bfloat16 operands, or of float32 ones as `fp32` says; any strides."""
    (lanes, rows, length), columns = a.shape, b.shape[1]
    halves = a.element_size() == 2
    tile = min(max(triton.next_power_of_2(rows), _LEAST), 2 * _MOST if halves else _MOST)
    other = min(max(triton.next_power_of_2(columns), _LEAST), _MOST)
    out = a.new_empty(lanes, rows, columns, dtype=torch.float32)
    factors = [out if f is None else f.contiguous() for f in (factor_a, factor_b)]
    has = {"HAS_A": factor_a is not None, "HAS_B": factor_b is not None}
    tiles = {"ROWS": tile, "COLUMNS": other, "ALONG": _BYTES // a.element_size(), "SEGMENT": SEGMENT}
    programs = launch_grid(triton.cdiv(rows, tile), triton.cdiv(columns, other), lanes)
    sizes = rows, columns, length // SEGMENT, *a.stride(), *b.stride()
    # no fused multiply-add of the factors; at most 97 KiB of shared memory, of which sm_89 and sm_120 have 99
    how = {"PRECISION": fp32, "num_warps": 4, "num_stages": 2 if halves else 1, "enable_fp_fusion": False}
    _segments_kernel[programs](a, b, *factors, out, *sizes, **has, **tiles, **how)
    return out


def part_of(length: int, tiles: int, along: int) -> int:
    """Numbers of the contraction that a program takes of a matrix whose result has so many tiles."""
    parts = max(1, min(triton.cdiv(length, LONG), _PROGRAMS // tiles))
    return max(1, triton.cdiv(length, parts * along)) * along


def scale(x: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
    """x [L, …], contiguous, times a [L], then times b [L]; in place."""
    n = x[0].numel()
    _scale_kernel[launch_grid(triton.cdiv(n, TILE), len(x))](
        x, a.contiguous(), a if b is None else b.contiguous(), n, BOTH=b is not None, **FLAT
    )
    return x
