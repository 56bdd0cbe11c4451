"""Parts that programs in pairs (pairs.py) of rows and of columns share: tiles in float32, ends, and arguments."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import APART, History, Shift, empty
from fp4dse.kernels.ops.fp8.shifting import MANTISSA
from fp4dse.kernels.ops.launching import is_large
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import FLOATS
from fp4dse.kernels.quant.triton.blocks import column, decoded, quantized
from fp4dse.kernels.quant.triton.eights import put_fp8, write_top
from fp4dse.kernels.quant.triton.numbers import as_float, in_four, larger_of_pairs, none
from fp4dse.kernels.quant.triton.pairs import codes_of_scales
from fp4dse.kernels.quant.triton.tiles import singles, tile

_POSTSCALE, _N_FLOATS = column("postscale"), tl.constexpr(len(FLOATS))
_APART = tl.constexpr(APART)
BLOCK = 32
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def parts(words):
    """The words that a thread read of each row, 1, 2 or 4."""
    found = none()
    if words.shape[4] == 1:
        found += (tl.reshape(words, (words.shape[0], words.shape[1], words.shape[2], words.shape[3])),)
    elif words.shape[4] == 2:
        found += tl.split(words)
    else:
        found += in_four(tl.reshape(words, (words.shape[0], words.shape[1], words.shape[2], words.shape[3], 2, 2)))
    return found


@triton.jit
def largest_of(words, FIRST: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """The larger magnitudes of COUNT words, one in STEP, each of the halves."""
    largest = words[FIRST]
    for n in tl.static_range(1, COUNT):
        largest = larger_of_pairs(largest, words[FIRST + n * STEP])
    return largest


@triton.jit
def put(there, outs, FIRST: tl.constexpr, STEP: tl.constexpr, here, COUNT: tl.constexpr):
    """Store COUNT words, one in STEP, behind each other, 16 bytes at a time, or 8."""
    if COUNT == 2:
        two = tl.arange(0, 2)[None, None, None, None, :]
        both = tl.join(outs[FIRST], outs[FIRST + STEP])
        tl.store(there[:, :, :, :, None] + two, both, here[:, :, :, :, None])
    for number in tl.static_range(COUNT // 4):
        even = tl.join(outs[FIRST + 4 * number * STEP], outs[FIRST + (4 * number + 2) * STEP])
        odd = tl.join(outs[FIRST + (4 * number + 1) * STEP], outs[FIRST + (4 * number + 3) * STEP])
        both = tl.reshape(tl.join(even, odd), (even.shape[0], even.shape[1], even.shape[2], even.shape[3], 4))
        four = number * 4 + tl.arange(0, 4)[None, None, None, None, :]
        tl.store(there[:, :, :, :, None] + four, both, here[:, :, :, :, None])


@triton.jit
def write_in_float32(
    x_ptr, out_ptr, place, numbers, P: tl.constexpr, W: tl.constexpr, COLUMNS: tl.constexpr, MANTISSA: tl.constexpr
):
    """Quantize and write one tile [P, W] as `write` does. out_ptr: codes, flags, and what is not held; place: the lane,
    first row, rows, first column, width, and the exponent of the power. Returns what `put_fp8` does."""
    x = tile(x_ptr, place[1], place[2], place[3], place[4], P, W, COLUMNS, False, True)
    blocks, amax = singles(x, _BLOCK, COLUMNS)
    q, scale = quantized(blocks, amax, None, numbers, False, False, False, 0)
    out = tl.reshape(decoded(blocks, q, scale), (P, W))
    return put_fp8(out, *out_ptr, *place, False, MANTISSA)


@triton.jit
def finish(lane, found, known, exponent, tops_ptr, notes_ptr, of_lane, step_ptr, TRAINING: tl.constexpr):
    """Note what a program found in its tile; the first one of a lane notes what is of the lane.

    found: the largest exponent, and whether there is a flag; known: as in `write_top`; of_lane: pointers to powers,
    factors and descriptors.
    """
    power_ptr, dec_ptr, floats_ptr = of_lane
    first = tl.program_id(0) == 0
    tl.store(notes_ptr + lane * tl.num_programs(0) + tl.program_id(0), found[1])
    if first:
        tl.store(power_ptr + lane * _APART, as_float(exponent << 23))
        tl.store(dec_ptr + lane, tl.load(floats_ptr + lane * _N_FLOATS + _POSTSCALE))
    if TRAINING:
        write_top(found[0], known, first, tops_ptr, lane, step_ptr)


class How(NamedTuple):
    """A way to launch: warps beside each other, rows and words of each that a thread has, registers at most; and rows
    and columns of the operand that a program has. Words are 4 bytes of columns, 16 of rows."""

    warps: int
    rows: int
    words: int
    registers: int
    tile: tuple[int, int]


class Launch(NamedTuple):
    """Programs of a lane and arguments of a kernel, and what it writes: values, shift and decode factors."""

    programs: int
    lanes: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    outputs: tuple[Tensor, Shift, Tensor]


def launch_of(x: Tensor, columns: bool, call: Call, dtype: torch.dtype, history: History, how: How) -> Launch:
    """The launch for an operand that `is_paired` lets pass; as `launch.launch_fp8`."""
    x = aligned(x)
    shape = x.mT.shape if columns else x.shape
    lanes, numbers = len(x), x[0].numel()
    programs = programs_of_pairs(x, columns, how)
    values, shift = empty(x, shape, dtype, programs)
    dec = x.new_empty(lanes, dtype=torch.float32)
    table, lowest = codes_of_scales(dtype, x.device)
    outputs = values.view(torch.uint8), shift.flags, shift.wide, shift.power, history.tops, shift.notes, dec
    sizes = *x.shape[1:], x.stride(0) - numbers if lanes > 1 else 0
    arguments = x, *outputs, table, call.floats, call.ints, *sizes, call.seeds, call.step
    constants = {"WARPS": how.warps, "ROWS": how.rows, "WORDS": how.words, "LAST": len(table) - 1, "LOWEST": lowest}
    constants |= {"MANTISSA": MANTISSA[dtype], "TRAINING": history.training, "LARGE": is_large(numbers)}
    constants["WHOLE"] = not any(size % of for size, of in zip(shape[1:], how.tile, strict=True))
    constants |= {"num_warps": how.warps, "maxnreg": how.registers, "enable_fp_fusion": False}
    return Launch(programs, lanes, arguments, constants, (values, shift, dec))


def aligned(x: Tensor) -> Tensor:
    """x with what belongs to a lane in one piece, at multiples of 16 bytes: as it is, or copied."""
    apart = x.stride(0) if len(x) > 1 else 0
    is_there = x[0].is_contiguous() and not (x.data_ptr() % 16 or apart % 8)
    return x if is_there else x.clone(memory_format=torch.contiguous_format)


def programs_of_pairs(x: Tensor, columns: bool, how: How) -> int:
    """The number of programs of a lane."""
    rows, width = (x.mT if columns else x).shape[1:]
    return triton.cdiv(rows, how.tile[0]) * triton.cdiv(width, how.tile[1])


def is_paired(x: Tensor, call: Call) -> bool:
    """True if an operand is made in pairs: bfloat16 in rows of multiples of 16; blocks of 32, to nearest, not rotated.
    The kernel for all formats writes the same bits, slower, so no reason is noted where that one is taken."""
    is_plain = call.codec == "block" and call.block == BLOCK and not call.rotation and not any(call.features)
    return is_plain and x.dtype == torch.bfloat16 and not x.shape[2] % 16 and _has_pairs_of_integers(x.device)


@cache
def _has_pairs_of_integers(device: torch.device) -> bool:
    """True if the device compares two integers of 16 bits at a time."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)
