"""The specification: what every quantizer computes, in plain torch. Fast paths equal it bit for bit.

For a lane's tensor x, cut into blocks of B along the contraction axis, with amax over the block and the tensor:

    enc    = min(target·val_max / amax_tensor, FLT_MAX), 1 without a tensor scale          FP32, one division
    wanted = min(amax · (enc · (1/val_max)), scale_max)                                  the scale before rounding
    scale  = round(wanted)                                                               float scale formats
           = 2^(exponent of amax·enc by an integer rule on its bits)                       E8M0
    mult   = min(1 / (scale · (1/enc)), FLT_MAX) · prescale
    q      = round(min(|x| · mult, elem_max)) with the sign of x                            the element
    x̂     = (q · scale) · (1/enc · postscale)                                            left to right

This is the order of operations of NVIDIA's Python reference for NVFP4, with its constants as parameters. `q · scale`
is exact in BF16 for scales of up to 5 significant bits; the FP32 factor is applied to the result of the GEMM. Under
the encode convention (2509.17791) the stored number is round(1 / (amax · (enc · (1/val_max)))), it takes the place of
1/scale, and enc is val_max / target / amax_tensor. A hybrid scale makes mult from `wanted`. Where blocks adapt, all
this is done a second time with val_max · 4/6, and the encoding with the smaller error is kept. A block that holds NaN
or Inf decodes to NaN; with a tensor scale the whole tensor does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.descriptor import FLOATS, INTS
from fp4dse.kernels.reduce import lane_sum

FLT_MAX = torch.finfo(torch.float32).max
FLT_MIN = torch.finfo(torch.float32).tiny
_EXPONENT = 0x7F800000
_HALF_RANGE = 0x7F000000  # bits of 2^127: subtracting the bits of a power of two from it gives its reciprocal's


def scaled(y: Tensor, pmin: Tensor, ulps: Tensor) -> tuple[Tensor, Tensor]:
    """y >= 0 in units of its grid's step: (t, binade), y = t · binade / ulps, exactly.

    pmin: smallest binade 2^emin of the format; ulps: 2^mantissa, the steps in a binade.
    """
    binade = torch.maximum((y.view(torch.int32) & _EXPONENT).view(torch.float32), pmin)
    return y * (_HALF_RANGE - binade.view(torch.int32)).view(torch.float32) * ulps, binade


def round_up_from(t: Tensor, threshold: Tensor | float) -> Tensor:
    """floor(t), and one more where the fraction is at least `threshold`."""
    low = torch.floor(t)
    return low + (t - low >= threshold).to(torch.float32)


def round_scale(y: Tensor, pmin: Tensor, ulps: Tensor, up: Tensor) -> Tensor:
    """Round y >= 0, at most the format's maximum, to nearest even, or up where `up`."""
    t, binade = scaled(y, pmin, ulps)
    q = torch.where(up, round_up_from(t, FLT_MIN), torch.round(t))
    return q * (binade / ulps)


