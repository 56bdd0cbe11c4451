"""The general codec: one scale a block, from its maximum; every lane with its own formats and rules.

    wanted = min(amax · (enc · (1/val_max)), scale_max)                                  the scale before rounding
    scale  = round(wanted)                                                               float scale formats
           = 2^(exponent of amax·enc by an integer rule on its bits)                       E8M0
             at least 2^-127, and so large that the smallest element is at least 2^-133
    mult   = min(1 / (scale · (1/enc)), FLT_MAX) · prescale
    q      = round(min(|x| · mult, elem_max)) with the sign of x                            the element

Under the encode convention (2509.17791) what is stored, m = round(1 / (amax · (enc · (1/val_max)))), is the multiplier:

    scale  = min(1/m, FLT_MAX), or 0 where m is: the block is lost
    mult   = min(m · enc, FLT_MAX) · prescale

A hybrid scale makes mult from the number before rounding. Four-over-six does all this a second time with val_max · 4/6,
and keeps the encoding with the smaller error.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.dse.formats import SMALLEST
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.grid import FLT_MAX, round_elements, round_scale, round_to_levels


class Blocks(NamedTuple):
    """The operand of a codec: L lanes of n blocks of B elements.

    x             float32 [L, n, B]
    amax          block maxima [L, n]
    enc           tensor factor, [L, n] or [L, 1]; 1 without a tensor scale
    dec           what the product of element and scale is multiplied by, of enc's shape
    prescale      [L, n]; elements are those of prescale · x; NaN where the block, or its tensor, holds NaN or Inf
    f, i          the descriptor tables' columns by name, float32 and int32 [L, 1] (kernels/quant/descriptor.py)
    random        int32 [L, n, B] in 0 … 65535 for elements, None where no lane rounds them stochastically
    scale_random  int32 [L, n] in 0 … 65535 for scales, or None likewise
    guide         float32 [L, n, B], the moving average of a weight, or None
    adaptive      whether some lane uses four-over-six
    unpadded      elements of a block that are not padding, for statistics; None for all
    levels        the tables of elements and where they begin, [L, LEVELS + BOUNDS] (descriptor), or None: float formats
    """

    x: Tensor
    amax: Tensor
    enc: Tensor
    dec: Tensor
    prescale: Tensor
    f: dict[str, Tensor]
    i: dict[str, Tensor]
    random: Tensor | None = None
    scale_random: Tensor | None = None
    guide: Tensor | None = None
    adaptive: bool = False
    unpadded: int | None = None
    levels: Tensor | None = None


class Encoded(NamedTuple):
    """q · scale, times the tensor's decode factor, is the decoded block.

    q      decoded elements [L, n, B], signed; scales of parts of a block that a format stores are in there
    scale  [L, n], or [L, n, B] where elements of a block have different ones
    meta   what else the format stores, by name: [L, n] or [L, n, parts]
    dec    the tensor's decode factor [L, 1], where it is not Blocks.dec
    """

    q: Tensor
    scale: Tensor
    meta: dict[str, Tensor] = {}  # noqa: RUF012  (never changed)
    dec: Tensor | None = None


def block(b: Blocks) -> Encoded:
    """The general codec."""
    magnitude = b.x.abs()
    q, scale = encode(b, magnitude, b.f["inv_val_max"])
    if b.adaptive:
        q2, scale2 = encode(b, magnitude, b.f["inv_val_max"] * 1.5)
        absolute = b.i["adapt_mae"]
        errors = [
            block_error(magnitude, q * scale[:, :, None], b.dec, absolute) for q, scale in ((q, scale), (q2, scale2))
        ]
        second = (b.i["adapt"] > 0) & (errors[1] < errors[0])
        q, scale = torch.where(second[:, :, None], q2, q), torch.where(second, scale2, scale)
    return Encoded(torch.copysign(q, b.x), scale)


def general_scales(b: Blocks) -> tuple[Tensor, Tensor]:
    """Scales and multipliers [L, n] of blocks by their maxima."""
    return block_scales(b.amax, b.enc, b.f["inv_val_max"], b.f, b.i, b.scale_random)


def encode(b: Blocks, magnitude: Tensor, inv_val_max: Tensor) -> tuple[Tensor, Tensor]:
    """Element magnitudes [L, n, B] and block scales [L, n] of magnitudes [L, n, B]."""
    scale, mult = block_scales(b.amax, b.enc, inv_val_max, b.f, b.i, b.scale_random)
    return elements(b, magnitude, mult), scale


def elements(b: Blocks, magnitude: Tensor, mult: Tensor) -> Tensor:
    """Magnitudes [L, n, B] times the blocks' multipliers, [L, n] or [L, n, B], rounded to the element grid."""
    guide = None if b.guide is None else torch.copysign(b.guide, b.guide * b.x) * _prescaled(b, mult)
    if b.levels is not None:
        y = torch.copysign(payload(b, magnitude, mult), b.x)
        return round_to_levels(y, b.levels, b.i, b.random, guide).abs()
    return round_elements(payload(b, magnitude, mult), b.f, b.i, b.random, guide)


