"""The quantizer fused into Triton kernels: any mix of recipes in one launch, an operand read once and written once.

A program takes tiles of whole blocks of one lane, rotates and quantizes them by that lane's row of the descriptor
tables, and writes what the GEMM consumes, or codes. Only sizes and what no lane needs are compile-time constants. Bits
equal those of `rotation.rotate` and `reference.decode_operand` with `philox.random16`, whatever the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.philox import STREAMS
from fp4dse.kernels.rotation import factor
from fp4dse.kernels.triton_blocks import block_maximum, codes_of, decoded, numbers_of, quantized
from fp4dse.kernels.triton_numbers import hadamard


@triton.jit
def _load(ptr, mask):
    """Zero where masked."""
    return tl.load(ptr, mask=mask, other=0.0)


@triton.jit
def _rotated(x, signs_ptr, lane, SIZE: tl.constexpr, FACTOR: tl.constexpr):
    """x [n, W] as float32, consecutive groups of SIZE of each row rotated with the lane's signs, if any."""
    x = x.to(tl.float32)
    if SIZE > 0:
        groups = tl.reshape(x, (x.shape[0] * x.shape[1] // SIZE, SIZE))
        if signs_ptr is not None:
            groups = groups * tl.load(signs_ptr + lane * SIZE + tl.arange(0, SIZE))[None, :]
        x = tl.reshape(hadamard(groups, SIZE) * FACTOR, x.shape)
    return x


@triton.jit
def _tile(
    x_ptr,
    lane,
    row0,
    rows,
    column0,
    width,
    P: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """The tile [P, W] at (row0, column0) of a lane's operand [rows, width], zero beyond its end.

    x: [L, rows, width], or [L, width, rows] where COLUMNS. WHOLE: no column of the tile lies beyond the width.
    """
    row, column = tl.arange(0, P), tl.arange(0, W)
    inside = row < rows - row0
    if COLUMNS:
        # this hides that more than two neighbours follow: a thread takes two rows, and of each a whole block
        pairs = row // 2 * 2 + row % 2
        corner = (lane * width + column0) * rows + row0
        mask = inside[None, :] if WHOLE else inside[None, :] & (column < width - column0)[:, None]
        x = tl.trans(_load(x_ptr + corner + column[:, None] * rows + pairs[None, :], mask))
    else:
        corner = (lane * rows + row0) * width + column0
        mask = inside[:, None] if WHOLE else inside[:, None] & (column < width - column0)[None, :]
        x = _load(x_ptr + corner + row[:, None] * width + column[None, :], mask)
    return x


@triton.jit
def _write(
    x,
    out_ptr,
    scales_ptr,
    lane,
    row0,
    rows,
    column0,
    width,
    numbers,
    B: tl.constexpr,
    WHOLE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """Quantize a tile x, float32 [P, W], of a lane's operand [rows, width], and write it.

    out: the operand as bfloat16 or float32 [L, rows, width]; or uint8 codes [L, rows, width / 2] and in scales uint8
    [L, rows, width / B]. WHOLE: no column of the tile lies beyond the width.
    """
    P: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    row, column = tl.arange(0, P), tl.arange(0, W // B)
    at = (row0 + row)[:, None] * (width // B) + (column0 // B + column)[None, :]
    blocks = tl.reshape(x, (P * W // B, B))
    q, scale = quantized(blocks, tl.reshape(at, (P * W // B,)), numbers, STOCHASTIC, ADAPTIVE, UNUSUAL)
    inside = row < rows - row0
    if scales_ptr is None:
        out = tl.reshape(decoded(blocks, q, scale), (P, W))
        column = tl.arange(0, W)
        there = out_ptr + ((lane * rows + row0) * width + column0) + row[:, None] * width + column[None, :]
        mask = inside[:, None] if WHOLE else inside[:, None] & (column < width - column0)[None, :]
        tl.store(there, out.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        codes, stored = codes_of(blocks, q, scale, numbers)
        mask = inside[:, None] if WHOLE else inside[:, None] & (column < width // B - column0 // B)[None, :]
        there = scales_ptr + ((lane * rows + row0) * (width // B) + column0 // B)
        there += row[:, None] * (width // B) + column[None, :]
        tl.store(there, tl.reshape(stored, (P, W // B)).to(tl.uint8), mask=mask)
        column = tl.arange(0, W // 2)
        mask = inside[:, None] if WHOLE else inside[:, None] & (column < width // 2 - column0 // 2)[None, :]
        there = out_ptr + ((lane * rows + row0) * (width // 2) + column0 // 2)
        there += row[:, None] * (width // 2) + column[None, :]
        tl.store(there, tl.reshape(codes, (P, W // 2)).to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["site", "stream"])
def _quantize_kernel(
    x_ptr,
    signs_ptr,
    out_ptr,
    scales_ptr,
    dec_ptr,
    floats_ptr,
    ints_ptr,
    amax_ptr,
    seeds_ptr,
    step_ptr,
    site,
    stream,
    rows,
    units,
    B: tl.constexpr,
    UNIT: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
    PIPELINE: tl.constexpr,
):
    """TILES tiles of one lane, UNIT = max(B, ROTATION) wide and TILE_ROWS high; pointers as in `_tile` and `_write`.

    Tiles go from the end to the start: what the tensor maximum read last is still in the cache.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    lane = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    numbers = numbers_of(lane, floats_ptr, ints_ptr, amax_ptr, seeds_ptr, step_ptr, stream, site, TENSOR_SCALE)
    if program == 0:
        tl.store(dec_ptr + lane, numbers[6])
    if PIPELINE == 1:
        tile = program * TILES + TILES - 1
        ahead = _tile(x_ptr, lane, tile // units * TILE_ROWS, rows, tile % units * UNIT, units * UNIT, TILE_ROWS, UNIT, COLUMNS, True)
        for n in range(TILES):
            tile = program * TILES + (TILES - 1 - n)
            place = lane, tile // units * TILE_ROWS, rows, tile % units * UNIT, units * UNIT
            x = ahead
            tile -= 1
            ahead = _tile(x_ptr, lane, tile // units * TILE_ROWS, tl.where(n + 1 < TILES, rows, -1073741824), tile % units * UNIT, units * UNIT, TILE_ROWS, UNIT, COLUMNS, True)
            x = _rotated(x, signs_ptr, lane, ROTATION, FACTOR)
            _write(x, out_ptr, scales_ptr, *place, numbers, B, True, STOCHASTIC, ADAPTIVE, UNUSUAL)
    else:
        for n in tl.range(TILES, num_stages=PIPELINE):
            tile = program * TILES + (TILES - 1 - n)
            place = lane, tile // units * TILE_ROWS, rows, tile % units * UNIT, units * UNIT
            x = _tile(x_ptr, *place, TILE_ROWS, UNIT, COLUMNS, True)
            x = _rotated(x, signs_ptr, lane, ROTATION, FACTOR)
            _write(x, out_ptr, scales_ptr, *place, numbers, B, True, STOCHASTIC, ADAPTIVE, UNUSUAL)


@triton.jit(do_not_specialize=["site_1", "site_2", "stream"])
def _both_kernel(
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
    seeds_ptr,
    step_ptr,
    stream,
    rows,
    width,
    B_1: tl.constexpr,
    ROTATION_1: tl.constexpr,
    FACTOR_1: tl.constexpr,
    TENSOR_SCALE_1: tl.constexpr,
    STOCHASTIC_1: tl.constexpr,
    ADAPTIVE_1: tl.constexpr,
    UNUSUAL_1: tl.constexpr,
    B_2: tl.constexpr,
    ROTATION_2: tl.constexpr,
    FACTOR_2: tl.constexpr,
    TENSOR_SCALE_2: tl.constexpr,
    STOCHASTIC_2: tl.constexpr,
    ADAPTIVE_2: tl.constexpr,
    UNUSUAL_2: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """ROWS by TILE_COLUMNS numbers of x [L, rows, width], quantized in blocks along rows (1) and along columns (2).

    They are taken twice, TILE_ROWS rows and then UNIT rows at a time; the second time they come from the cache.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    lane = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    across = tl.cdiv(width, TILE_COLUMNS)
    row0, column0 = program // across * ROWS, program % across * TILE_COLUMNS
    common = seeds_ptr, step_ptr, stream
    numbers_1 = numbers_of(lane, floats_1_ptr, ints_1_ptr, amax_1_ptr, *common, site_1, TENSOR_SCALE_1)
    if program == 0:
        tl.store(dec_1_ptr + lane, numbers_1[6])
    for n in range(ROWS // TILE_ROWS):
        place_1 = lane, row0 + n * TILE_ROWS, rows, column0, width
        x_1 = _tile(x_ptr, *place_1, TILE_ROWS, TILE_COLUMNS, False, False)
        x_1 = _rotated(x_1, signs_1_ptr, lane, ROTATION_1, FACTOR_1)
        _write(x_1, out_1_ptr, scales_1_ptr, *place_1, numbers_1, B_1, False, STOCHASTIC_1, ADAPTIVE_1, UNUSUAL_1)
    numbers_2 = numbers_of(lane, floats_2_ptr, ints_2_ptr, amax_2_ptr, *common, site_2, TENSOR_SCALE_2)
    if program == 0:
        tl.store(dec_2_ptr + lane, numbers_2[6])
    for n in range(ROWS // UNIT):
        place_2 = lane, column0, width, row0 + n * UNIT, rows
        x_2 = _tile(x_ptr, *place_2, TILE_COLUMNS, UNIT, True, False)
        x_2 = _rotated(x_2, signs_2_ptr, lane, ROTATION_2, FACTOR_2)
        _write(x_2, out_2_ptr, scales_2_ptr, *place_2, numbers_2, B_2, False, STOCHASTIC_2, ADAPTIVE_2, UNUSUAL_2)


@triton.jit
def _maximum_kernel(x_ptr, out_ptr, n, TILE: tl.constexpr):
    """max |x| of one tile of one lane. x: bfloat16 or float32 [L, n]; out: [L, tiles]."""
    programs, lane = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    offsets = tl.program_id(0) * TILE + tl.arange(0, TILE)
    magnitude = tl.abs(_load(x_ptr + lane * n + offsets, offsets < n).to(tl.float32))
    amax = block_maximum(tl.reshape(magnitude, (1, TILE)))
    tl.store(out_ptr + lane * programs + tl.program_id(0) + tl.arange(0, 1), amax)


@triton.jit
def _rotated_maximum_kernel(
    x_ptr,
    signs_ptr,
    out_ptr,
    rows,
    units,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """max |x| of one tile of one lane after rotation; x as in `_tile`, cut into units of ROTATION. out: [L, tiles]."""
    programs, lane = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    place = lane, tile // units * TILE_ROWS, rows, tile % units * ROTATION, units * ROTATION
    x = _tile(x_ptr, *place, TILE_ROWS, ROTATION, COLUMNS, True)
    x = _rotated(x, signs_ptr, lane, ROTATION, FACTOR)
    amax = block_maximum(tl.reshape(block_maximum(tl.abs(x)), (1, TILE_ROWS)))
    tl.store(out_ptr + lane * programs + tl.program_id(0) + tl.arange(0, 1), amax)


# None of these changes results. A program's descriptor row and division cost as much as a tile, so that programs of a
# large tensor take several; a small one is spread over the device first.
_TILE, _COLUMN_TILE = 2048, 1024  # elements
_TILES, _MANY = 4, 8192
_MAXIMUM_TILE = 8192
_PIPELINE = 0
_BOTH_ROWS, _BOTH_COLUMNS = 64, 64


def _tiles(rows: int, width: int, unit: int, columns: bool) -> tuple[int, int, int, int]:
    """How an operand [rows, width] is cut: rows and units to work with, rows of a tile, warps."""
    if columns:  # a block stays within a thread, a row of a warp's tile within a line of memory
        tile_rows = max(32, _COLUMN_TILE // unit)
        return rows, width // unit, tile_rows, tile_rows * unit // _COLUMN_TILE
    return rows * width // unit, 1, max(1, _TILE // unit), 4


def tensor_maxima(x: Tensor, columns: bool = False, rotation: int = 0, signs: Tensor | None = None) -> Tensor:
    """max |x| of each lane after rotation, float32 [L]; NaN if x holds one. Arguments as in `fused.operand`."""
    lanes, n = len(x), x[0].numel()
    if not rotation:
        tiles = triton.cdiv(n, _MAXIMUM_TILE)
        partial = x.new_empty(lanes, tiles, dtype=torch.float32)
        _maximum_kernel[tiles, lanes](x, partial, n, TILE=_MAXIMUM_TILE, num_warps=4, enable_fp_fusion=False)
        return partial.amax(1)
    rows, width = (x.shape[2], x.shape[1]) if columns else (x.shape[1], x.shape[2])
    rows, units, tile_rows, warps = _tiles(rows, width, rotation, columns)
    tiles = triton.cdiv(rows, tile_rows) * units
    partial = x.new_empty(lanes, tiles, dtype=torch.float32)
    sizes = {"ROTATION": rotation, "FACTOR": factor(rotation), "TILE_ROWS": tile_rows, "COLUMNS": columns}
    _rotated_maximum_kernel[tiles, lanes](
        x, signs, partial, rows, units, **sizes, num_warps=warps, enable_fp_fusion=False
    )
    return partial.amax(1)


def launch(
    x: Tensor,
    columns: bool,
    block: int,
    floats: Tensor,
    ints: Tensor,
    features: Sequence[bool],
    seeds: Tensor,
    step: Tensor,
    site: int,
    tensor_amax: Tensor | None,
    rotation: int,
    signs: Tensor | None,
    out: Tensor,
    scales: Tensor | None,
    dec: Tensor,
) -> None:
    """Write the operand x [L, R, C] into out, scales (of codes, else None) and dec; arguments as in `fused.operand`."""
    lanes, rows, width = len(x), *(x.mT if columns else x).shape[1:]
    unit = max(block, rotation)
    rows, units, tile_rows, warps = _tiles(rows, width, unit, columns)
    tiles = triton.cdiv(rows, tile_rows) * units
    of_program = _TILES if lanes * tiles >= _MANY else 1
    _quantize_kernel[triton.cdiv(tiles, of_program), lanes](
        x,
        signs,
        out,
        scales,
        dec,
        floats,
        ints,
        dec if tensor_amax is None else tensor_amax,
        seeds,
        step,
        site,
        STREAMS["rounding"],
        rows,
        units,
        B=block,
        UNIT=unit,
        TILE_ROWS=tile_rows,
        TILES=of_program,
        COLUMNS=columns,
        ROTATION=rotation,
        FACTOR=factor(rotation),
        **_flags(features),
        PIPELINE=_PIPELINE,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def launch_both(
    x: Tensor,
    blocks: Sequence[int],
    floats: Sequence[Tensor],
    ints: Sequence[Tensor],
    features: Sequence[Sequence[bool]],
    seeds: Tensor,
    step: Tensor,
    sites: Sequence[int],
    maxima: Sequence[Tensor | None],
    rotations: Sequence[int],
    signs: Sequence[Tensor | None],
    outputs: Sequence[Sequence[Tensor]],
) -> None:
    """Write both operands of x into outputs, (out, dec) or (codes, scales, dec); arguments as in `fused.both`."""
    lanes, rows, width = x.shape
    sizes: dict[str, float] = {}
    pointers: list[Tensor | int | None] = []
    for n in (0, 1):
        out, *scales, dec = outputs[n]
        amax = dec if maxima[n] is None else maxima[n]
        pointers += [signs[n], out, scales[0] if scales else None, dec, floats[n], ints[n], amax, sites[n]]
        named = {"B": blocks[n], "ROTATION": rotations[n], "FACTOR": factor(rotations[n])} | _flags(features[n])
        sizes |= {f"{name}_{n + 1}": value for name, value in named.items()}
    tile_columns, unit = max(_BOTH_COLUMNS, blocks[0], rotations[0]), max(blocks[1], rotations[1])
    warps = max(1, unit * tile_columns // _COLUMN_TILE)
    tile_rows = max(1, warps * _COLUMN_TILE // tile_columns)
    of_program = max(_BOTH_ROWS, unit, tile_rows)
    tiles = triton.cdiv(rows, of_program) * triton.cdiv(width, tile_columns)
    _both_kernel[tiles, lanes](
        x,
        *pointers,
        seeds,
        step,
        STREAMS["rounding"],
        rows,
        width,
        **sizes,
        ROWS=of_program,
        TILE_ROWS=tile_rows,
        UNIT=unit,
        TILE_COLUMNS=tile_columns,
        num_warps=warps,
        enable_fp_fusion=False,
    )


def _flags(features: Sequence[bool]) -> dict[str, bool]:
    return dict(zip(("TENSOR_SCALE", "STOCHASTIC", "ADAPTIVE", "UNUSUAL"), map(bool, features), strict=True))
