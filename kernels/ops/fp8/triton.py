"""FP8 operands made and multiplied on a GPU: cuBLAS multiplies (library.py), and tiles with numbers that FP8 does not
hold are mended (wide.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import APART, Fp8, Shift, empty, library, segments_of, spaced
from fp4dse.kernels.ops.fp8.shifting import MANTISSA, higher, shifted
from fp4dse.kernels.ops.fp8.wide import widen
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import AS_IT_IS, SEGMENT, Finish
from fp4dse.kernels.quant.triton.numbers import as_int

_SEGMENT, _APART = tl.constexpr(SEGMENT), tl.constexpr(APART)
_MADE = {"ROWS": 32, "num_warps": 4, "enable_fp_fusion": False}
"""Rows of a program that makes FP8 of 128 numbers of each."""


@triton.jit
def _split_kernel(
    x_ptr,
    values_ptr,
    flags_ptr,
    notes_ptr,
    wide_ptr,
    power_ptr,
    rows,
    length,
    x_lane,
    x_row,
    x_along,
    MANTISSA: tl.constexpr,
    ROWS: tl.constexpr,
):
    """ROWS rows of one segment."""
    segments, lane = (length + _SEGMENT - 1) // _SEGMENT, tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) % segments
    row = (tl.program_id(0) // segments).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    along = number * _SEGMENT + tl.arange(0, _SEGMENT)
    inside = (row < rows)[:, None] & (along < length)[None, :]
    x = tl.load(x_ptr + lane * x_lane + row[:, None] * x_row + along.to(tl.int64)[None, :] * x_along, inside, 0.0)
    codes, flags = shifted(x.to(tl.float32), as_int(tl.load(power_ptr + lane * _APART)) >> 23, MANTISSA)
    at = (lane * rows + row)[:, None] * length + along[None, :]
    tl.store(values_ptr + at, codes.to(tl.uint8), inside)
    tl.store(wide_ptr + at, x.to(tl.bfloat16), inside & (flags > 0)[:, None])
    tl.store(flags_ptr + (lane * rows + row) * segments + number, flags.to(tl.uint8), row < rows)
    tl.store(notes_ptr + lane * tl.num_programs(0) + tl.program_id(0), tl.reduce(flags, 0, higher))


def split(x: Tensor, dtype: torch.dtype, power: Tensor) -> tuple[Tensor, Shift]:
    """`fp8.split`."""
    lanes, rows, length = x.shape
    power = spaced(power)
    programs = triton.cdiv(rows, _MADE["ROWS"]) * segments_of(length)
    values, shift = empty(x, x.shape, dtype, programs)
    outputs = values.view(torch.uint8), shift.flags, shift.notes, shift.wide
    sizes = rows, length, *x.stride()
    _split_kernel[launch_grid(programs, lanes)](x, *outputs, power, *sizes, MANTISSA=MANTISSA[dtype], **_MADE)
    return values, shift._replace(power=power)


def multiply(a: Fp8, b: Fp8, finish: Finish = AS_IT_IS) -> Tensor:
    """`fp8.multiply`."""
    return widen(library.multiply(a, b, finish), a, b, finish)
