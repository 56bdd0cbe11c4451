"""A product of BF16 operands by as many programs as a device runs at a time, each of which takes tile after tile.

A candidate: nothing takes it before it is measured beside `described`, which has a program for each tile. There a tile
is finished and written while its processor has nothing to multiply; here the operands of the next tile are loaded
meanwhile. The tiles, their order of sums and so their bits are those of `described`, whatever the number of programs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4dse.kernels.dispatch import by_device
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import Finish
from fp4dse.kernels.ops.products.triton import Tiles, constants_of, described_operand, finished_tile, place_of

GROUP = 8
"""Tiles below one another that programs take at a time."""
_FEW = 3
"""Programs where Triton is interpreted."""


@triton.jit(do_not_specialize=["lanes"])
def _persistent_kernel(
    a,
    b,
    out,
    factor_a_ptr,
    factor_b_ptr,
    bias_ptr,
    lanes,
    rows,
    columns,
    length,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
    GROUP: tl.constexpr,
    A_LAST: tl.constexpr,
    B_LAST: tl.constexpr,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    FLATTEN: tl.constexpr,
    SPECIALIZED: tl.constexpr,
    STAGED: tl.constexpr,
):
    """Tiles of all lanes in turn, finished; a, b, A_LAST, B_LAST and GROUP as in `described`.

    out: a descriptor of the result [L, R, S] where STAGED, which the copy engine then writes, else a pointer.
    PARTS: a tile is finished and written in so many parts, 1 or 2, side by side. FLATTEN: the loops over tiles and
    along the contraction are one. SPECIALIZED: warps that load and warps that multiply are different ones; Triton 3.6
    does so on sm_90 for 4 warps, which are 12 then, where neither FLATTEN nor STAGED is set; else it does not or fails.
    """
    of_lane = ((rows + ROWS - 1) // ROWS) * ((columns + COLUMNS - 1) // COLUMNS)
    WIDE: tl.constexpr = COLUMNS // PARTS
    for number in tl.range(
        tl.program_id(0), lanes * of_lane, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZED
    ):
        lane = number // of_lane
        row0, column0 = place_of(number % of_lane, rows, columns, ROWS, COLUMNS, GROUP)
        total = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
        for start in range(0, length, ALONG):
            x = a.load([lane * rows + row0, start]) if A_LAST else tl.trans(a.load([lane * length + start, row0]))
            if B_LAST:
                y = tl.trans(b.load([lane * columns + column0, start]))
            else:
                y = b.load([lane * length + start, column0])
            total = tl.dot(x, y, total)
        factors = factor_a_ptr, factor_b_ptr, bias_ptr
        there = lane, row0, rows, column0, columns
        if PARTS == 2:
            left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, WIDE)), (0, 2, 1)))
            _written(left, out, *factors, *there, OF_A, OF_B, BIAS, STAGED)
            there = lane, row0, rows, column0 + WIDE, columns
            _written(right, out, *factors, *there, OF_A, OF_B, BIAS, STAGED)
        else:
            _written(total, out, *factors, *there, OF_A, OF_B, BIAS, STAGED)


@triton.jit
def _written(
    tile,
    out,
    factor_a_ptr,
    factor_b_ptr,
    bias_ptr,
    lane,
    row0,
    rows,
    column0,
    columns,
    OF_A: tl.constexpr,
    OF_B: tl.constexpr,
    BIAS: tl.constexpr,
    STAGED: tl.constexpr,
):
    """Finish a tile at (row0, column0) of a lane, and write it."""
    row, column = row0 + tl.arange(0, tile.shape[0]).to(tl.int64), column0 + tl.arange(0, tile.shape[1]).to(tl.int64)
    at = lane.to(tl.int64)
    tile = finished_tile(tile, factor_a_ptr, factor_b_ptr, bias_ptr, at, row, rows, column, columns, OF_A, OF_B, BIAS)
    if STAGED:
        out.store([lane, row0, column0], tl.reshape(tile.to(out.dtype), (1, tile.shape[0], tile.shape[1])))
    else:
        there = out + (at * rows + row)[:, None] * columns + column[None, :]
        tl.store(there, tile.to(out.dtype.element_ty), (row < rows)[:, None] & (column < columns)[None, :])


class How(NamedTuple):
    """Choices of the kernel that change no bits: its flags, see there, and how many programs a processor has."""

    parts: int = 1
    flatten: bool = True
    specialized: bool = False
    staged: bool = True
    programs: int = 1


def persistent(a: Tensor, b: Tensor, finish: Finish, tiles: Tiles, how: How = How()) -> Tensor:  # noqa: B008
    """`triton.described` by programs that take several tiles, for operands that `triton.are_described`.

    ValueError for `how.staged` where rows of the result do not begin at multiples of 16 bytes.
    """
    (lanes, rows, length), columns = a.shape, b.shape[1]
    out = a.new_empty(lanes, rows, columns, dtype=finish.dtype)
    if how.staged and columns * out.element_size() % 16:
        raise ValueError(f"columns: found {columns:,} of {finish.dtype}; accepted: rows of a multiple of 16 bytes")
    tile = [1, tiles.rows, tiles.columns // how.parts]
    there = TensorDescriptor(out, [*out.shape], [*out.stride()], tile) if how.staged else out
    operands = described_operand(a, tiles.rows, tiles.along), described_operand(b, tiles.columns, tiles.along)
    factors, constants = constants_of(finish, out, tiles)
    flags = {"A_LAST": a.stride(2) == 1, "B_LAST": b.stride(2) == 1, "GROUP": GROUP, "PARTS": how.parts}
    flags |= {"FLATTEN": how.flatten, "SPECIALIZED": how.specialized, "STAGED": how.staged}
    tiles_in_all = lanes * triton.cdiv(rows, tiles.rows) * triton.cdiv(columns, tiles.columns)
    programs = launch_grid(min(tiles_in_all, how.programs * processors(a.device)))
    _persistent_kernel[programs](*operands, there, *factors, lanes, rows, columns, length, **flags, **constants)
    return out


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a device."""
    if by_device(device, cpu=True, cuda=False):
        return _FEW
    return torch.cuda.get_device_properties(device).multi_processor_count
