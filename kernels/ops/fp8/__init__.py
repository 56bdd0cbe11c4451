"""Operands in FP8, a byte an element, and their products on FP8 units, which are exact but for how the unit adds.

An operand E2M1 × E8M0 is held by FP8 without rounding where its blocks do not differ too much in size. So an operand
has one power of two a lane (`Shift.power`), which waits until after the product:

    E5M2    E2M1 · 2^j for 29 exponents j in a row, -15 ... 13 (`ops.mxfp4.window`)
    E4M3    E2M1 · 2^j for 15 of them, -8 ... 6

A quantizer sees its operand once and cannot know the largest number before: the power follows from that of the step
before (`History`), with room above. 128 neighbours of a row, a segment, that have a number outside the window are not
held, nor is a segment with NaN: FP8 has zeros there, a flag is set, and the values are in BF16 (`Shift.wide`). To the
tiles of a result whose rows or columns have a flag, 64 × 64, the products of these segments in BF16 are added
(wide.py); to a BF16 result after it was rounded, which is another 2^-9 of the sum that FP8 made, less than the unit's
own bound. So no product of two finite numbers is rounded, saturated or NaN that is not so in BF16; a power that does
not fit costs time, and changes the order of additions in its tiles. What is infinite stays so or becomes NaN: an
infinite number meets zeros in the place of what FP8 holds, where the other operand has a flag in the same segment.

Binades from the largest number to the smallest step of a block in `language:350M` (24 blocks and 1,024 tokens, 3 and
8,192, steps 1 and 2; with room above E5M2 holds 29 and E4M3 16): weights 6, inputs 10 along a row and 14 along tokens,
gradients 26. Further below is the gradient of a sequence's first query alone: it sees one key, so that it would be
zero, and is what rounding leaves.

Elements that are FP8 numbers themselves, under one factor of the tensor, come as they are.

The unit adds 32 products and the sum so far in one instruction, each addend cut off at 2^-13 of the largest (2412.19437
finds 14 bits on Hopper), and cuBLAS promotes such sums to FP32 after at most 128 numbers (`use_fast_accum=False`). So a
number of the result is off by at most 132 · 2^-13 of the sum of its products' magnitudes: 128 products and 4 sums so
far are cut, each by at most 2^-13 of what an interval's magnitudes add up to. Cut numbers of both signs cancel: the
error of a whole result is 2^-13 of the largest product of an interval, over the root of their mean square, by chance:
below 2^-9 where the largest is less than 16 times that.

Only products that the table `is_taken` lists are FP8's: others stay with BF16 operands from the quantizer on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops import products
from fp4dse.kernels.ops.products import AS_IT_IS, LARGE_RESULT, LARGE_WORK, SEGMENT, Finish

_FP8 = Operation(__name__)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
"""By the names of dse/formats.py."""
BIAS = 127
MOST = 60
"""The largest magnitude of a power's exponent: two of them multiply without a loss of bits."""
CARRY = 0x1FFFFF
"""Added to the bits of a float32, it carries into the exponent where the significand is above 1.75: that of both
formats' largest number."""
INFINITE = 0x7F800000
"""The bits of infinity; those of NaN are larger."""
TOPS = {E4M3: 8, E5M2: 15}
"""Exponent of the largest number."""
HEADROOM = {E4M3: 1, E5M2: 2}
"""Binades above the largest number of the step before that are held, too."""
UNIT = 16
"""Rows, columns and contraction of a product on FP8 units are multiples of it: cuBLAS wants lines of 16 bytes."""
APART = 4
"""Float32 numbers from the power of a lane to that of the next: cuBLAS reads its scales at multiples of 16 bytes."""
STEPS = 3
"""Places of a history: of the step before, of this one, and of the next, which is made empty meanwhile."""


class History(NamedTuple):
    """The largest exponents of an operand, step by step. A step reads what the one before wrote, so that programs that
    write it need not wait for each other.

    tops      int32 [L, 3], in place t mod 3 that of step t as `top_of` has it, 0 where there is none
    step      int64 scalar
    training  this step is written; else the largest of all places is read
    """

    tops: Tensor
    step: Tensor
    training: bool

    def power(self, dtype: torch.dtype) -> Tensor:
        """The power of two of an operand in this step, float32 [L]."""
        top = self.tops.gather(1, self._place(-1))[:, 0] if self.training else self.tops.amax(1)
        return power_of(top, dtype, HEADROOM[dtype])

    def write(self, top: Tensor) -> None:
        """Take note of the largest exponents of this step's operand, int32 [L]."""
        if self.training:
            self.tops.scatter_reduce_(1, self._place(0), top[:, None], "amax")
            self.tops.scatter_(1, self._place(1), 0)

    def _place(self, later: int) -> Tensor:
        return ((self.step + later) % STEPS).expand(len(self.tops), 1)


class Shift(NamedTuple):
    """The rest of an operand whose values are FP8.

    power  float32 [L], a power of two; lanes APART numbers apart (`spaced`), or kernels copy it
    flags  uint8 [L, R, ⌈C / 128⌉], 1 where a segment is in `wide`
    notes  uint8 [L, n], not zero somewhere if the lane has a flag
    wide   bfloat16 [L, R, C], the values of these segments; elsewhere anything
    """

    power: Tensor
    flags: Tensor
    notes: Tensor
    wide: Tensor

    def decoded(self, values: Tensor) -> Tensor:
        """The numbers that FP8 values [L, R, C] stand for, float32."""
        is_wide = self.flags.repeat_interleave(SEGMENT, 2)[:, :, : values.shape[2]] > 0
        return torch.where(is_wide, self.wide.to(torch.float32), values.to(torch.float32) * self.power[:, None, None])


