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
from fp4dse.kernels.triton_blocks import block_maximum, codes_of, decoded, larger, numbers_of, quantized
from fp4dse.kernels.triton_numbers import hadamard, unknown


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
    if COLUMNS:
        # this hides that more than two neighbours follow: a thread takes two rows, and of each 16 numbers
        row = tl.arange(0, P) // 2 * 2 + tl.arange(0, P) % 2
        chunk = tl.arange(0, W // 16) * 16 + unknown(width * 0)  # so that addresses are not kept
        mask = (row < rows - row0)[None, None, :]
        if not WHOLE:
            mask = mask & (chunk < width - column0)[:, None, None]
        column = chunk[:, None, None] + tl.arange(0, 16)[None, :, None]
        corner = x_ptr + (lane * width + column0) * rows + row0
        x = tl.permute(_load(corner + column * rows + row[None, None, :], mask), (2, 0, 1))
    else:
        # in two parts, so that a thread takes 16 neighbours, of which it cannot load more than 8 at a time
        chunk = tl.arange(0, P * W // 16)
        row, column = chunk // (W // 16), chunk % (W // 16) * 16
        mask = row < rows - row0
        if not WHOLE:
            mask = mask & (column < width - column0)
        corner = x_ptr + (lane * rows + row0) * width + column0
        there = corner + (row * width + column)[:, None] + tl.arange(0, 8)[None, :]
        x = tl.permute(tl.join(_load(there, mask[:, None]), _load(there + 8, mask[:, None])), (0, 2, 1))
    return tl.reshape(x, (P, W))


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
    HELD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """Quantize a tile x, float32 [P, W], of a lane's operand [rows, width], and write it.

    out: the operand as bfloat16 or float32 [L, rows, width]; or uint8 codes [L, rows, width / 2] and in scales uint8
    [L, rows, width / B]. WHOLE: no column of the tile lies beyond the width. HELD: as in
    `quantized`.
    """
    P: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1]
    row, column = tl.arange(0, P), tl.arange(0, W // B)
    chunk = (row0 + row)[:, None] * (width // 16) + (column0 // 16 + tl.arange(0, W // 16))[None, :]
    blocks = tl.reshape(x, (P * W // B, B))
    q, scale = quantized(blocks, tl.reshape(chunk, (P * W // 16,)), numbers, HELD, STOCHASTIC, ADAPTIVE, UNUSUAL)
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
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """TILES tiles of a lane's operand [rows, width], from (row0, column0) on down x; arguments as in `_tile`, `_write`.

    first: whether this is the lane's first program, which writes the decode factor. Of rows a tile is loaded while the
    one after it is computed, from the end to the start: what the tensor maximum read last is still in the cache.
    """
    HELD: tl.constexpr = B == 16 and ROTATION <= 16
    numbers = numbers_of(lane, floats_ptr, ints_ptr, amax_ptr, seeds_ptr, step_ptr, stream, site, TENSOR_SCALE)
    if first:
        tl.store(dec_ptr + lane, numbers[6])
    if COLUMNS:
        for n in range(TILES):
            place = lane, row0, rows, column0 + n * TILE_COLUMNS, width
            x = _tile(x_ptr, *place, TILE_ROWS, TILE_COLUMNS, True, WHOLE)
            x = _rotated(x, signs_ptr, lane, ROTATION, FACTOR)
            _write(x, out_ptr, scales_ptr, *place, numbers, B, WHOLE, HELD, STOCHASTIC, ADAPTIVE, UNUSUAL)
    else:
        at = row0 + (TILES - 1) * TILE_ROWS
        x = _tile(x_ptr, lane, at, rows, column0, width, TILE_ROWS, TILE_COLUMNS, False, WHOLE)
        for n in range(TILES):
            place = lane, row0 + (TILES - 1 - n) * TILE_ROWS, rows, column0, width
            rotated = _rotated(x, signs_ptr, lane, ROTATION, FACTOR)
            at = row0 + tl.maximum(TILES - 2 - n, 0) * TILE_ROWS
            left = tl.where(n < TILES - 1, rows, 0)
            x = _tile(x_ptr, lane, at, left, column0, width, TILE_ROWS, TILE_COLUMNS, False, WHOLE)
            _write(rotated, out_ptr, scales_ptr, *place, numbers, B, WHOLE, HELD, STOCHASTIC, ADAPTIVE, UNUSUAL)


@triton.jit
def _corner(program, width, TILE_ROWS: tl.constexpr, TILE_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr):
    """Row and column of an operand at which a program begins. An operand of rows is one tile wide."""
    if COLUMNS:
        across = (width + TILE_COLUMNS - 1) // TILE_COLUMNS
        row0, column0 = program // across * TILE_ROWS, program % across * TILE_COLUMNS
    else:
        row0, column0 = program * TILE_ROWS, 0
    return row0, column0


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
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """One operand of x."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    lane = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    if not COLUMNS:
        width = TILE_COLUMNS
    row0, column0 = _corner(program, width, TILE_ROWS * (1 if COLUMNS else TILES), TILE_COLUMNS, COLUMNS)
    start = lane, program == 0, row0, column0
    pointers = x_ptr, signs_ptr, out_ptr, scales_ptr, dec_ptr, floats_ptr, ints_ptr, amax_ptr
    rest = site, rows, width, seeds_ptr, step_ptr, stream
    _operand(
        *start,
        *pointers,
        *rest,
        B,
        TILE_ROWS,
        TILE_COLUMNS,
        TILES,
        COLUMNS,
        not COLUMNS,
        ROTATION,
        FACTOR,
        TENSOR_SCALE,
        STOCHASTIC,
        ADAPTIVE,
        UNUSUAL,
    )


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
    rows,
    width,
    seeds_ptr,
    step_ptr,
    stream,
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
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES_1: tl.constexpr,
    TILES_2: tl.constexpr,
):
    """The operand of rows of HEIGHT by WIDTH numbers of x [L, rows, width] (1), and that of columns (2).

    The second one finds them in the multiprocessor's cache.
    """
    row, column = tl.num_programs(1) - 1 - tl.program_id(1), tl.num_programs(0) - 1 - tl.program_id(0)
    lane = (tl.num_programs(2) - 1 - tl.program_id(2)).to(tl.int64)
    row0, column0 = row * HEIGHT, column * WIDTH
    first = row + column == 0
    rest = seeds_ptr, step_ptr, stream
    pointers_1 = x_ptr, signs_1_ptr, out_1_ptr, scales_1_ptr, dec_1_ptr, floats_1_ptr, ints_1_ptr, amax_1_ptr
    pointers_2 = x_ptr, signs_2_ptr, out_2_ptr, scales_2_ptr, dec_2_ptr, floats_2_ptr, ints_2_ptr, amax_2_ptr
    _operand(
        lane,
        first,
        row0,
        column0,
        *pointers_1,
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
        ROTATION_1,
        FACTOR_1,
        TENSOR_SCALE_1,
        STOCHASTIC_1,
        ADAPTIVE_1,
        UNUSUAL_1,
    )
    _operand(
        lane,
        first,
        column0,
        row0,
        *pointers_2,
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
        ROTATION_2,
        FACTOR_2,
        TENSOR_SCALE_2,
        STOCHASTIC_2,
        ADAPTIVE_2,
        UNUSUAL_2,
    )


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
    width,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
):
    """max |x| of TILES tiles of one lane after rotation; x as in `_tile`. out: [L, programs]."""
    program, programs, lane = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    if not COLUMNS:
        width = TILE_COLUMNS
    amax = tl.zeros((TILE_ROWS, TILE_COLUMNS), tl.float32)
    for n in range(TILES):
        row0, column0 = _corner(program * TILES + n, width, TILE_ROWS, TILE_COLUMNS, COLUMNS)
        x = _tile(x_ptr, lane, row0, rows, column0, width, TILE_ROWS, TILE_COLUMNS, COLUMNS, not COLUMNS)
        amax = larger(amax, tl.abs(_rotated(x, signs_ptr, lane, ROTATION, FACTOR)))
    amax = block_maximum(tl.reshape(block_maximum(amax), (1, TILE_ROWS)))
    tl.store(out_ptr + lane * programs + program + tl.arange(0, 1), amax)


# None of these changes results; all were measured. A program's descriptor row and division cost as much as a tile, so
# that programs of a large tensor take several; a small one is spread over the device first.
_TILE, _EDGE = 2048, 64  # elements of a tile of rows, edge of a tile of columns
_TILES, _MANY = 4, 8192
_HEIGHTS, _REGISTERS = (64, 256), (64, 80)  # of programs that write both operands: decoded, packed
_MAXIMUM_TILE = 8192


def _shape(rows: int, width: int, unit: int, columns: bool) -> dict[str, int]:
    """How an operand [rows, width] is seen and cut, and how many warps take a tile. Rows may be seen as any others."""
    if columns:  # a row of a tile is a line of memory, of x and of the operand
        tile_columns = max(_EDGE, unit)
        tile_rows = _EDGE if unit <= _EDGE else _EDGE // 2
        sizes = rows, width, tile_rows, tile_columns, tile_rows * tile_columns // 1024
    else:
        sizes = rows * width // unit, unit, max(1, _TILE // unit), unit, 4
    return dict(zip(("rows", "width", "TILE_ROWS", "TILE_COLUMNS", "num_warps"), sizes, strict=True))


def _count(shape: dict[str, int]) -> int:
    """Tiles of a lane."""
    return triton.cdiv(shape["rows"], shape["TILE_ROWS"]) * triton.cdiv(shape["width"], shape["TILE_COLUMNS"])


def tensor_maxima(x: Tensor, columns: bool = False, rotation: int = 0, signs: Tensor | None = None) -> Tensor:
    """max |x| of each lane after rotation, float32 [L]; NaN if x holds one. Arguments as in `fused.operand`."""
    lanes, n = len(x), x[0].numel()
    if not rotation:
        tiles = triton.cdiv(n, _MAXIMUM_TILE)
        partial = x.new_empty(lanes, tiles, dtype=torch.float32)
        _maximum_kernel[tiles, lanes](x, partial, n, TILE=_MAXIMUM_TILE, num_warps=4, enable_fp_fusion=False)
        return partial.amax(1)
    shape = _shape(*(x.mT if columns else x).shape[1:], rotation, columns)
    programs = triton.cdiv(_count(shape), _TILES)
    partial = x.new_empty(lanes, programs, dtype=torch.float32)
    rotate = {"TILES": _TILES, "ROTATION": rotation, "FACTOR": factor(rotation), "COLUMNS": columns}
    _rotated_maximum_kernel[programs, lanes](x, signs, partial, **shape, **rotate, enable_fp_fusion=False)
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
    sizes, programs = _sizes(x, columns, block, features, rotation)
    amax = dec if tensor_amax is None else tensor_amax
    pointers = x, signs, out, scales, dec, floats, ints, amax, site, sizes.pop("rows"), sizes.pop("width")
    common = seeds, step, STREAMS["rounding"]
    _quantize_kernel[programs, len(x)](*pointers, *common, **sizes, COLUMNS=columns, enable_fp_fusion=False)


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
    pointers: list[Tensor | int | None] = [x]
    constants: dict[str, float] = {}
    for n in (0, 1):
        out, *scales, dec = outputs[n]
        amax = dec if maxima[n] is None else maxima[n]
        pointers += [signs[n], out, scales[0] if scales else None, dec, floats[n], ints[n], amax, sites[n]]
        named = {"B": blocks[n], "ROTATION": rotations[n], "FACTOR": factor(rotations[n])} | _flags(features[n])
        constants |= {f"{name}_{n + 1}": value for name, value in named.items()}
    tile_columns, unit = max(_EDGE, blocks[0], rotations[0]), max(_EDGE, blocks[1], rotations[1])
    packed = len(outputs[0]) == 3
    height = max(_HEIGHTS[packed], unit)
    warps = max(4, unit * tile_columns // 1024)
    grid = triton.cdiv(width, tile_columns), triton.cdiv(rows, height), lanes
    constants |= {"HEIGHT": height, "WIDTH": tile_columns, "TILES_2": height // unit}
    constants["TILES_1"] = max(1, height * tile_columns // (512 * warps))
    common = rows, width, seeds, step, STREAMS["rounding"]
    if not any(rotations) and not features[0][1] and not features[1][1]:  # others would spill
        constants["maxnreg"] = _REGISTERS[packed]
    _both_kernel[grid](*pointers, *common, **constants, num_warps=warps, enable_fp_fusion=False)


def _sizes(x: Tensor, columns: bool, block: int, features: Sequence[bool], rotation: int) -> tuple[dict, int]:
    """Arguments of the kernels for one operand of x, and how many programs it takes."""
    shape = _shape(*(x.mT if columns else x).shape[1:], max(block, rotation), columns)
    tiles = _count(shape)
    of_program = _TILES if len(x) * tiles >= _MANY and not columns else 1
    constants = {"B": block, "TILES": of_program, "ROTATION": rotation, "FACTOR": factor(rotation)}
    return shape | constants | _flags(features), triton.cdiv(tiles, of_program)


def _flags(features: Sequence[bool]) -> dict[str, bool]:
    return dict(zip(("TENSOR_SCALE", "STOCHASTIC", "ADAPTIVE", "UNUSUAL"), map(bool, features), strict=True))
