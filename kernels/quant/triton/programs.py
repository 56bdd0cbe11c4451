"""The programs of the fused kernels: an operand, or both operands, of a lane, tile by tile.

Only sizes, the codec and what no lane needs are compile-time constants. Bits equal those of `rotation.rotate` and
`reference.decode_operand` with `philox.random16`, whatever the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.fp8 import APART
from fp4dse.kernels.quant.triton.blocks import numbers_of
from fp4dse.kernels.quant.triton.eights import exponent_now, write_top
from fp4dse.kernels.quant.triton.numbers import as_float
from fp4dse.kernels.quant.triton.tiles import rotated, tile, write

_APART = tl.constexpr(APART)


@triton.jit
def _operand(
    lane,
    first,
    row0,
    column0,
    x_ptr,
    signs_ptr,
    out_ptr,
    scales_ptr,
    wide_ptr,
    power_ptr,
    tops_ptr,
    notes_ptr,
    dec_ptr,
    floats_ptr,
    ints_ptr,
    amax_ptr,
    site,
    rows,
    width,
    seeds_ptr,
    step_ptr,
    stream,
    B: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
    CODEC: tl.constexpr,
    FP8: tl.constexpr,
    TRAINING: tl.constexpr,
):
    """TILES tiles of a lane's operand [rows, width], from (row0, column0) on down x; arguments as in `tile`, `write`.

    first: whether this is the lane's first program, which writes the decode factor. Rows go from the end to the start:
    what the tensor maximum read last is still in the cache. A tile is loaded while the one after it is computed. FP8,
    TRAINING: as in `quantize_kernel`; notes: of all programs, whether one set a flag.
    """
    HELD: tl.constexpr = B == 16 and ROTATION <= 16
    x_ptr += lane * rows * width
    if not COLUMNS:
        at = row0 + (TILES - 1) * TILE_ROWS
        x = tile(x_ptr, at, rows, column0, width, TILE_ROWS, TILE_COLUMNS, False, WHOLE, PAIRS)
    numbers = numbers_of(lane, floats_ptr, ints_ptr, amax_ptr, seeds_ptr, step_ptr, stream, site, TENSOR_SCALE, CODEC)
    if first:
        tl.store(dec_ptr + lane, numbers[6])
    exponent, known, top, missed = 0, 0, 0, 0
    if FP8 > 0:
        exponent, known = exponent_now(tops_ptr, lane, step_ptr, FP8, TRAINING)
        top, missed = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        if first:
            tl.store(power_ptr + lane * _APART, as_float(exponent << 23))
    if COLUMNS:
        for n in range(TILES):
            place = row0, rows, column0 + n * TILE_COLUMNS, width
            x = tile(x_ptr, *place, TILE_ROWS, TILE_COLUMNS, True, WHOLE, PAIRS)
            x = rotated(x, signs_ptr, lane, ROTATION, FACTOR)
            found = write(
                x,
                out_ptr,
                scales_ptr,
                wide_ptr,
                lane,
                *place,
                exponent,
                numbers,
                B,
                WHOLE,
                HELD,
                COLUMNS,
                STOCHASTIC,
                ADAPTIVE,
                UNUSUAL,
                CODEC,
                FP8,
            )
            if FP8 > 0:
                top, missed = tl.maximum(top, found[0]), tl.maximum(missed, found[1])
    else:
        for n in range(TILES):
            place = row0 + (TILES - 1 - n) * TILE_ROWS, rows, column0, width
            x_rotated = rotated(x, signs_ptr, lane, ROTATION, FACTOR)
            at = row0 + tl.maximum(TILES - 2 - n, 0) * TILE_ROWS
            left = tl.where(n < TILES - 1, rows, 0)
            x = tile(x_ptr, at, left, column0, width, TILE_ROWS, TILE_COLUMNS, False, WHOLE, PAIRS)
            found = write(
                x_rotated,
                out_ptr,
                scales_ptr,
                wide_ptr,
                lane,
                *place,
                exponent,
                numbers,
                B,
                WHOLE,
                HELD,
                COLUMNS,
                STOCHASTIC,
                ADAPTIVE,
                UNUSUAL,
                CODEC,
                FP8,
            )
            if FP8 > 0:
                top, missed = tl.maximum(top, found[0]), tl.maximum(missed, found[1])
    if FP8 > 0:
        tl.store(notes_ptr + lane * tl.num_programs(0) + tl.program_id(0), missed)
        if TRAINING:
            write_top(top, known, first, tops_ptr, lane, step_ptr)


@triton.jit
def corner(program, width, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, ACROSS: tl.constexpr):
    """Row and column of an operand at which a program begins. ACROSS: it may be more than one tile wide."""
    if ACROSS:
        across = (width + TILE_COLUMNS - 1) // TILE_COLUMNS
        row0, column0 = program // across * TILE_ROWS, program % across * TILE_COLUMNS
    else:
        row0, column0 = program * TILE_ROWS, 0
    return row0, column0


@triton.jit(do_not_specialize=["site", "stream"])
def quantize_kernel(
    x_ptr,
    signs_ptr,
    out_ptr,
    scales_ptr,
    wide_ptr,
    power_ptr,
    tops_ptr,
    notes_ptr,
    dec_ptr,
    floats_ptr,
    ints_ptr,
    amax_ptr,
    site,
    rows,
    width,
    apart,
    seeds_ptr,
    step_ptr,
    stream,
    B: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
    CODEC: tl.constexpr,
    FP8: tl.constexpr,
    TRAINING: tl.constexpr,
    RAGGED: tl.constexpr,
    LARGE: tl.constexpr,
):
    """One operand of x. apart: numbers that lie between the lanes of x. FP8: the bits of its mantissa, 0 for other
    operands. TRAINING: its history is written. RAGGED: rows are not whole tiles. LARGE: see launching.py."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if LARGE:
        program, rows, width = program.to(tl.int64), tl.cast(rows, tl.int64), tl.cast(width, tl.int64)
    lane = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    x_ptr += lane * apart
    ACROSS: tl.constexpr = COLUMNS or RAGGED
    if not ACROSS:
        width = TILE_COLUMNS
    HEIGHT: tl.constexpr = TILE_ROWS * (1 if COLUMNS else TILES)
    row0, column0 = corner(program, width, HEIGHT, TILE_COLUMNS * (TILES if COLUMNS else 1), ACROSS)
    start = lane, program == 0, row0, column0
    pointers = x_ptr, signs_ptr, out_ptr, scales_ptr, wide_ptr, power_ptr, tops_ptr, notes_ptr, dec_ptr
    rest = floats_ptr, ints_ptr, amax_ptr, site, rows, width, seeds_ptr, step_ptr, stream
    _operand(
        *start,
        *pointers,
        *rest,
        B,
        TILE_ROWS,
        TILE_COLUMNS,
        TILES,
        COLUMNS,
        not ACROSS,
        PAIRS,
        ROTATION,
        FACTOR,
        TENSOR_SCALE,
        STOCHASTIC,
        ADAPTIVE,
        UNUSUAL,
        CODEC,
        FP8,
        TRAINING,
    )


