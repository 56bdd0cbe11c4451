"""Products of narrow matrices on a GPU, in one order for every number of lanes.

Where a matrix has few rows, or its rows do not begin at multiples of 16 bytes, cuBLAS chooses between matrix-vector
kernels, kernels that cut the contraction, and others, by the number of matrices among other things: a lane would not
have the bits in company that it has alone. Here a program makes one tile of one matrix's result, along the whole
contraction; or along a part of it where that is long, as in the gradient of a first convolution, whose contraction goes
over all pixels of a batch. Parts are then added by `sums.lane_sum`. Tiles and parts follow from the shape alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import FLAT, TILE, launch_grid
from fp4dse.kernels.ops.products import AS_IT_IS, SEGMENT, Finish, finished
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
    factor_a_ptr,
    factor_b_ptr,
    bias_ptr,
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
    WHOLE: tl.constexpr,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One tile, finished as `products.finished` does.

    PARTS: the contraction is cut in parts of `part`, which take turns along the second axis. WHOLE: no tile reaches
    beyond an operand. OF_A, OF_B: dimensions of the factors, 1 for one a lane, 2 for one a row, 0 for none.
    """
    lane, number = tl.program_id(2).to(tl.int64), tl.program_id(1)
    across = (columns + COLUMNS - 1) // COLUMNS
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    first, last = 0, length
    if PARTS:
        first = number * part
        last = tl.minimum(first + part, length)
    along = first + tl.arange(0, ALONG)
    a_ptr += lane * a_lane + row[:, None] * a_row + along.to(tl.int64)[None, :] * a_along
    b_ptr += lane * b_lane + column[None, :] * b_row + along.to(tl.int64)[:, None] * b_along
    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(first, last, ALONG):
        if WHOLE:
            a, b = tl.load(a_ptr), tl.load(b_ptr)
        else:
            rest = tl.arange(0, ALONG) < length - start
            a = tl.load(a_ptr, (row < rows)[:, None] & rest[None, :], 0.0)
            b = tl.load(b_ptr, (column < columns)[None, :] & rest[:, None], 0.0)
        out = tl.dot(a, b, out, input_precision=PRECISION)
        a_ptr += ALONG * a_along
        b_ptr += ALONG * b_along
    if OF_A == 1:
        out = out * tl.load(factor_a_ptr + lane)
    elif OF_A == 2:
        out = out * tl.load(factor_a_ptr + lane * rows + row, row < rows, 0.0)[:, None]
    if OF_B == 1:
        out = out * tl.load(factor_b_ptr + lane)
    elif OF_B == 2:
        out = out * tl.load(factor_b_ptr + lane * columns + column, column < columns, 0.0)[None, :]
    if BIAS:
        out = out + tl.load(bias_ptr + lane * columns + column, column < columns, 0.0)[None, :]
    lane_out = lane * tl.num_programs(1) + number if PARTS else lane
    at = (lane_out * rows + row)[:, None] * columns + column[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(out_ptr + at, out)
    else:
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


def multiply(a: Tensor, b: Tensor, fp32: str, finish: Finish = AS_IT_IS) -> Tensor:
    """`products.multiply` of narrow operands, bfloat16 ones or float32 ones as `fp32` says, any strides."""
    (rows, length), columns = a.shape[1:], b.shape[1]
    tile, other = (min(max(triton.next_power_of_2(n), _LEAST), _MOST) for n in (rows, columns))
    along = _BYTES // a.element_size()
    part = part_of(length, triton.cdiv(rows, tile) * triton.cdiv(columns, other), along)
    return _multiply(a, b, fp32, finish, Tiles(tile, other, along, 4, 3), part)


def tiled(a: Tensor, b: Tensor, finish: Finish = AS_IT_IS) -> Tensor:
    """`products.multiply` of bfloat16 operands that are not narrow, each tile along the whole contraction."""
    return _multiply(a, b, "ieee", finish, tiles_of(a.shape[1], b.shape[1]), a.shape[2])


class Tiles(NamedTuple):
    """Numbers of a program's tile of the result and of the contraction that it loads at a time; warps; stages."""

    rows: int
    columns: int
    along: int
    warps: int
    stages: int


def tiles_of(rows: int, columns: int) -> Tiles:
    """The tiles of a product that is not narrow."""
    tile, other = (min(max(triton.next_power_of_2(n), 64), 128) for n in (rows, columns))
    return Tiles(tile, other, 64, 8 if tile * other > 2**13 else 4, 3)


def _multiply(a: Tensor, b: Tensor, fp32: str, finish: Finish, tiles: Tiles, part: int) -> Tensor:
    """A product in tiles, the contraction in parts of so many numbers, which are added in a fixed order."""
    (lanes, rows, length), columns = a.shape, b.shape[1]
    parts = max(1, triton.cdiv(length, part))
    # what is computed with fused multiply-adds (FP32), or in parts, is finished afterwards
    within = finish if parts == 1 and a.dtype == torch.bfloat16 else AS_IT_IS
    out = a.new_empty(lanes, parts, rows, columns, dtype=within.dtype)
    factors = [out if f is None else f.contiguous() for f in (within.factor_a, within.factor_b, within.bias)]
    of_a, of_b = (0 if f is None else f.dim() for f in (within.factor_a, within.factor_b))
    whole = not (rows % tiles.rows or columns % tiles.columns or length % tiles.along)
    constants = {
        "PRECISION": fp32,
        "ROWS": tiles.rows,
        "COLUMNS": tiles.columns,
        "ALONG": tiles.along,
        "PARTS": parts > 1,
        "WHOLE": whole and parts == 1,
        "OF_A": of_a,
        "OF_B": of_b,
        "BIAS": within.bias is not None,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "enable_fp_fusion": a.dtype == torch.float32,
    }
    down, across = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    programs = launch_grid(down * across, parts, lanes)
    sizes = rows, columns, length, *a.stride(), *b.stride(), part
    _product_kernel[programs](a, b, out, *factors, *sizes, **constants)
    product = out[:, 0] if parts == 1 else lane_sum(out.view(lanes, parts, -1), 1).view(lanes, rows, columns)
    return product if within is finish else finished(product, finish)


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