def payload(b: Blocks, magnitude: Tensor, mult: Tensor) -> Tensor:
    """The numbers that are rounded: magnitudes [L, n, B] times the blocks' multipliers and prescale, at most the
    largest element."""
    return torch.minimum(magnitude * _prescaled(b, mult), b.f["elem_max"][:, :, None])


def _prescaled(b: Blocks, mult: Tensor) -> Tensor:
    return (mult * b.prescale)[:, :, None] if mult.ndim == 2 else mult * b.prescale[:, :, None]


def block_error(magnitude: Tensor, decoded: Tensor, dec: Tensor, absolute: Tensor) -> Tensor:
    """Squared, or absolute, error of each block [L, n], added up in a fixed order. decoded: q · scale."""
    difference = (decoded * dec[:, :, None] - magnitude).abs()
    return lane_sum(torch.where(absolute[:, :, None] > 0, difference, difference * difference), 2)


def block_scales(
    amax: Tensor, enc: Tensor, inv_val_max: Tensor, f: dict[str, Tensor], i: dict[str, Tensor], random: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Decode scales and multipliers, [L, n] each, from block maxima [L, n] and the tensor factor."""
    power = e8m0(amax * enc, i, least_exponent(f))
    encode_convention = i["encode"] > 0
    ideal = amax * (enc * inv_val_max)
    wanted = torch.minimum(torch.where(encode_convention, 1 / ideal, ideal), f["scale_max"])
    stored = round_scale(wanted, f, i, random)
    stored = torch.where(stored == 0, f["scale_zero"], stored)
    inverse = torch.where(stored == 0, 0.0, torch.clamp(1 / stored, max=FLT_MAX))
    decoded = torch.where(i["float_scale"] > 0, torch.where(encode_convention, inverse, stored), power)

    source = torch.where(i["hybrid"] > 0, wanted, stored)
    divisor = torch.where(i["float_scale"] > 0, source, power)
    mult = torch.where(encode_convention, torch.clamp(source * enc, max=FLT_MAX), multiplier(divisor, enc))
    return decoded, mult


def least_exponent(f: dict[str, Tensor]) -> Tensor:
    """The biased exponent of the smallest E8M0 scale, int32 [L, 1], not above 0 where it is E8M0's own.

    Times the smallest element it is `formats.SMALLEST`, BF16's smallest number: BF16 then holds all products.
    """
    smallest = (f["elem_pmin"].view(torch.int32) >> 23) - (f["elem_ulps"].view(torch.int32) >> 23)  # its exponent
    return 127 + SMALLEST - smallest


def e8m0(amax: Tensor, i: dict[str, Tensor], least: Tensor | None = None) -> Tensor:
    """The power of two that the lane's rule gives for maxima. least: of `least_exponent`, or None for none."""
    exponent = (amax.view(torch.int32) + i["e8m0_carry"] >> 23) - i["e8m0_offset"]
    exponent = exponent if least is None else torch.maximum(exponent, least)
    exponent = torch.clamp(exponent, 0, 254)  # biased; 0 stands for 2^-127, the smallest code of E8M0
    return torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))


def multiplier(scale: Tensor, enc: Tensor) -> Tensor:
    """The multiplier of elements: the inverse of the effective scale, at most the largest float32."""
    return torch.clamp(1 / (scale * (1 / enc)), max=FLT_MAX)
