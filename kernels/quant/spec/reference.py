"""The specification: what every quantizer computes, in plain torch. Fast paths equal it bit for bit.

For a lane's tensor x, cut into blocks of B along the contraction axis, with amax over the block and the tensor:

    enc    = clamp(target·val_max / amax_tensor, 2^-126, FLT_MAX), 1 without a tensor scale   FP32, one division;
             for val_max below 2 at most FLT_MAX / (2 / val_max), so that enc · (1/val_max) is finite
    scale, q                                                            by the codec (codecs/), from block maxima
    x̂     = (q · scale) · (1/enc · postscale)                                              left to right

This is the order of operations of NVIDIA's Python reference for NVFP4, with its constants as parameters. `q · scale`
is exact in BF16 for scales of up to 5 significant bits; the FP32 factor is applied to the result of the GEMM. Under
the encode convention enc is val_max / target / amax_tensor. enc has an inverse among the normal numbers, so that no
tensor of finite numbers decodes to NaN. A block that holds NaN or Inf does; with a tensor scale the whole tensor does.
With a factor per row, rows take the place of the tensor.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.ops.rotation import rotate
from fp4dse.kernels.quant.descriptor import FLOATS, INTS
from fp4dse.kernels.quant.reading import columns_read
from fp4dse.kernels.quant.spec.codecs import CODECS, Blocks, Encoded
from fp4dse.kernels.quant.spec.grid import FLT_MAX, FLT_MIN, round_bf16

__all__ = ["decode_operand", "decoded", "quantize_blocks", "round_bf16", "tensor_maxima"]


def tensor_maxima(x: Tensor, factors: int = 1) -> Tensor:
    """max |x| of each lane's tensor, or of `factors` equal consecutive parts of it: [L, factors]. x: [L, n, B]."""
    return x.abs().amax(dim=2).view(len(x), factors, -1).amax(dim=2)


def rotated_maxima(x: Tensor, columns: bool, rotation: int = 0, signs: Tensor | None = None) -> Tensor:
    """max |x| of each lane after rotation, float32 [L], NaN where one is; arguments as in `Backend.operand`."""
    x = x.to(torch.float32)
    return tensor_maxima(rotate(x, rotation, 1 if columns else 2, signs) if rotation else x)[:, 0]


def quantize_blocks(
    x: Tensor,
    floats: Tensor,
    ints: Tensor,
    random: Tensor | None = None,
    adaptive: bool = False,
    *,
    codec: str = "block",
    factors: int = 1,
    tensor_amax: Tensor | None = None,
    **more: Any,
) -> tuple[Encoded, Tensor]:
    """Quantize lanes of blocks. Returns elements and scales, and decode factors [L], or [L, factors] if there are more.

    x: float32 [L, n, B], n blocks of B elements. floats, ints: descriptor tables, a row a lane.
    random, adaptive, and more (scale_random, guide, unpadded): see codecs.Blocks.
    factors: tensor scales per lane: 1, or the number of rows or segments, whose blocks are consecutive.
    tensor_amax: float32 [L, factors], the maxima that tensor scales follow; None for those of x.
    """
    amax = x.abs().amax(dim=2)  # [L, n]
    more |= {"random": random, "adaptive": adaptive, "factors": factors, "tensor_amax": tensor_amax}
    blocks, dec = with_numbers(x, amax, floats, ints, **more)
    encoded = CODECS[codec](blocks)
    dec = dec if encoded.dec is None else encoded.dec
    return encoded, dec[:, 0] if factors == 1 else dec


def with_numbers(
    x: Tensor,
    amax: Tensor,
    floats: Tensor,
    ints: Tensor,
    *,
    factors: int = 1,
    tensor_amax: Tensor | None = None,
    **more: Any,
) -> tuple[Blocks, Tensor]:
    """Blocks x with maxima amax [L, n] and their lanes' numbers, and decode factors [L, factors]."""
    f = dict(zip(FLOATS, floats[:, : len(FLOATS), None].unbind(1), strict=True))  # each [L, 1]
    i = dict(zip(INTS, ints[:, :, None].unbind(1), strict=True))
    more["levels"] = floats[:, len(FLOATS) :] if floats.shape[1] > len(FLOATS) else None
    if tensor_amax is None:
        tensor_amax = amax.view(len(x), factors, -1).amax(dim=2)
    has_target = f["tensor_target"] > 0
    bound = FLT_MAX / torch.clamp(2 * f["inv_val_max"], min=1)
    enc = torch.minimum(torch.clamp(f["tensor_target"] / tensor_amax, min=FLT_MIN), bound)
    enc = torch.where(has_target & (tensor_amax > 0), enc, 1.0)
    dec = (1 / enc) * f["postscale"]  # [L, factors]
    usable = torch.isfinite(tensor_amax) | ~has_target
    wide = (enc, dec, usable) if factors == 1 else (widened(t, amax.shape[1]) for t in (enc, dec, usable))
    enc_wide, dec_wide, usable = wide
    prescale = torch.where(torch.isfinite(amax) & usable, f["prescale"], float("nan"))
    return Blocks(x, amax, enc_wide, dec_wide, prescale, f, i, **more), dec


@cache
def unread(codec: str) -> frozenset[str]:
    """The columns that other codecs read and this one does not: it computes the same whatever they hold."""
    read = {name: columns_read(with_numbers, function) for name, function in CODECS.items()}
    return frozenset.union(*read.values()) - read[codec]


def widened(t: Tensor, blocks: int) -> Tensor:
    """A factor for each block, [L, blocks], from one for each of equal consecutive parts."""
    return t.repeat_interleave(blocks // t.shape[1], dim=1)


def decode_operand(
    x: Tensor, floats: Tensor, ints: Tensor, random: Tensor | None = None, adaptive: bool = False, **more: Any
) -> tuple[Tensor, Tensor]:
    """The operand that a GEMM consumes: (q · scale [L, n, B], decode factors); arguments as in quantize_blocks."""
    encoded, dec = quantize_blocks(x, floats, ints, random, adaptive, **more)
    return decoded(encoded), dec


def decoded(encoded: Encoded) -> Tensor:
    """q · scale [L, n, B]."""
    return encoded.q * per_element(encoded.scale)


def effective_scale(scale: Tensor, dec: Tensor) -> Tensor:
    """scale · dec, [L, n, 1], or [L, n, B] where elements of a block have different ones; dec: [L] or [L, factors]."""
    return per_element(scale) * widened(dec.view(len(dec), -1), scale.shape[1])[:, :, None]


def per_element(scale: Tensor) -> Tensor:
    """A scale for each element, [L, n, 1] or [L, n, B], from [L, n] or [L, n, B]."""
    return scale[:, :, None] if scale.ndim == 2 else scale