@triton.jit(do_not_specialize=["site_1", "site_2", "stream"])
def both_kernel(
    x_ptr,
    signs_1_ptr,
    out_1_ptr,
    scales_1_ptr,
    dec_1_ptr,
    floats_1_ptr,
    ints_1_ptr,
    amax_1_ptr,
    site_1,
    signs_2_ptr,
    out_2_ptr,
    scales_2_ptr,
    dec_2_ptr,
    floats_2_ptr,
    ints_2_ptr,
    amax_2_ptr,
    site_2,
    rows,
    width,
    seeds_ptr,
    step_ptr,
    stream,
    B_1: tl.constexpr,
    PAIRS_1: tl.constexpr,
    ROTATION_1: tl.constexpr,
    FACTOR_1: tl.constexpr,
    TENSOR_SCALE_1: tl.constexpr,
    STOCHASTIC_1: tl.constexpr,
    ADAPTIVE_1: tl.constexpr,
    UNUSUAL_1: tl.constexpr,
    B_2: tl.constexpr,
    PAIRS_2: tl.constexpr,
    ROTATION_2: tl.constexpr,
    FACTOR_2: tl.constexpr,
    TENSOR_SCALE_2: tl.constexpr,
    STOCHASTIC_2: tl.constexpr,
    ADAPTIVE_2: tl.constexpr,
    UNUSUAL_2: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES_1: tl.constexpr,
    TILES_2: tl.constexpr,
    LARGE: tl.constexpr,
):
    """The operand of rows of HEIGHT by WIDTH numbers of x [L, rows, width] (1), and that of columns (2).

    The second one finds them in the multiprocessor's cache. LARGE: see launching.py.
    """
    DOWN: tl.constexpr = 0 if LARGE else 1
    ACROSS: tl.constexpr = 1 - DOWN
    row, column = tl.num_programs(DOWN) - 1 - tl.program_id(DOWN), tl.num_programs(ACROSS) - 1 - tl.program_id(ACROSS)
    if LARGE:
        row, column = row.to(tl.int64), column.to(tl.int64)
        rows, width = tl.cast(rows, tl.int64), tl.cast(width, tl.int64)
    lane = (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    row0, column0 = row * HEIGHT, column * WIDTH
    first = row + column == 0
    rest = seeds_ptr, step_ptr, stream
    no_fp8 = None, None, None, None
    pointers_1 = x_ptr, signs_1_ptr, out_1_ptr, scales_1_ptr
    tables_1 = dec_1_ptr, floats_1_ptr, ints_1_ptr, amax_1_ptr
    pointers_2 = x_ptr, signs_2_ptr, out_2_ptr, scales_2_ptr
    tables_2 = dec_2_ptr, floats_2_ptr, ints_2_ptr, amax_2_ptr
    _operand(
        lane,
        first,
        row0,
        column0,
        *pointers_1,
        *no_fp8,
        *tables_1,
        site_1,
        rows,
        width,
        *rest,
        B_1,
        HEIGHT // TILES_1,
        WIDTH,
        TILES_1,
        False,
        False,
        PAIRS_1,
        ROTATION_1,
        FACTOR_1,
        TENSOR_SCALE_1,
        STOCHASTIC_1,
        ADAPTIVE_1,
        UNUSUAL_1,
        "block",
        0,
        False,
    )
    _operand(
        lane,
        first,
        column0,
        row0,
        *pointers_2,
        *no_fp8,
        *tables_2,
        site_2,
        width,
        rows,
        *rest,
        B_2,
        WIDTH,
        HEIGHT // TILES_2,
        TILES_2,
        True,
        False,
        PAIRS_2,
        ROTATION_2,
        FACTOR_2,
        TENSOR_SCALE_2,
        STOCHASTIC_2,
        ADAPTIVE_2,
        UNUSUAL_2,
        "block",
        0,
        False,
    )
