"""The quantizer fused into Triton kernels: any mix of recipes in one launch, an operand read once and written once.

A program takes tiles of whole blocks of one lane, rotates and quantizes them by that lane's row of the descriptor
tables, and writes what the GEMM consumes, or codes. How large tiles are and how many a program takes is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import History, Shift, empty
from fp4dse.kernels.ops.fp8.shifting import MANTISSA
from fp4dse.kernels.ops.launching import OTHERS, is_large, launch_grid
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.ops.products import SEGMENT
from fp4dse.kernels.ops.rotation import hadamard
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.triton.blocks import block_maximum, larger
from fp4dse.kernels.quant.triton.limits import span
from fp4dse.kernels.quant.triton.pair_both import BOTH, are_paired, both_in_fp8
from fp4dse.kernels.quant.triton.pair_columns import COLUMNS, columns_in_fp8
from fp4dse.kernels.quant.triton.pair_rows import ROWS, rows_in_fp8
from fp4dse.kernels.quant.triton.pair_tiles import is_paired, programs_of_pairs
from fp4dse.kernels.quant.triton.programs import both_kernel, corner, quantize_kernel
from fp4dse.kernels.quant.triton.tiles import load, rotated, tile


@triton.jit
def _maximum_kernel(x_ptr, out_ptr, n, stride, TILE: tl.constexpr, LARGE: tl.constexpr):
    """max |x| of one tile of one lane. x: bfloat16 or float32 [L, n], lanes `stride` apart; out: [L, tiles]."""
    programs, lane = tl.num_programs(0), tl.program_id(1).to(tl.int64)
    offsets = (tl.program_id(0).to(tl.int64) if LARGE else tl.program_id(0)) * TILE + tl.arange(0, TILE)
    magnitude = tl.abs(load(x_ptr + lane * stride + offsets, offsets < n).to(tl.float32))
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
    LARGE: tl.constexpr,
):
    """max |x| of TILES tiles of one lane after rotation; x as in `tile`. out: [L, programs]."""
    program, programs, lane = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    if LARGE:
        program, rows, width = program.to(tl.int64), tl.cast(rows, tl.int64), tl.cast(width, tl.int64)
    if not COLUMNS:
        width = TILE_COLUMNS
    x_ptr += lane * rows * width
    amax = tl.full((TILE_ROWS, TILE_COLUMNS), 0.0, tl.float32)
    for n in range(TILES):
        row0, column0 = corner(program * TILES + n, width, TILE_ROWS, TILE_COLUMNS, COLUMNS)
        x = tile(x_ptr, row0, rows, column0, width, TILE_ROWS, TILE_COLUMNS, COLUMNS, not COLUMNS, False)
        amax = larger(amax, tl.abs(rotated(x, signs_ptr, lane, ROTATION, FACTOR)))
    amax = block_maximum(tl.reshape(block_maximum(amax), (1, TILE_ROWS)))
    tl.store(out_ptr + lane * programs + program + tl.arange(0, 1), amax)


# None of these changes results; all were measured. A program's descriptor row and division cost as much as a tile, so
# that programs of a large tensor take several; a small one is spread over the device first.
_TILE, _EDGE = 2048, 64  # elements of a tile of rows, edge of a tile of columns
_TILES, _MANY = 4, 8192
_TILES_OF = (4, 1)  # of rows, of columns
_HEIGHTS, _REGISTERS = (64, 128), (72, 80)  # of programs that write both operands: decoded, packed
_REGISTERS_OF_FP8 = (96, 80)  # of rows, of columns: what is not held needs more, and may spill
_PARTS = (1024, 512)  # elements of a tile of rows for each warp, of such programs
_MAXIMUM_TILE = 8192


def _shape(rows: int, width: int, unit: int, columns: bool) -> dict[str, int]:
    """The shape in which an operand [rows, width] is seen and cut, and the warps that take a tile. Rows may be seen as
    any others."""
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


def together(x: Tensor) -> Tensor:
    """x with what belongs to a lane in one piece; the lanes may lie apart."""
    return x if x[0].is_contiguous() else x.contiguous()


def pairs(x: Tensor, columns: bool, rotation: int) -> bool:
    """True if x is read as words of two bfloat16 numbers, which then must begin with a word and not be rotated."""
    apart = x.stride(0) if len(x) > 1 else 0
    whole = not (apart % 2 or x.data_ptr() % 4 or (columns and x.shape[2] % 2))
    return x.dtype == torch.bfloat16 and not rotation and whole and _compares_pairs(x.device)


@cache
def _compares_pairs(device: torch.device) -> bool:
    """True if the device has the maximum of two pairs of magnitudes."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 6)


