"""Rows to bytes and back in one kernel each, of MXFP4, of FP8 under factors of 128 numbers, and of BF16.

A program has a part of a row. Its number says which row that is, here of the tensor, there of the message: rows that
are sent need not lie together, and places that get no row are written once, with zeros.

Codes are upper bits: scaled so that its subnormal numbers are float32's, a format's numbers count from zero in the
bits of a float32 (quant/triton/numbers.py). Read back they are multiplied by the inverse.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from msgspec.structs import replace
from torch import Tensor

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.dse.formats import e8m0_rule
from fp4dse.dse.scale import E8M0
from fp4dse.kernels.ops.fp8.shifting import higher
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.messages import row_bytes
from fp4dse.kernels.quant.triton.codes import nearest_codes, signs_of
from fp4dse.kernels.quant.triton.numbers import as_float, as_int, nearest

_INFINITE = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(255)
"""E8M0's code."""
_FLT_MIN, _FLT_MAX = tl.constexpr(2.0**-126), tl.constexpr(float(torch.finfo(torch.float32).max))
_E2M1, _E4M3 = tl.constexpr(2.0**-126), tl.constexpr(2.0**-120)
"""Factors that make subnormal numbers those of float32: codes are then the bits from 22 and from 20 on."""
_HOW = {"TILE": 2048, "num_warps": 2, "enable_fp_fusion": False}
"""Numbers of a program."""


class _Form(NamedTuple):
    """A format that the kernels have. carry, offset: of the rule for E8M0 scales, see `dse.formats.e8m0_rule`."""

    name: str
    carry: int = 0
    offset: int = 0


@triton.jit
def _row(x_ptr, chosen_ptr, width, EACH: tl.constexpr):
    """Where the program's row of a tensor begins."""
    return x_ptr + tl.load(chosen_ptr + tl.program_id(0)) // EACH * width


@triton.jit
def _numbers(x_ptr, column, width):
    """A row's numbers, float32, zeros beyond its end."""
    return tl.load(x_ptr + column, column < width, 0.0).to(tl.float32)


@triton.jit
def _power(code):
    """2^(code - 127), float32."""
    return as_float(tl.where(code > 0, code << 23, 0x00400000))


