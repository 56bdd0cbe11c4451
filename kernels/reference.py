"""The specification: what every quantizer computes, in plain torch. Fast paths equal it bit for bit.

For a lane's tensor x, cut into blocks of B along the contraction axis, with amax over the block and the tensor:

    enc   = min(target·val_max / amax_tensor, FLT_MAX), 1 without a tensor scale           FP32, one division
    scale = round(min(amax · (enc · (1/val_max)), scale_max))                            float scale formats
          = 2^(exponent of amax·enc by an integer rule on its bits)                        E8M0
    mult  = min(1 / (scale · (1/enc)), FLT_MAX)
    q     = round(min(|x| · mult, elem_max)) with the sign of x                             the element
    x̂    = (q · scale) · (1/enc)                                                           left to right

This is the order of operations of NVIDIA's Python reference for NVFP4, with its constants as parameters. `q · scale`
is exact in BF16; the FP32 factor 1/enc is applied to the result of the GEMM. A block that holds NaN or Inf decodes to
NaN; with a tensor scale the whole tensor does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.descriptor import FLOATS, INTS

FLT_MAX = torch.finfo(torch.float32).max
_EXPONENT = 0x7F800000
_HALF_RANGE = 0x7F000000  # bits of 2^127: subtracting the bits of a power of two from it gives its reciprocal's


def round_magnitude(y: Tensor, pmin: Tensor, ulps: Tensor, threshold: Tensor | None, stochastic: Tensor) -> Tensor:
    """Round y >= 0 to the grid of a float format, y at most the format's maximum.

    pmin: smallest binade 2^emin; ulps: 2^mantissa. To nearest even where `stochastic` is False or `threshold` None;
    else up iff the fractional position is at least `threshold`.
    """
    binade = torch.maximum((y.view(torch.int32) & _EXPONENT).view(torch.float32), pmin)
    t = y * (_HALF_RANGE - binade.view(torch.int32)).view(torch.float32) * ulps  # exact: powers of two
    q = torch.round(t)
    if threshold is not None:
        low = torch.floor(t)
        q = torch.where(stochastic, low + (t - low >= threshold).to(torch.float32), q)
    return q * (binade / ulps)


def stochastic_threshold(random: Tensor) -> Tensor:
    """Midpoint form for r in 0 … 65535: fraction + (2r+1)/2^17 >= 1, as an exact FP32 bound on the fraction."""
    return (131071 - 2 * random).to(torch.float32) * (1 / 131072)


def quantize_blocks(x: Tensor, floats: Tensor, ints: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize lanes of blocks. Returns elements q [L, n, B], block scales [L, n], tensor decode factor [L].

    x: float32 [L, n, B], n blocks of B elements. floats, ints: descriptor tables, a row a lane.
    random: int32 [L, n, B] in 0 … 65535, or None where no lane rounds stochastically.
    """
    f = dict(zip(FLOATS, floats[:, :, None].unbind(1), strict=True))  # each [L, 1]
    i = dict(zip(INTS, ints[:, :, None].unbind(1), strict=True))

    magnitude = x.abs()
    amax = magnitude.amax(dim=2)  # [L, n]
    tensor_amax = amax.amax(dim=1, keepdim=True)  # [L, 1]
    enc = torch.clamp(f["tensor_target"] / tensor_amax, max=FLT_MAX)
    enc = torch.where((f["tensor_target"] > 0) & (tensor_amax > 0), enc, 1.0)

    exponent = ((amax * enc).view(torch.int32) + i["e8m0_carry"] >> 23) - i["e8m0_offset"]
    exponent = torch.clamp(exponent, 0, 254)  # biased; 0 stands for 2^-127, the smallest code of E8M0
    power = torch.where(exponent == 0, 2.0**-127, (exponent << 23).view(torch.float32))

    wanted = torch.minimum(amax * (enc * f["inv_val_max"]), f["scale_max"])
    rounded = round_magnitude(wanted, f["scale_pmin"], f["scale_ulps"], None, i["stochastic"])
    rounded = torch.where((rounded == 0) & (i["zero_to_one"] > 0), 1.0, rounded)
    scale = torch.where(i["float_scale"] > 0, rounded, power)

    dec = 1 / enc
    mult = torch.clamp(1 / (scale * dec), max=FLT_MAX)
    usable = torch.isfinite(amax) & (torch.isfinite(tensor_amax) | (f["tensor_target"] == 0))
    mult = torch.where(usable, mult, float("nan"))

    y = torch.minimum(magnitude * mult[:, :, None], f["elem_max"][:, :, None])
    threshold = None if random is None else stochastic_threshold(random)
    q = round_magnitude(
        y, f["elem_pmin"][:, :, None], f["elem_ulps"][:, :, None], threshold, i["stochastic"][:, :, None] > 0
    )
    return torch.copysign(q, x), scale, dec[:, 0]


def decode_operand(x: Tensor, floats: Tensor, ints: Tensor, random: Tensor | None) -> tuple[Tensor, Tensor]:
    """What a GEMM consumes: (q · scale [L, n, B], tensor decode factor [L]); arguments as in quantize_blocks."""
    q, scale, dec = quantize_blocks(x, floats, ints, random)
    return q * scale[:, :, None], dec


def round_bf16(x: Tensor) -> Tensor:
    """One rounding to BF16, nearest even, kept in float32. NaN stays NaN, overflow goes to Inf."""
    return x.to(torch.bfloat16).to(torch.float32)