def tensor_maxima(x: Tensor, columns: bool = False, rotation: int = 0, signs: Tensor | None = None) -> Tensor:
    """max |x| of each lane after rotation, float32 [L]; NaN if x holds one. Arguments as in `operators.operand`."""
    lanes, n = len(x), x[0].numel()
    if not rotation:
        tiles = triton.cdiv(n, _MAXIMUM_TILE)
        partial = x.new_empty(lanes, tiles, dtype=torch.float32)
        x = together(x)
        constants = {"TILE": _MAXIMUM_TILE, "LARGE": is_large(n), "num_warps": 4, "enable_fp_fusion": False}
        _maximum_kernel[launch_grid(tiles, lanes)](x, partial, n, x.stride(0), **constants)
        return partial.amax(1)
    x = x.contiguous()
    _, rows, width = (x.mT if columns else x).shape
    shape = _shape(rows, width, rotation, columns)
    programs = triton.cdiv(_count(shape), _TILES)
    partial = x.new_empty(lanes, programs, dtype=torch.float32)
    rotate = {
        "TILES": _TILES,
        "ROTATION": rotation,
        "FACTOR": factor(rotation),
        "COLUMNS": columns,
        "LARGE": is_large(n),
    }
    _rotated_maximum_kernel[launch_grid(programs, lanes)](x, signs, partial, **shape, **rotate, enable_fp_fusion=False)
    return partial.amax(1)


def launch(x: Tensor, columns: bool, call: Call, outputs: tuple[Tensor, Tensor | None, Tensor]) -> None:
    """Write the operand x [L, R, C] into outputs, (out, None, dec) or (codes, scales, dec); see `operators.operand`.

    call: with the maxima where some lane has a tensor scale, and signs for each lane.
    """
    out, scales, dec = outputs
    sizes, programs = _sizes(x, columns, call)
    _launch(
        x, columns, call, (out, scales, None, None, None, None, dec), sizes, programs, {"FP8": 0, "TRAINING": False}
    )


def launch_fp8(
    x: Tensor, columns: bool, call: Call, dtype: torch.dtype, history: History
) -> tuple[Tensor, Shift, Tensor]:
    """Values, shift and decode factors of the operand x [L, R, C]; see `operators.fp8`. call: as in `launch`."""
    if is_paired(x, call):
        return (columns_in_fp8 if columns else rows_in_fp8)(x, call, dtype, history)
    shape = x.mT.shape if columns else x.shape
    sizes, programs = _sizes_of_fp8(x, columns, call)
    values, shift = empty(x, shape, dtype, programs)
    dec = x.new_empty(len(x), dtype=torch.float32)
    outputs = values.view(torch.uint8), shift.flags, shift.wide, shift.power, history.tops, shift.notes, dec
    constants = {"FP8": MANTISSA[dtype], "TRAINING": history.training}
    _launch(x, columns, call, outputs, sizes, programs, constants)
    return values, shift, dec


def programs_of_fp8(x: Tensor, columns: bool, call: Call) -> int:
    """The number of programs that write the operand in FP8, and so of their notes a lane."""
    if is_paired(x, call):
        return programs_of_pairs(x, columns, COLUMNS if columns else ROWS)
    return _sizes_of_fp8(x, columns, call)[1]


def launch_both_fp8(
    x: Tensor, calls: Sequence[Call], dtypes: Sequence[torch.dtype], histories: Sequence[History]
) -> list[tuple[Tensor, Shift, Tensor]]:
    """`launch_fp8` of the rows and of the columns of x [L, R, C], from one read where that is possible."""
    if are_paired(x, calls):
        return both_in_fp8(x, calls, dtypes, histories)
    each = zip((False, True), calls, dtypes, histories, strict=True)
    return [launch_fp8(x, *of) for of in each]


def programs_of_both_fp8(x: Tensor, calls: Sequence[Call]) -> list[int]:
    """`programs_of_fp8` of both."""
    if are_paired(x, calls):
        return [programs_of_pairs(x, columns, BOTH) for columns in (False, True)]
    return [programs_of_fp8(x, columns, call) for columns, call in zip((False, True), calls, strict=True)]


def _sizes_of_fp8(x: Tensor, columns: bool, call: Call) -> tuple[dict[str, Any], int]:
    """`_sizes`, where tiles are of whole segments, and whether rows end with a part of one."""
    is_ragged = not columns and x.shape[2] % SEGMENT > 0
    sizes, programs = _sizes(x, columns, call, SEGMENT, is_ragged)
    if call.codec == "block" and not call.rotation and not any(call.features):  # others would spill
        sizes["maxnreg"] = _REGISTERS_OF_FP8[columns]
    return sizes | {"RAGGED": is_ragged}, programs