def quantize_blocks(
    x: Tensor, floats: Tensor, ints: Tensor, random: Tensor | None, adaptive: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize lanes of blocks. Returns elements q [L, n, B], block scales [L, n], tensor decode factor [L].

    x: float32 [L, n, B], n blocks of B elements. floats, ints: descriptor tables, a row a lane.
    random: int32 [L, n, B] in 0 … 65535, or None where no lane rounds stochastically.
    adaptive: whether some lane chooses between two encodings of a block.
    """
    f = dict(zip(FLOATS, floats[:, :, None].unbind(1), strict=True))  # each [L, 1]
    i = dict(zip(INTS, ints[:, :, None].unbind(1), strict=True))
    magnitude = x.abs()
    amax = magnitude.amax(dim=2)  # [L, n]
    tensor_amax = amax.amax(dim=1, keepdim=True)  # [L, 1]
    has_target = f["tensor_target"] > 0
    enc = torch.clamp(f["tensor_target"] / tensor_amax, max=FLT_MAX)
    enc = torch.where(has_target & (tensor_amax > 0), enc, 1.0)
    dec = (1 / enc) * f["postscale"]  # [L, 1]
    usable = torch.isfinite(amax) & (torch.isfinite(tensor_amax) | ~has_target)
    nan_unless_usable = torch.where(usable, f["prescale"], float("nan"))

    q, scale = _encoded(magnitude, amax, enc, nan_unless_usable, f, i, random)
    if adaptive:
        other = f | {"inv_val_max": f["inv_val_max"] * 1.5}
        q2, scale2 = _encoded(magnitude, amax, enc, nan_unless_usable, other, i, random)
        errors = [_error(magnitude, a, s, dec, i["adapt_mae"]) for a, s in ((q, scale), (q2, scale2))]
        second = (i["adapt"] > 0) & (errors[1] < errors[0])
        q, scale = torch.where(second[:, :, None], q2, q), torch.where(second, scale2, scale)
    return torch.copysign(q, x), scale, dec[:, 0]


def _encoded(magnitude, amax, enc, prescale, f, i, random) -> tuple[Tensor, Tensor]:
    """Element magnitudes [L, n, B] and block scales [L, n]."""
    scale, mult = block_scales(amax, enc, f, i)
    y = torch.minimum(magnitude * (mult * prescale)[:, :, None], f["elem_max"][:, :, None])
    return round_elements(y, f, i, random), scale


def _error(magnitude: Tensor, q: Tensor, scale: Tensor, dec: Tensor, absolute: Tensor) -> Tensor:
    """Squared or absolute error of each block [L, n], added up in a fixed order."""
    difference = ((q * scale[:, :, None]) * dec[:, :, None] - magnitude).abs()
    return lane_sum(torch.where(absolute[:, :, None] > 0, difference, difference * difference), 2)


def block_scales(amax: Tensor, enc: Tensor, f: dict[str, Tensor], i: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Decode scales and multipliers, [L, n] each, from block maxima [L, n] and the tensor factor [L, 1]."""
    exponent = ((amax * enc).view(torch.int32) + i["e8m0_carry"] >> 23) - i["e8m0_offset"]
    exponent = torch.clamp(exponent, 0, 254)  # biased; 0 stands for 2^-127, the smallest code of E8M0
    power = torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))

    encode = i["encode"] > 0
    ideal = amax * (enc * f["inv_val_max"])
    wanted = torch.minimum(torch.where(encode, 1 / ideal, ideal), f["scale_max"])
    stored = round_scale(wanted, f["scale_pmin"], f["scale_ulps"], i["scale_up"] > 0)
    stored = torch.where(stored == 0, f["scale_zero"], stored)
    decoded = torch.where(i["float_scale"] > 0, torch.where(encode, 1 / stored, stored), power)

    source = torch.where(i["hybrid"] > 0, wanted, stored)
    divisor = torch.where(i["float_scale"] > 0, source, power)
    mult = torch.where(encode, source * enc, torch.clamp(1 / (divisor * (1 / enc)), max=FLT_MAX))
    return decoded, mult


def round_elements(y: Tensor, f: dict[str, Tensor], i: dict[str, Tensor], random: Tensor | None) -> Tensor:
    """Round magnitudes y [L, n, B], at most the format's maximum, to the element grid, each lane by its own mode."""
    column = {name: value[:, :, None] for name, value in (f | i).items()}  # [L, 1, 1]
    t, binade = scaled(y, column["elem_pmin"], column["elem_ulps"])
    nearest = torch.round(t)
    # a power of two's own binade has one grid point: the tie 1.5 goes to the even code, that of even exponent
    is_even = (binade.view(torch.int32) >> 23 & 1) == 0
    nearest = torch.where((column["log_ties"] > 0) & (t == 1.5) & is_even, 1.0, nearest)
    threshold = 0.5 if random is None else random_threshold(random, column)
    by_threshold = (column["half_away"] > 0) | (column["stochastic"] > 0)
    return torch.where(by_threshold, round_up_from(t, threshold), nearest) * (binade / column["elem_ulps"])


def random_threshold(random: Tensor, column: dict[str, Tensor]) -> Tensor:
    """The fraction from which on a magnitude is rounded up, exact in FP32; 0.5 in lanes that round half away.

    Midpoint form for r of b bits: fraction + (2r+1)/2^(b+1) >= 1.
    """
    odd = 2 * (random >> column["random_shift"]) + 1
    threshold = 1.0 - odd.to(torch.float32) * column["random_step"]
    return torch.where(column["half_away"] > 0, 0.5, threshold)


def decode_operand(
    x: Tensor, floats: Tensor, ints: Tensor, random: Tensor | None, adaptive: bool = False
) -> tuple[Tensor, Tensor]:
    """What a GEMM consumes: (q · scale [L, n, B], tensor decode factor [L]); arguments as in quantize_blocks."""
    q, scale, dec = quantize_blocks(x, floats, ints, random, adaptive)
    return q * scale[:, :, None], dec


def round_bf16(x: Tensor) -> Tensor:
    """One rounding to BF16, nearest even, kept in float32. NaN stays NaN, overflow goes to Inf."""
    return x.to(torch.bfloat16).to(torch.float32)