class Fp8(NamedTuple):
    """An operand: values [L, R, C], E4M3 or E5M2, with a shift, or as it is. With a shift the last segment may be
    shorter than others."""

    values: Tensor
    shift: Shift | None = None

    def decoded(self) -> Tensor:
        """Its numbers, float32."""
        return self.values.to(torch.float32) if self.shift is None else self.shift.decoded(self.values)


def is_taken(rows: int, columns: int, length: int) -> bool:
    """True for the shapes whose products FP8 units take: large ones (ops/products), of lines that cuBLAS takes. What is
    smaller is as fast in BF16, many lanes at a time."""
    result = rows * columns
    is_large = result >= LARGE_RESULT and 2 * result * length >= LARGE_WORK
    return is_large and not (rows % UNIT or columns % UNIT or length % UNIT)


def spaced(numbers: Tensor) -> Tensor:
    """Numbers of lanes, float32 [L], where a lane's lies APART numbers behind that of the lane before, and the first at
    a multiple of so many: as they are, or copied."""
    if not numbers.storage_offset() % APART and (len(numbers) == 1 or numbers.stride(0) == APART):
        return numbers
    return numbers.new_empty(len(numbers), APART)[:, 0].copy_(numbers)


def top_of(x: Tensor) -> Tensor:
    """The biased exponent of the largest finite number of each lane of x [L, …], int32 [L]; of the next binade where
    that is above 1.75 times its own. 0 for zeros."""
    bits = x.to(torch.float32).abs().flatten(1).view(torch.int32)
    return (torch.where(bits < INFINITE, bits, 0).amax(1) + CARRY) >> 23


def power_of(top: Tensor, dtype: torch.dtype, room: int = 0) -> Tensor:
    """The power of two that brings numbers of this largest exponent `room` binades below the top of FP8, float32; 1
    where the exponent is not known. top: int32, any shape, as `top_of` has it."""
    exponents = torch.where(top > 0, top - TOPS[dtype] + room, BIAS)
    return (torch.clamp(exponents, BIAS - MOST, BIAS + MOST).to(torch.int32) << 23).view(torch.float32)


def to_fp8(x: Tensor, dtype: torch.dtype, history: History | None = None) -> tuple[Tensor, Shift]:
    """x, float32 or bfloat16 [L, R, C], numbers that BF16 holds, as values of this dtype, E4M3 or E5M2, contracted last
    in memory, and their shift: that of its history, else of its own largest number."""
    top = top_of(x) if x.numel() else torch.zeros(len(x), dtype=torch.int32, device=x.device)
    power = power_of(top, dtype) if history is None else history.power(dtype)
    if history is not None:
        history.write(top)
    return split(x, dtype, power)


def split(x: Tensor, dtype: torch.dtype, power: Tensor) -> tuple[Tensor, Shift]:
    """`to_fp8` under these powers, float32 [L]."""
    if kernels := _FP8.kernels(x):
        return kernels.split(x, dtype, power)
    padded = F.pad(x.to(torch.float32), (0, -x.shape[2] % SEGMENT)).unflatten(2, (-1, SEGMENT)).to(torch.float64)
    unit = power.to(torch.float64)[:, None, None, None]
    values = (padded / unit).to(torch.float32).to(dtype)
    held = ((values.to(torch.float64) * unit == padded) & padded.isfinite()).all(3)
    values = torch.where(held[..., None], values.to(torch.float32), 0.0).to(dtype).flatten(2)
    flags = (~held).to(torch.uint8)
    notes = flags.flatten(1).any(1, keepdim=True).to(torch.uint8)
    return values[:, :, : x.shape[2]].contiguous(), Shift(power, flags, notes, x.to(torch.bfloat16))


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, programs: int) -> tuple[Tensor, Shift]:
    """Room for an operand of this shape [L, R, C] beside a tensor, with so many notes."""
    lanes, rows, length = shape
    power = like.new_empty(lanes, APART, dtype=torch.float32)[:, 0]
    flags = like.new_empty(lanes, rows, segments_of(length), dtype=torch.uint8)
    notes = like.new_empty(lanes, programs, dtype=torch.uint8)
    return like.new_empty(shape, dtype=dtype), Shift(power, flags, notes, like.new_empty(shape, dtype=torch.bfloat16))


def multiply(a: Fp8, b: Fp8, finish: Finish = AS_IT_IS) -> Tensor:
    """a [L, R, K] · b [L, S, K]ᵀ, float32, then as `finish` says: [L, R, S] of its dtype. On a GPU of shapes that
    `is_taken` lists, not both in E5M2; ValueError for others."""
    if kernels := _FP8.kernels(a.values):
        return kernels.multiply(a, b, finish)
    return products.multiply(a.decoded(), b.decoded(), finish=finish)


def segments_of(length: int) -> int:
    """The number of segments of a contraction."""
    return -(-length // SEGMENT)