def _launch(
    x: Tensor,
    columns: bool,
    call: Call,
    outputs: tuple[Tensor | None, ...],
    sizes: dict[str, Any],
    programs: int,
    constants: dict[str, Any],
) -> None:
    """Run the kernel of one operand. outputs: its pointers, in its order."""
    dec = outputs[-1]
    amax = dec if call.tensor_amax is None else call.tensor_amax
    x = together(x)
    apart = x.stride(0) - x[0].numel()
    rows, width = sizes.pop("rows"), sizes.pop("width")
    tables = call.floats, call.ints, amax, call.site
    stream = STREAMS["scales" if call.codec == "eden" else "rounding"]  # its elements are never random
    arguments = x, call.signs, *outputs, *tables, rows, width, apart, call.seeds, call.step, stream
    constants = {"RAGGED": False, "COLUMNS": columns, "CODEC": call.codec} | constants | sizes
    constants |= {"PAIRS": pairs(x, columns, call.rotation), "LARGE": is_large(x[0].numel())}
    quantize_kernel[launch_grid(programs, len(x))](*arguments, **constants, enable_fp_fusion=False)


def launch_both(x: Tensor, calls: Sequence[Call], outputs: Sequence[Sequence[Tensor]]) -> None:
    """Write both operands of x into outputs, (out, dec) or (codes, scales, dec); calls as in `operators.both`, each as
    in `launch`."""
    lanes, rows, width = x.shape
    pointers: list[Tensor | int | None] = [x]
    constants: dict[str, float] = {}
    for n, call in enumerate(calls):
        out, *scales, dec = outputs[n]
        amax = dec if call.tensor_amax is None else call.tensor_amax
        pointers += [call.signs, out, scales[0] if scales else None, dec, call.floats, call.ints, amax, call.site]
        named = {
            "B": call.block,
            "PAIRS": pairs(x, n == 1, call.rotation),
            "ROTATION": call.rotation,
            "FACTOR": factor(call.rotation),
        } | flags(call.features)
        constants |= {f"{name}_{n + 1}": value for name, value in named.items()}
    tile_columns, unit = (max(_EDGE, call.block, call.rotation) for call in calls)
    packed = len(outputs[0]) == 3
    height = max(_HEIGHTS[packed], unit)
    warps = max(4, unit * tile_columns // 1024)
    across, down = triton.cdiv(width, tile_columns), triton.cdiv(rows, height)
    large = is_large(x[0].numel()) or down > OTHERS
    constants |= {"HEIGHT": height, "WIDTH": tile_columns, "TILES_2": height // unit, "LARGE": large}
    constants["TILES_1"] = max(1, height * tile_columns // (_PARTS[packed] * warps))
    common = rows, width, calls[0].seeds, calls[0].step, STREAMS["rounding"]
    if not any(call.rotation or call.features.stochastic for call in calls):  # others would spill
        constants["maxnreg"] = _REGISTERS[packed]
    programs = launch_grid(down, across, lanes) if large else launch_grid(across, down, lanes)
    both_kernel[programs](*pointers, *common, **constants, num_warps=warps, enable_fp_fusion=False)


def _sizes(x: Tensor, columns: bool, call: Call, least: int = 0, ragged: bool = False) -> tuple[dict[str, Any], int]:
    """Arguments of the kernels for one operand of x, and how many programs it takes. least: neighbours along the
    contraction that belong together, at least. ragged: a row ends with fewer of them."""
    _, rows, width = (x.mT if columns else x).shape
    shape = _shape(rows, width, max(span(call.block, call.rotation, call.codec), least), columns)
    shape |= {"rows": rows, "width": width} if ragged else {}
    if least and columns:
        shape["num_warps"] *= 2  # in FP8 a number takes twice the registers, those of what is not held among them
    of_program = _TILES_OF[columns] if len(x) * _count(shape) >= _MANY else 1
    rotation = {"ROTATION": call.rotation, "FACTOR": factor(call.rotation)}
    constants = {"B": call.block, "TILES": of_program} | rotation
    along = "TILE_COLUMNS" if columns else "TILE_ROWS"
    programs = _count(shape | {along: shape[along] * of_program})
    return shape | constants | flags(call.features), programs


@cache
def factor(size: int) -> float:
    """The factor that ends a rotation: FP32(1/sqrt(size)); 1 for none."""
    return float(hadamard(torch.eye(1, size), size, 1)[0, 0]) if size else 1.0


def flags(features: Sequence[bool]) -> dict[str, int]:
    *flags, scales, ties = map(bool, features)
    return dict(zip(("TENSOR_SCALE", "STOCHASTIC", "ADAPTIVE"), flags, strict=True)) | {"UNUSUAL": scales + 2 * ties}
