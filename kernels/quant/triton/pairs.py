"""MXFP4 to nearest in FP8, two BF16 numbers at a time, all that belongs to a number in the registers of one thread.

The other programs of this folder quantize in float32, for any format and rule. What most products on FP8 units take is
blocks of 32 of E2M1 under a power of two, of BF16 numbers, and that has a short way:

    E2M1's code is round(min(2y, y + 2, y / 2 + 4)) of the magnitude y over the scale: three lines that cross at whole
    numbers, ties to even as the grid has them. BF16 keeps whole numbers from 128 to 256, so that each line is one
    fused multiply-add of two numbers, which rounds once: y is a number times a power of two, or 3/4 of it
    three bits are FP8's code by a table of 8 bytes of the block's scale (`codes_of_scales`), four numbers at a time.
    A number that FP8 does not hold has bit 7 there, which is how segments that are not held are found

Where a tile has such a number, or its lane's rule is another, it is made as by `write` (tiles.py): in float32, with the
same bits where both may be taken.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.dse.formats import ELEMENTS
from fp4dse.kernels.ops.mxfp4 import window
from fp4dse.kernels.quant.descriptor import FLOATS, INTS
from fp4dse.kernels.quant.triton.blocks import column
from fp4dse.kernels.quant.triton.numbers import as_int, larger_of_pairs

_ELEM_PMIN, _ELEM_ULPS, _ELEM_MAX = column("elem_pmin"), column("elem_ulps"), column("elem_max")
_PRESCALE, _FLOAT_SCALE = column("prescale"), column("float_scale")
_CARRY, _OFFSET = column("e8m0_carry"), column("e8m0_offset")
_N_FLOATS, _N_INTS = tl.constexpr(len(FLOATS)), tl.constexpr(len(INTS))
_BOTH = tl.constexpr(0x10001)  # a word whose halves are one
_MAGNITUDES = tl.constexpr(0x7FFF7FFF)
_HIGH = tl.constexpr(0x7F807F80)  # exponents of a pair
_LARGEST = tl.constexpr(252)  # exponent of a scale up to which nothing overflows; FP8 holds none that is near


@triton.jit
def larger_pair(a, b):
    """The larger of two pairs of integers of 16 bits without sign. Tests: a twin, as of all functions in assembly."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, is_pure=True, pack=1)


@triton.jit
def between(x, low, high):
    """A pair of integers, each at least that of `low` and at most that of `high`. Tests: a twin."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a; max.u16x2 a, $1, $2; min.u16x2 $0, a, $3; }",
        "=r,r,r,r",
        [x, low, high],
        tl.int32,
        is_pure=True,
        pack=1,
    )


_LINES = (
    "mov.b32 m, 0x43004300; fma.rn.bf16x2 a, x, $3, m;"
    "mov.b32 m, 0x43024302; fma.rn.bf16x2 b, x, $4, m;"
    "mov.b32 m, 0x43044304; fma.rn.bf16x2 c, x, $5, m;"
    "min.u16x2 a, a, b; min.u16x2 $0, a, c; }"
)
_BEGIN = "{ .reg .b32 x, a, b, c, m;"
_NEAREST = tl.constexpr(_BEGIN + "abs.bf16x2 x, $1; min.bf16x2 x, x, $2;" + _LINES)
_NEAREST_OF_MANY = tl.constexpr(_BEGIN + "min.xorsign.abs.bf16x2 x, $1, $2; abs.bf16x2 x, x;" + _LINES)


@triton.jit
def nearest_codes(x, limit, first, second, third, MANY: tl.constexpr = False):
    """128 and E2M1's code, to nearest even, of each bfloat16 number of words x, without sign: int32 of two bfloat16.

    limit: the magnitude that becomes E2M1's largest; first, second, third: what multiplies magnitudes in the three
    lines, two numbers each. MANY: words wait in registers, and their magnitudes shall not wait beside them. Tests: a
    twin.
    """
    return tl.inline_asm_elementwise(
        _NEAREST_OF_MANY if MANY else _NEAREST,
        "=r,r,r,r,r,r",
        [x, limit, first, second, third],
        tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def either_of_pairs(word, AXIS: tl.constexpr):
    """The larger magnitude of each half of words along an axis, NaN if one is. Tests: a twin."""
    return tl.reduce(word, AXIS, larger_of_pairs) & _MAGNITUDES


@triton.jit
def rule_of(lane, floats_ptr, ints_ptr):
    """Of a lane: whether it is E2M1 under a power of two; the carry and the offset of that, and what 3/4 takes from the
    bits of a multiplier, in both halves of a word or as they are."""
    f, i = floats_ptr + lane * _N_FLOATS, ints_ptr + lane * _N_INTS
    prescale = tl.load(f + _PRESCALE)
    plain = (tl.load(f + _ELEM_PMIN) == 1.0) & (tl.load(f + _ELEM_ULPS) == 2.0) & (tl.load(f + _ELEM_MAX) == 6.0)
    plain = plain & ((prescale == 1.0) | (prescale == 0.75)) & (tl.load(i + _FLOAT_SCALE) == 0)
    return plain, (tl.load(i + _CARRY) >> 16) * _BOTH, tl.load(i + _OFFSET), 0x3F80 - (as_int(prescale) >> 16)


@triton.jit
def lines_of(amax, rule):
    """Of pairs of blocks with these maxima: exponents of their scales and the offset, as in bfloat16; the arguments of
    `nearest_codes`; and what is not zero where an exponent is not within the limits, but of zeros."""
    _, carry, offset, less = rule
    lowest = (offset + 1 << 7) * _BOTH
    wanted = amax + carry & _HIGH
    exponents = between(wanted, lowest, lowest + (_LARGEST - 1 << 7) * _BOTH)
    first = (255 + offset << 7) * _BOTH - less * _BOTH - exponents
    limit = exponents + ((2 - offset << 7) + 0x40 + less) * _BOTH
    beyond = (wanted ^ exponents) & between(amax, 0, _BOTH) * 0x7F80
    return exponents, (limit, first, first - 0x800080, first - 0x1000100), beyond


@triton.jit
def bytes_of(at, base, table_ptr, LAST: tl.constexpr):
    """The 8 bytes of blocks, two words. at: exponents as `lines_of` has them, of one of the pair; base: to be added, so
    that the number of the table's row is left."""
    row = tl.minimum(tl.maximum(at + base, 0), LAST)
    return tl.load(table_ptr + row * 2), tl.load(table_ptr + row * 2 + 1)


@triton.jit
def tops_of(exponents, codes):
    """Exponents of the largest numbers of pairs of blocks, each with the offset, and one more than they are; codes: of
    their maxima."""
    return exponents + (codes << 6 & 0x3800380)


@cache
def codes_of_scales(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, int]:
    """FP8's codes of E2M1's eight magnitudes · 2^j, 0x80 for what it does not hold, as two words a row, for each j from
    one on of which it holds zeros alone; and the first j."""
    lowest, highest = window(dtype)
    exponents = torch.arange(lowest - 4, highest + 5, dtype=torch.float64)[:, None]
    wanted = torch.tensor(ELEMENTS["e2m1"].magnitudes(), dtype=torch.float64) * torch.exp2(exponents)
    codes = wanted.to(torch.float32).to(dtype)
    table = torch.where(codes.to(torch.float64) == wanted, codes.view(torch.uint8), 0x80).to(torch.uint8)
    return table.view(torch.int32).to(device), lowest - 4