@triton.jit
def _mxfp4_packed_kernel(
    x_ptr,
    chosen_ptr,
    out_ptr,
    width,
    of_row,
    EACH: tl.constexpr,
    CARRY: tl.constexpr,
    OFFSET: tl.constexpr,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Blocks of 32 of a row: 16 bytes each, and behind those of the row a scale each. WORDS: rows begin with words."""
    block, blocks = tl.program_id(1) * (TILE // 32) + tl.arange(0, TILE // 32), (width + 31) // 32
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = _numbers(_row(x_ptr, chosen_ptr, width, EACH), column, width)
    top = tl.reduce(as_int(x) & 0x7FFFFFFF, 1, higher)
    usable = top < _INFINITE
    scale = tl.minimum(tl.maximum((top + CARRY >> 23) - OFFSET, 0), 254)
    one = tl.full((), 1.0, tl.float32)
    e2m1 = one, one * 0.5, one * 6, one
    codes = nearest_codes(tl.abs(x) * _power(254 - scale)[:, None], signs_of(x, 32, False), usable, e2m1)
    out_ptr += tl.program_id(0).to(tl.int64) * of_row
    at, inside = block[:, None] * 4 + tl.arange(0, 4)[None, :], (block < blocks)[:, None]
    if WORDS:
        tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + at, codes, inside)
    else:
        for byte in tl.static_range(4):
            tl.store(out_ptr + 4 * at + byte, (codes >> 8 * byte).to(tl.uint8), inside)
    tl.store(out_ptr + blocks * 16 + block, tl.where(usable, scale, _NAN).to(tl.uint8), block < blocks)


@triton.jit
def _mxfp4_placed_kernel(message_ptr, source_ptr, out_ptr, width, of_row, TILE: tl.constexpr):
    """Blocks of 32 of a place's row."""
    block, blocks = tl.program_id(1) * (TILE // 32) + tl.arange(0, TILE // 32), (width + 31) // 32
    source = tl.load(source_ptr + tl.program_id(0))
    message_ptr += source * of_row
    inside = block < tl.where(source >= 0, blocks, 0)
    at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    codes = tl.load(message_ptr + at, inside[:, None], 0).to(tl.int32)
    code = tl.load(message_ptr + blocks * 16 + block, inside, 0).to(tl.int32)
    scale = tl.where(code == _NAN, float("nan"), _power(code))[:, None]
    row = tl.reshape(tl.join(_e2m1(codes) * scale, _e2m1(codes >> 4) * scale), (TILE // 32, 32))
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * width + column, row, column < width)


@triton.jit
def _e2m1(codes):
    """The numbers of the lower four bits."""
    magnitude = as_float((codes & 7) << 22) * (1 / _E2M1)
    return as_float(as_int(magnitude) | (codes & 8) << 28)


@triton.jit
def _fp8_packed_kernel(x_ptr, chosen_ptr, out_ptr, factor_ptr, width, of_row, EACH: tl.constexpr, TILE: tl.constexpr):
    """Segments of 128 of a row: a byte for each number, and behind those of the row a factor each. factor: the same
    message, as numbers."""
    segment, segments = tl.program_id(1) * (TILE // 128) + tl.arange(0, TILE // 128), (width + 127) // 128
    column = segment[:, None] * 128 + tl.arange(0, 128)[None, :]
    x = _numbers(_row(x_ptr, chosen_ptr, width, EACH), column, width)
    top = tl.reduce(as_int(x) & 0x7FFFFFFF, 1, higher)
    amax, usable = as_float(top), top < _INFINITE
    inverse = tl.minimum(tl.maximum(tl.div_rn(448.0, amax), _FLT_MIN), _FLT_MAX)
    factor = tl.div_rn(1.0, tl.where(amax > 0, inverse, 1.0))
    y = tl.minimum(tl.abs(x) * tl.minimum(tl.div_rn(1.0, factor), _FLT_MAX)[:, None], 448.0)
    code = as_int(nearest(y, 2.0**-6, 0.125) * _E4M3) >> 20
    code = tl.where(usable[:, None], code | as_int(x) >> 24 & 0x80, 0x7F)
    row, inside = tl.program_id(0).to(tl.int64), segment < segments
    tl.store(out_ptr + row * of_row + column, code.to(tl.uint8), inside[:, None])
    tl.store(factor_ptr + row * (of_row // 4) + segments * 32 + segment, factor, inside)


@triton.jit
def _fp8_placed_kernel(message_ptr, factor_ptr, source_ptr, out_ptr, width, of_row, TILE: tl.constexpr):
    """Segments of 128 of a place's row. factor: the message as numbers."""
    segment, segments = tl.program_id(1) * (TILE // 128) + tl.arange(0, TILE // 128), (width + 127) // 128
    source = tl.load(source_ptr + tl.program_id(0))
    inside = segment < tl.where(source >= 0, segments, 0)
    column = segment[:, None] * 128 + tl.arange(0, 128)[None, :]
    codes = tl.load(message_ptr + source * of_row + column, inside[:, None], 0).to(tl.int32)
    factor = tl.load(factor_ptr + source * (of_row // 4) + segments * 32 + segment, inside, 0.0)
    magnitude = as_float((codes & 0x7F) << 20) * (1 / _E4M3)
    magnitude = tl.where((codes & 0x7F) == 0x7F, float("nan"), magnitude)
    row = as_float(as_int(magnitude) | (codes & 0x80) << 24) * factor[:, None]
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * width + column, row, column < width)


@triton.jit
def _bf16_packed_kernel(x_ptr, chosen_ptr, out_ptr, width, EACH: tl.constexpr, TILE: tl.constexpr):
    """A part of a row."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    x = tl.load(_row(x_ptr, chosen_ptr, width, EACH) + column, column < width, 0.0)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * width + column, x.to(tl.bfloat16), column < width)


@triton.jit
def _bf16_placed_kernel(message_ptr, source_ptr, out_ptr, width, TILE: tl.constexpr):
    """A part of a place's row."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    source = tl.load(source_ptr + tl.program_id(0))
    row = tl.load(message_ptr + source * width + column, column < tl.where(source >= 0, width, 0), 0.0)
    tl.store(out_ptr + tl.program_id(0).to(tl.int64) * width + column, row.to(tl.float32), column < width)


@cache
def _form(q: Quantizer) -> _Form | None:
    """The format of a quantizer, None if the kernels lack it."""
    q = q.canonical()
    if q.is_plain and q.element == "bf16":
        return _Form("bf16")
    if q == QUANTIZERS["fp8-1x128"].canonical():
        return _Form("fp8")
    if isinstance(q.scale, E8M0) and replace(q, scale=E8M0()) == QUANTIZERS["mxfp4"].canonical():
        return _Form("mxfp4", *e8m0_rule(q.scale.rule, q.scaled_to))
    return None


def why_not(_: Tensor, q: Quantizer) -> str | None:
    """The reason why the kernels do not take a quantizer; None if they do."""
    if _form(q):
        return None
    return f"quantizer: found {q.label()}; accepted: bf16, fp8-1x128, and mxfp4 by any rule for scales"


def packed(x: Tensor, chosen: Tensor, q: Quantizer, each: int = 1) -> Tensor:
    """`messages.packed` of at least one row."""
    x, width, form = x.contiguous(), x.shape[1], _form(q)
    assert form
    out = torch.empty(len(chosen), row_bytes(width, q), dtype=torch.uint8, device=x.device)
    how = _HOW | {"EACH": each}
    programs = launch_grid(len(chosen), triton.cdiv(width, _HOW["TILE"]))
    if form.name == "mxfp4":
        rule = {"CARRY": form.carry, "OFFSET": form.offset, "WORDS": out.shape[1] % 4 == 0}
        _mxfp4_packed_kernel[programs](x, chosen, out, width, out.shape[1], **rule, **how)
    elif form.name == "fp8":
        _fp8_packed_kernel[programs](x, chosen, out, out.view(torch.float32), width, out.shape[1], **how)
    else:
        _bf16_packed_kernel[programs](x, chosen, out.view(torch.bfloat16), width, **how)
    return out


def placed(message: Tensor, source: Tensor, width: int, q: Quantizer) -> Tensor:
    """`messages.placed`."""
    message, form = message.contiguous(), _form(q)
    assert form
    out = torch.empty(len(source), width, device=message.device)
    programs = launch_grid(len(source), triton.cdiv(width, _HOW["TILE"]))
    if form.name == "mxfp4":
        _mxfp4_placed_kernel[programs](message, source, out, width, message.shape[1], **_HOW)
    elif form.name == "fp8":
        factors = message.view(torch.float32)
        _fp8_placed_kernel[programs](message, factors, source, out, width, message.shape[1], **_HOW)
    else:
        _bf16_placed_kernel[programs](message.view(torch.bfloat16), source, out, width, **_HOW)
    return out
