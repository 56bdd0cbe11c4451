"""Operands in FP8, a byte an element, and their products on FP8 units: exact products, sums of 128 promoted to FP32.

    out[l, r, c] = Σ_s (Σ_(k in s) a[l, r, k] · b[l, c, k]) · f_a[l, r, s] · f_b[l, c, s]       s: segments of 128

An operand of few significant bits, element × power of two, is held by FP8 without rounding where the blocks of a
segment do not differ too much in size. So each segment of a row has a power of two of its own (`Shift.powers`) that
brings its largest number to the top of FP8:

    E5M2, at most 3 bits   E2M1 · 2^j for 29 exponents j in a row, -15 ... 13 (`ops.mxfp4.window`)
    E4M3, at most 4 bits   E2M1 · 2^j for 15 of them, -8 ... 6

A segment that spans more is not held, nor is one with NaN, nor one beyond 2^±60 of FP8's own range, so that two powers
multiply without a loss of bits. Its values are in BF16 (`Shift.wide`), its FP8 values and its power are zeros. It meets
the other operand in BF16: of each element of the result, segments that FP8 holds on both sides are added first, from
the first to the last, and then the others, likewise. So nothing is rounded, saturated or NaN that is not so in a BF16
product. Zeros are held by any power: a block of zeros alone never counts.

Hopper's FP8 units add products with 14 bits or so behind the leading one, and so does the sum within a segment; from
segment to segment sums are FP32. Elements that are FP8 numbers themselves, under FP32 factors of their segments, have
these in the place of powers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops import products
from fp4dse.kernels.ops.products import AS_IT_IS, SEGMENT, Finish, finished, scaled

_FP8 = Operation(__name__)

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {"e4m3": E4M3, "e5m2": E5M2}
"""By the names of dse/formats.py."""
BIAS = 127
MOST = 60
"""The largest magnitude of a power's exponent."""
CARRY = 0x1FFFFF
"""Added to the bits of a float32, it carries into the exponent where the significand is above 1.75: that of both
formats' largest number."""
TOPS = {E4M3: 8, E5M2: 15}
"""Exponent of the largest number."""


class Shift(NamedTuple):
    """The rest of an operand whose values are FP8.

    powers  float32 [L, R, ⌈C / 128⌉], a power of two for each segment; 0 where the segment is in `wide`
    wide    bfloat16 [L, R, C], the values of these segments; elsewhere anything
    """

    powers: Tensor
    wide: Tensor

    def decoded(self, values: Tensor) -> Tensor:
        """The numbers that FP8 values [L, R, C] stand for, float32."""
        powers = self.powers.repeat_interleave(SEGMENT, 2)[:, :, : values.shape[2]]
        return torch.where(powers == 0, self.wide.to(torch.float32), values.to(torch.float32) * powers)


class Fp8(NamedTuple):
    """An operand: values [L, R, C], E4M3 or E5M2; with powers of two of its segments, or with float32 factors of them
    [L, R, C / 128], or as it is. The last segment may be shorter than others."""

    values: Tensor
    shift: Shift | None = None
    factor: Tensor | None = None


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Shift]:
    """x, float32 or bfloat16 [L, R, C], numbers that BF16 holds, as values of this dtype, E4M3 or E5M2, contracted last
    in memory, and their shift."""
    if kernels := _FP8.kernels(x):
        return kernels.to_fp8(x, dtype)
    padded = F.pad(x.to(torch.float32), (0, -x.shape[2] % SEGMENT)).unflatten(2, (-1, SEGMENT))
    exact, largest = padded.to(torch.float64), padded.abs().view(torch.int32).amax(3)
    exponents = torch.clamp((largest + CARRY >> 23) - TOPS[dtype], BIAS - MOST, BIAS + MOST)
    powers = (exponents << 23).view(torch.float32)
    values = (exact / powers.to(torch.float64)[..., None]).to(torch.float32).to(dtype)
    held = (values.to(torch.float64) * powers[..., None] == exact).all(3)
    values = torch.where(held[..., None], values.to(torch.float32), 0.0).to(dtype).flatten(2)
    return values[:, :, : x.shape[2]].contiguous(), Shift(torch.where(held, powers, 0.0), x.to(torch.bfloat16))


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Shift]:
    """Room for an operand of this shape [L, R, C] beside a tensor; powers of a segment's rows lie side by side."""
    lanes, rows, length = shape
    powers = like.new_empty(lanes, segments_of(length), rows, dtype=torch.float32)
    return like.new_empty(shape, dtype=dtype), Shift(powers.mT, like.new_empty(shape, dtype=torch.bfloat16))


def multiply(
    a: Fp8, b: Fp8, finish: Finish = AS_IT_IS, count: Tensor | None = None, contracted: bool = False
) -> Tensor:
    """a [L, R, K] · b [L, S, K]ᵀ, float32, then as `finish` says: [L, R, S] of its dtype.

    count: int64 [L], of filled rows of a or, if contracted, of filled numbers along K, where what is beyond is zeros,
    which a GPU need not multiply; None: all may be.
    """
    if kernels := _FP8.kernels(a.values):
        return kernels.multiply(a, b, finish, count, contracted)
    out = torch.zeros(*a.values.shape[:2], b.values.shape[1], device=a.values.device)
    for part in _sums(a, b):
        out += part
    return finished(out, finish)


def segments_of(length: int) -> int:
    """The number of segments of a contraction."""
    return -(-length // SEGMENT)


def _sums(a: Fp8, b: Fp8) -> list[Tensor]:
    """Partial sums [L, R, S], scaled: of each segment what FP8 holds on both sides, then of each the rest."""
    held, others = [], []
    exact = [x.values.to(torch.float32) if x.shift is None else x.shift.decoded(x.values) for x in (a, b)]
    for number in range(segments_of(a.values.shape[2])):
        along = slice(number * SEGMENT, (number + 1) * SEGMENT)
        wide = _is_wide(a, number)[:, :, None] | _is_wide(b, number)[:, None, :]
        factors = [None if x.factor is None else x.factor[:, :, number] for x in (a, b)]
        part = scaled(products.multiply(exact[0][:, :, along], exact[1][:, :, along]), *factors)
        held.append(torch.where(wide, 0.0, part))
        others.append(torch.where(wide, part, 0.0))
    return [*held, *others]


def _is_wide(x: Fp8, number: int) -> Tensor:
    """True for rows whose segment of this number FP8 does not hold, bool [L, R]."""
    if x.shift is None:
        return torch.zeros(x.values.shape[:2], dtype=torch.bool, device=x.values.device)
    return x.shift.powers[:, :, number] == 0
