"""Codes of the rows and of the columns of x by programs that take several regions, one after the other.

A candidate: nothing takes it before it is measured beside `launch.launch_both`, which has a program for each region.
There a tenth of a program's instructions read the descriptor row and divide (docs/log.md); here that is done once for
all regions that a program takes. Bits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import is_large, launch_grid
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.triton.blocks import numbers_of
from fp4dse.kernels.quant.triton.launch import flags, pairs
from fp4dse.kernels.quant.triton.tiles import tile, write


@triton.jit
def _region(
    x_ptr,
    codes_ptr,
    scales_ptr,
    lane,
    row0,
    rows,
    column0,
    width,
    numbers,
    B: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """TILES tiles of a lane's operand [rows, width], from (row0, column0) on down x; see `tile` and `write`."""
    for n in range(TILES):
        at_row = row0 if COLUMNS else row0 + (TILES - 1 - n) * TILE_ROWS
        at_column = column0 + n * TILE_COLUMNS if COLUMNS else column0
        x = tile(x_ptr, at_row, rows, at_column, width, TILE_ROWS, TILE_COLUMNS, COLUMNS, False, PAIRS)
        place = lane, at_row, rows, at_column, width
        write(x, codes_ptr, scales_ptr, *place, numbers, B, False, B == 16, COLUMNS, False, False, UNUSUAL, "block")


@triton.jit(do_not_specialize=["stream"])
def _in_turn_kernel(
    x_ptr,
    codes_1_ptr,
    scales_1_ptr,
    dec_1_ptr,
    floats_1_ptr,
    ints_1_ptr,
    amax_1_ptr,
    codes_2_ptr,
    scales_2_ptr,
    dec_2_ptr,
    floats_2_ptr,
    ints_2_ptr,
    amax_2_ptr,
    rows,
    width,
    seeds_ptr,
    step_ptr,
    stream,
    B_1: tl.constexpr,
    PAIRS_1: tl.constexpr,
    TENSOR_SCALE_1: tl.constexpr,
    UNUSUAL_1: tl.constexpr,
    B_2: tl.constexpr,
    PAIRS_2: tl.constexpr,
    TENSOR_SCALE_2: tl.constexpr,
    UNUSUAL_2: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES_1: tl.constexpr,
    TILES_2: tl.constexpr,
    SAME: tl.constexpr,
):
    """The operand of rows of regions of HEIGHT by WIDTH numbers of x [L, rows, width] (1), and that of columns (2), the
    last region first: what the tensor maximum read last is still in the cache. SAME: both have one descriptor row and
    maximum, which then take registers once."""
    lane = tl.program_id(1).to(tl.int64)
    x_ptr += lane * rows * width
    rest = seeds_ptr, step_ptr, stream, 0
    one = numbers_of(lane, floats_1_ptr, ints_1_ptr, amax_1_ptr, *rest, TENSOR_SCALE_1, "block")
    if SAME:  # noqa: SIM108 - known when compiling
        two = one
    else:
        two = numbers_of(lane, floats_2_ptr, ints_2_ptr, amax_2_ptr, *rest, TENSOR_SCALE_2, "block")
    if tl.program_id(0) == 0:
        tl.store(dec_1_ptr + lane, one[6])
        tl.store(dec_2_ptr + lane, two[6])
    across = (width + WIDTH - 1) // WIDTH
    count = (rows + HEIGHT - 1) // HEIGHT * across
    for number in range(tl.program_id(0), count, tl.num_programs(0)):
        region = count - 1 - number
        row0, column0 = region // across * HEIGHT, region % across * WIDTH
        _region(
            x_ptr,
            codes_1_ptr,
            scales_1_ptr,
            lane,
            row0,
            rows,
            column0,
            width,
            one,
            B_1,
            HEIGHT // TILES_1,
            WIDTH,
            TILES_1,
            False,
            PAIRS_1,
            UNUSUAL_1,
        )
        _region(
            x_ptr,
            codes_2_ptr,
            scales_2_ptr,
            lane,
            column0,
            width,
            row0,
            rows,
            two,
            B_2,
            WIDTH,
            HEIGHT // TILES_2,
            TILES_2,
            True,
            PAIRS_2,
            UNUSUAL_2,
        )


class Regions(NamedTuple):
    """Rows and columns of a region, both multiples of 64 and of blocks; its tiles for the operand of rows; warps;
    programs of a lane; registers of a thread, or None for as many as the compiler wants. None of these changes results.
    """

    height: int
    width: int
    tiles: int
    warps: int
    programs: int
    registers: int | None = None


def both_in_turn(x: Tensor, calls: Sequence[Call], regions: Regions) -> list[Tensor]:
    """`operators.both` of bfloat16 or float32 x [L, R, C] as codes: codes, scale codes and decode factors of the rows,
    then of the columns.

    calls: with the maxima that tensor scales follow. ValueError for those that rotate, round stochastically or adapt,
    and for lanes of more than 2^30 numbers.
    """
    lanes, rows, width = x.shape
    unusual = [c for c in calls if c.rotation or c.features.stochastic or c.features.adaptive or c.features.ties]
    if unusual or is_large(rows * width):
        raise ValueError(f"calls: found {unusual[:1] or x.shape}; accepted: those to nearest, of at most 2^30 numbers")
    constants: dict[str, Any] = {"HEIGHT": regions.height, "WIDTH": regions.width, "TILES_1": regions.tiles}
    one, two = calls
    constants["SAME"] = all(getattr(one, name) is getattr(two, name) for name in ("floats", "ints", "tensor_amax"))
    constants |= {"TILES_2": regions.height // 64, "num_warps": regions.warps, "maxnreg": regions.registers}
    pointers: list[Tensor] = []
    outputs: list[Tensor] = []
    for n, (call, seen) in enumerate(zip(calls, (x, x.mT), strict=True)):
        shape = seen.shape[:2]
        codes, scales = (x.new_empty(*shape, seen.shape[2] // of, dtype=torch.uint8) for of in (2, call.block))
        dec = x.new_empty(lanes, dtype=torch.float32)
        amax = dec if call.tensor_amax is None else call.tensor_amax
        outputs += [codes, scales, dec]
        pointers += [codes, scales, dec, call.floats, call.ints, amax]
        chosen = {name: flags(call.features)[name] for name in ("TENSOR_SCALE", "UNUSUAL")}
        named = {"B": call.block, "PAIRS": pairs(x, n == 1, 0)} | chosen
        constants |= {f"{name}_{n + 1}": value for name, value in named.items()}
    common = rows, width, calls[0].seeds, calls[0].step, STREAMS["rounding"]
    count = triton.cdiv(rows, regions.height) * triton.cdiv(width, regions.width)
    programs = launch_grid(min(count, regions.programs), lanes)
    _in_turn_kernel[programs](x, *pointers, *common, **constants, enable_fp_fusion=False)
    return outputs
