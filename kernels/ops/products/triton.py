"""Products on a GPU that have one order for every number of lanes, or end with more than their sums.

Where a matrix has few rows, or its rows do not begin at multiples of 16 bytes, cuBLAS chooses between matrix-vector
kernels, kernels that cut the contraction, and others, by the number of matrices among other things: a lane would not
have the bits in company that it has alone. Here a program makes one tile of one matrix's result, along the whole
contraction; or along a part of it where that is long, as in the gradient of a first convolution, whose contraction goes
over all pixels of a batch. Parts are then added by `sums.lane_sum`. Tiles and parts follow from the shape alone.

A product of BF16 operands that has factors or a bias is made here, too, unless its contraction is long: a library would
write its sums in FP32, to be read and written again.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4dse.kernels.ops.launching import FLAT, TILE, launch_grid
from fp4dse.kernels.ops.products import AS_IT_IS, SEGMENT, Finish, finished
from fp4dse.kernels.ops.sums import lane_sum

_LEAST, _MOST, _BYTES = 16, 64, 128
"""Edges of a tile of the result, and bytes of the contraction that are loaded at a time."""
_ALONG = 64
"""The same in numbers, of products that are not narrow."""
LENGTH, _PROGRAMS = 8192, 1024
"""Numbers of the contraction that one program takes, unless there would be more programs than so many for a matrix:
then each takes more."""


@triton.jit
def finish_tile(
    out,
    factor_a_ptr,
    factor_b_ptr,
    bias_ptr,
    lane,
    row,
    rows,
    column,
    columns,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
):
    """A tile as `products.finished` has it, but for its dtype.

    OF_A, OF_B: dimensions of the factors, 1 for one a lane, 2 for one a row, 0 for none.
    """
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
    return out


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
    out_lane,
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
    """One tile, finished.

    PARTS: the contraction is cut in parts of `part`, which take turns along the second axis. WHOLE: no tile reaches
    beyond an operand. out_lane: numbers from a lane of the result, with all its parts, to the next.
    """
    down, across = (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
    lane, number = (tl.program_id(0) // (down * across)).to(tl.int64), tl.program_id(1)
    place = tl.program_id(0) % (down * across)
    row = (place // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (place % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
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
    out = finish_tile(out, factor_a_ptr, factor_b_ptr, bias_ptr, lane, row, rows, column, columns, OF_A, OF_B, BIAS)
    out_ptr += lane * out_lane
    at = ((number * rows + row) if PARTS else row)[:, None] * columns + column[None, :]
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
def _described_kernel(
    a,
    b,
    out_ptr,
    factor_a_ptr,
    factor_b_ptr,
    bias_ptr,
    rows,
    columns,
    length,
    out_lane,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
    GROUP: tl.constexpr,
    A_LAST: tl.constexpr,
    B_LAST: tl.constexpr,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One tile, finished, of operands that the copy engine loads, all lanes one below the other.

    A_LAST, B_LAST: whether the contraction is along the last axis of what is loaded. GROUP: programs that run at a time
    take so many tiles below one another, so that they share both operands in the cache. out_lane: numbers from a lane
    of the result to the next.
    """
    lane = tl.program_id(1)
    down, across = (rows + ROWS - 1) // ROWS, (columns + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // (GROUP * across) * GROUP
    height, place = tl.minimum(down - first, GROUP), tl.program_id(0) % (GROUP * across)
    row0, column0 = (first + place % height) * ROWS, place // height * COLUMNS
    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, length, ALONG):
        x = a.load([lane * rows + row0, start]) if A_LAST else tl.trans(a.load([lane * length + start, row0]))
        y = tl.trans(b.load([lane * columns + column0, start])) if B_LAST else b.load([lane * length + start, column0])
        out = tl.dot(x, y, out)
    row, column = row0 + tl.arange(0, ROWS).to(tl.int64), column0 + tl.arange(0, COLUMNS).to(tl.int64)
    lane = lane.to(tl.int64)
    out = finish_tile(out, factor_a_ptr, factor_b_ptr, bias_ptr, lane, row, rows, column, columns, OF_A, OF_B, BIAS)
    at = lane * out_lane + row[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), (row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _scale_kernel(x_ptr, a_ptr, b_ptr, n, apart, BOTH: tl.constexpr, TILE: tl.constexpr):
    """x: [L, n], lanes `apart` from one another."""
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + lane * apart + at, at < n, 0.0) * tl.load(a_ptr + lane)
    if BOTH:
        x = x * tl.load(b_ptr + lane)
    tl.store(x_ptr + lane * apart + at, x, at < n)


def multiply(a: Tensor, b: Tensor, fp32: str, finish: Finish = AS_IT_IS) -> Tensor:
    """`products.multiply` of narrow operands, bfloat16 ones or float32 ones as `fp32` says, any strides."""
    (rows, length), columns = a.shape[1:], b.shape[1]
    tile, other = (min(max(triton.next_power_of_2(n), _LEAST), _MOST) for n in (rows, columns))
    along = _BYTES // a.element_size()
    part = part_of(length, triton.cdiv(rows, tile) * triton.cdiv(columns, other), along)
    return _multiply(a, b, fp32, finish, Tiles(tile, other, along, 4, 3), part)


def tiled(a: Tensor, b: Tensor, finish: Finish = AS_IT_IS) -> Tensor:
    """`products.multiply` of bfloat16 operands that are not narrow, each tile along the whole contraction."""
    if a.shape[1] >= TALL_FROM and b.shape[1] >= TALL.columns and are_described(a, b):
        return described(a, b, finish, TALL)
    return _multiply(a, b, "ieee", finish, tiles_of(a.shape[1], b.shape[1]), a.shape[2])


