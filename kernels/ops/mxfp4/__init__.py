"""Packed MXFP4 as FP8, FP8 as packed MXFP4, and packed MXFP4 along the other axis (2603.02731).

A packed operand (quant/packed.py) has E2M1 codes, two a byte, and an E8M0 scale for each 32 of a row. On a device
without FP4 units it is multiplied in FP8, 128 numbers of the contraction under one power of two (`products.in_segments`
multiplies by it). Both grids are powers of two times few digits, so that the conversion changes exponents alone:

    tile's exponent   t = the largest of its scales' exponents - highest, of blocks that hold more than zeros
    element           E2M1 · 2^j in FP8, j = its scale's exponent - t <= highest

    highest, lowest   the window of j in which FP8 has all codes: 6, -8 in E4M3; 13, -15 in E5M2

A block below the window is rounded to nearest even, with subnormal numbers, which changes no element by more than half
of FP8's smallest number under the tile's scale; that it happened is said, so that the caller may take BF16 there. A
tile never overflows. What was NaN stays NaN, and nothing else becomes it.

In columns an operand has the contraction that its rows had not, as the weight's gradient wants it. Its scales are
powers of two along the rows, and so they are along the columns: FP8 is exact as above. E2M1 with scales of its own
along the columns is rounded again where an element is below its block's largest by so much. With s the new scale and a
the block's largest magnitude, a = 4 s or 6 s: nothing saturates, elements of s and more keep all their digits, and
smaller ones move by at most s / 4 <= a / 16.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.dse.formats import ELEMENTS
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.packed import quantize_and_pack, unpack

_MXFP4 = Operation(__name__)

BLOCK, TILE = 32, 128
"""Elements under a scale of MXFP4, and under a factor of FP8."""
NAN, ONE = 255, 127
"""Codes of E8M0."""
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_MAGNITUDES = ELEMENTS["e2m1"].magnitudes()


class Fp8(NamedTuple):
    """An FP8 operand.

    values   [L, R, C], E4M3 or E5M2; C a multiple of 128, which zeros fill up
    factor   float32 [L, R, C / 128], powers of two: of each 128 along the contraction
    outside  bool, the tiles with a block that is below the window, and perhaps rounded: [L, R, C / 128]; of columns,
             where 32 share their scales, [L, R / 32, C / 128]
    """

    values: Tensor
    factor: Tensor
    outside: Tensor

    def decoded(self) -> Tensor:
        """values · factor, float32 [L, R, C]."""
        return _decoded(self.values, self.factor)


def window(dtype: torch.dtype) -> tuple[int, int]:
    """The lowest and the highest exponent j for which this dtype has all of E2M1 · 2^j."""
    of = torch.finfo(dtype)
    lowest, highest = of.smallest_normal * of.eps / _MAGNITUDES[1], of.max / _MAGNITUDES[-1]
    return math.floor(math.log2(lowest)), math.floor(math.log2(highest))


def to_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """The operand in FP8, along the same axis. codes: uint8 [L, R, C / 2]; scales: uint8 [L, R, C / 32]."""
    if kernels := _MXFP4.kernels(codes):
        return kernels.to_fp8(codes, scales, dtype)
    x, scales = _blocks(F.pad(codes, (0, -codes.shape[2] % (TILE // 2)))), _whole(scales, 2, TILE // BLOCK)
    values, tile, outside = _fp8(x.unflatten(2, (-1, TILE // BLOCK)), scales.unflatten(2, (-1, TILE // BLOCK)), dtype)
    return Fp8(values.flatten(2), _power(tile), outside)


def columns_to_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """The transposed operand in FP8, contracted along its former rows: [L, C, R]; arguments as in `to_fp8`."""
    if kernels := _MXFP4.kernels(codes):
        return kernels.columns_to_fp8(codes, scales, dtype)
    x = _blocks(_whole(codes, 1, TILE)).unflatten(1, (-1, TILE)).transpose(2, 3)  # [L, tiles, blocks, 128, 32]
    scales = _whole(scales, 1, TILE).unflatten(1, (-1, TILE)).transpose(2, 3)
    values, tile, outside = _fp8(x, scales, dtype)
    factor = _power(tile).mT.repeat_interleave(BLOCK, dim=1)
    return Fp8(values.permute(0, 2, 4, 1, 3).flatten(3).flatten(1, 2), factor, outside.mT)


def to_columns(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The transposed operand packed, [L, C, R / 2] and [L, C, R / 32], with zeros up to a multiple of 32.

    Arguments as in `to_fp8`. Scales are `mxfp4`'s of the decoded operand, elements rounded to nearest even.
    """
    if kernels := _MXFP4.kernels(codes):
        return kernels.to_columns(codes, scales)
    values = unpack(codes.flatten(1).unflatten(1, (-1, BLOCK // 2)), scales.flatten(1), _quantizers(codes))
    return _packed(_whole(values.view(*codes.shape[:2], -1), 1, BLOCK).mT)


def from_fp8(values: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of an FP8 operand [L, R, C], along the same axis; factor: powers of two from 2^-127 on.

    Scales are `mxfp4`'s of the decoded operand, elements rounded to nearest even, once.
    """
    if kernels := _MXFP4.kernels(values):
        return kernels.from_fp8(values, factor)
    return _packed(_decoded(values, factor))


@cache
def fp8_codes(dtype: torch.dtype) -> Tensor:
    """FP8 codes of E2M1's eight magnitudes · 2^j, uint8 [n, 8]: a row for each j up to the highest, from one on whose
    codes are all 0; the last row is NaN's."""
    magnitudes = torch.tensor(_MAGNITUDES)
    lowest, highest = window(dtype)
    exponents = torch.arange(lowest - 5, highest + 1, dtype=torch.int32)[:, None]
    codes = (magnitudes * _power(exponents + ONE)).to(dtype).view(torch.uint8)
    return torch.cat([codes, torch.full((1, 8), torch.nan).to(dtype).view(torch.uint8)])


@cache
def e2m1_steps(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """FP8 codes at which E2M1's code rises, and the exponents of scales.

    The first is int32 [n, 7]: for scales of 2^e, e from the least exponent on that a block's scale has, the codes
    without sign from which a magnitude of FP8 is rounded to E2M1's first, second … magnitude but zero, so that the
    number of those that are reached is E2M1's code. The second is int32 [128]: the exponent of the scale of a block
    whose largest code this is; 1000 of what is not finite, and the least of zero.
    """
    of = torch.arange(128, dtype=torch.uint8).view(dtype).to(torch.float32)
    exponents = (of.frexp().exponent - 3).to(torch.int32)  # largest in [4, 8) scales
    finite = torch.isfinite(of)
    least, most = int(exponents[1]), int(exponents[finite].max())
    exponents[0] = least
    ratios = of[finite] * _power(ONE - torch.arange(least, most + 1, dtype=torch.int32))[:, None]
    codes = torch.searchsorted(_between(), ratios)
    steps = torch.searchsorted(codes, torch.arange(1, 8).repeat(len(codes), 1))
    return steps.to(torch.int32), torch.where(finite, exponents, 1000)


def _between() -> Tensor:
    """The largest float32 numbers that are rounded to each of E2M1's magnitudes but the last; ties go to even codes."""
    grid = torch.tensor(_MAGNITUDES)
    middles = (grid[1:] + grid[:-1]) / 2
    below = torch.nextafter(middles, torch.zeros(()))
    return torch.where(torch.arange(7) % 2 == 0, middles, below)


def _fp8(x: Tensor, scales: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Values [..., n, 32] of x in FP8, codes of their tiles' scales [...], and which tiles are outside the window.

    x: E2M1's values, float32 [..., n, 32]; scales: their codes [..., n], n blocks a tile.
    """
    lowest, highest = window(dtype)
    scales = scales.to(torch.int32)
    counts = (x != 0).any(-1) & (scales != NAN)
    top = torch.where(counts, scales, -1).amax(-1)
    tile = torch.where(top < 0, ONE, torch.clamp(top - highest, min=0))
    offset = scales - tile[..., None]
    outside = (counts & (offset < lowest)).any(-1)
    offset = torch.clamp(offset, lowest - 5, highest)  # no code reaches FP8's smallest number below; zeros may be above
    values = x * _power(offset + ONE)[..., None]
    return torch.where((scales == NAN)[..., None], torch.nan, values).to(dtype), tile, outside


def _decoded(values: Tensor, factor: Tensor) -> Tensor:
    """FP8 values times the factors of their tiles, float32 [L, R, C]."""
    return (values.to(torch.float32).unflatten(2, (-1, TILE)) * factor[..., None]).flatten(2)


def _power(code: Tensor) -> Tensor:
    """2^(code - 127), float32, of codes of E8M0, int32."""
    return torch.where(code > 0, code << 23, 0x00400000).view(torch.float32)


def _blocks(codes: Tensor) -> Tensor:
    """E2M1's values, float32 [..., C / 32, 32], of packed codes [..., C / 2]."""
    magnitudes = torch.tensor(_MAGNITUDES, device=codes.device)
    four = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()
    return torch.where(four < 8, 1.0, -1.0).mul(magnitudes[four & 7]).unflatten(-1, (-1, BLOCK))


def _whole(x: Tensor, dim: int, unit: int) -> Tensor:
    """x with zeros up to a multiple of `unit` along dim 1 or 2 of 3."""
    missing = -x.shape[dim] % unit
    return F.pad(x, (0, missing) if dim == 2 else (0, 0, 0, missing)) if missing else x


def _quantizers(x: Tensor) -> tuple[Quantizer, ...]:
    """Of each lane of x."""
    return (QUANTIZERS["mxfp4"],) * len(x)


def _packed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 x [L, R, C] by `mxfp4`."""
    quantizers = _quantizers(x)
    tables = descriptor(quantizers, x.device)
    blocks = x.reshape(len(x), -1, BLOCK)
    codes, scales, _ = quantize_and_pack(blocks, *tables, None, False, quantizers)
    return codes.view(*x.shape[:2], -1), scales.view(*x.shape[:2], -1)