class Tiles(NamedTuple):
    """Numbers of a program's tile of the result and of the contraction that it loads at a time; warps; stages."""

    rows: int
    columns: int
    along: int
    warps: int
    stages: int


TALL, TALL_FROM = Tiles(256, 128, _ALONG, 8, 4), 2048
"""Tiles of operands that the copy engine loads, and rows from which on they are taken. Of eight kinds these were the
fastest or within 5 % of it for all products of two decoders that have factors and 16,384 rows, and not for 512 rows."""
GROUP = 8
"""Tiles of TALL below one another that programs take at a time."""


def tiles_of(rows: int, columns: int) -> Tiles:
    """The tiles of a product whose result is smaller than one of TALL, or whose operands are not described."""
    tile, other = (min(max(triton.next_power_of_2(n), 64), 128) for n in (rows, columns))
    return Tiles(tile, other, _ALONG, 8 if tile * other > 2**13 else 4, 3)


def are_described(a: Tensor, b: Tensor) -> bool:
    """True if the copy engine can load both operands: their lanes lie one below the other in one matrix, and no tile
    reaches from one lane into the next along the contraction."""
    return _has_copy_engine(a.device) and all(_is_described(x) for x in (a, b))


def _is_described(x: Tensor) -> bool:
    line = x if x.stride(2) == 1 else x.mT
    if line.stride(2) != 1 or (len(x) > 1 and line.stride(0) != line.shape[1] * line.stride(1)):
        return False
    return line is x or x.shape[2] % _ALONG == 0


@cache
def _has_copy_engine(device: torch.device) -> bool:
    """True if a device has one, and shared memory for the stages of TALL, 192 KiB: sm_90 and sm_100, not sm_120."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def described(a: Tensor, b: Tensor, finish: Finish, tiles: Tiles) -> Tensor:
    """A product in tiles that the copy engine loads, if `are_described`."""
    (lanes, rows, length), columns = a.shape, b.shape[1]
    out = a.new_empty(lanes, rows, columns, dtype=finish.dtype) if finish.out is None else finish.out
    programs = launch_grid(triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns), lanes)
    operands = _description(a, tiles.rows, tiles.along), _description(b, tiles.columns, tiles.along)
    factors, constants = constants_of(finish, out, tiles)
    last = {"A_LAST": a.stride(2) == 1, "B_LAST": b.stride(2) == 1}
    sizes = rows, columns, length, out.stride(0)
    _described_kernel[programs](*operands, out, *factors, *sizes, GROUP=GROUP, **last, **constants)
    return out


def _description(x: Tensor, lines: int, along: int) -> TensorDescriptor:
    """All lanes of x [L, R, K] as one matrix, of which tiles of so many lines and of so much of K are loaded."""
    tile, of = ([lines, along], x) if x.stride(2) == 1 else ([along, lines], x.mT)
    return TensorDescriptor(x, [len(of) * of.shape[1], of.shape[2]], [of.stride(1), 1], tile)


def constants_of(finish: Finish, out: Tensor, tiles: Tiles) -> tuple[list[Tensor], dict[str, Any]]:
    """Factors and bias of a finish, `out` in the place of those that are not, and the constants of both kernels that
    follow from it and from tiles."""
    factors = [out if f is None else f.contiguous() for f in (finish.factor_a, finish.factor_b, finish.bias)]
    of_a, of_b = finish.dimensions((len(out), *out.shape[-2:]))
    sizes = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "ALONG": tiles.along}
    flags = {"OF_A": of_a, "OF_B": of_b, "BIAS": finish.bias is not None, "enable_fp_fusion": False}
    return factors, sizes | flags | {"num_warps": tiles.warps, "num_stages": tiles.stages}


def _multiply(a: Tensor, b: Tensor, fp32: str, finish: Finish, tiles: Tiles, part: int) -> Tensor:
    """A product in tiles, the contraction in parts of so many numbers, which are added in a fixed order."""
    (lanes, rows, length), columns = a.shape, b.shape[1]
    parts = max(1, triton.cdiv(length, part))
    # what is computed with fused multiply-adds (FP32), or in parts, is finished afterwards
    within = finish if parts == 1 and a.dtype == torch.bfloat16 else AS_IT_IS
    product = finish.out if parts == 1 and finish.dtype == within.dtype else None
    out = a.new_empty(lanes, parts, rows, columns, dtype=within.dtype) if product is None else product[:, None]
    whole = not (rows % tiles.rows or columns % tiles.columns or length % tiles.along)
    factors, constants = constants_of(within, out, tiles)
    constants |= {"PRECISION": fp32, "PARTS": parts > 1, "WHOLE": whole and parts == 1}
    constants["enable_fp_fusion"] = a.dtype == torch.float32
    down, across = triton.cdiv(rows, tiles.rows), triton.cdiv(columns, tiles.columns)
    programs = launch_grid(lanes * down * across, parts)
    sizes = rows, columns, length, *a.stride(), *b.stride(), out.stride(0), part
    _product_kernel[programs](a, b, out, *factors, *sizes, **constants)
    if product is None:
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
    parts = max(1, min(triton.cdiv(length, LENGTH), _PROGRAMS // tiles))
    return max(1, triton.cdiv(length, parts * along)) * along


def scale(x: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
    """x [L, …], each lane in one piece, times a [L], then times b [L]; in place."""
    n = x[0].numel()
    _scale_kernel[launch_grid(triton.cdiv(n, TILE), len(x))](
        x, a.contiguous(), a if b is None else b.contiguous(), n, x.stride(0), BOTH=b is not None, **FLAT
    )
    return x
