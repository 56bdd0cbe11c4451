"""The packed operand: 4-bit codes, two a byte, and a byte for each block scale; as hardware would store it.

    byte   element 2i in the low half, 2i + 1 in the high half
    code   the format's magnitudes counted from zero in bits 0–2, the sign in bit 3
    scale  the scale format's numbers counted from zero; for E8M0 that is the biased exponent

A block that decodes to NaN has codes 0 and the scale code after the largest, which is the format's NaN (for E5M2 its
infinity). The tensor's factor stays float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.dse.formats import ELEMENTS, FloatFormat
from fp4dse.dse.own_formats import element_format, element_name
from fp4dse.dse.scale import E8M0, FloatScale, Scale, scale_grid, scale_key
from fp4dse.kernels.quant.spec.codecs import Encoded
from fp4dse.kernels.quant.spec.codecs.codes import element_codes
from fp4dse.kernels.quant.spec.reference import quantize_blocks


def why_not_packed(q: Quantizer) -> str | None:
    """The reason why a quantizer has no packed form, or None if it has one."""
    four = ", ".join(name for name, element in ELEMENTS.items() if element.bits == 4)
    element = None if q.is_plain else element_format(q.element)
    if not isinstance(element, FloatFormat) or element.bits != 4:
        return f"element: found {element_name(q.element)}; accepted: {four}, and other float formats of 4 bits"
    if q.codec != "block" or q.factors_over != "tensor":
        return f"quantizer: found {q.label()}; accepted: those of the general codec, with one tensor factor"
    if not isinstance(q.scale, FloatScale):
        return None
    if q.scale.convention == "encode" or len(scales_in_order(q.scale)) > 255:
        return f"scale: found {scale_key(q.scale)}, {q.scale.convention}; accepted: 8 bits, one code for NaN, decode"
    return None


def pack(encoded: Encoded, quantizers: Sequence[Quantizer]) -> tuple[Tensor, Tensor]:
    """Codes uint8 [L, n, B/2] and scale codes uint8 [L, n] of elements [L, n, B] and scales [L, n], a quantizer a lane.

    ValueError for a quantizer without a packed form.
    """
    codes, scales = [], []
    for lane, quantizer in enumerate(map(Quantizer.canonical, quantizers)):
        if reason := why_not_packed(quantizer):
            raise ValueError(reason)
        q, scale = encoded.q[lane], encoded.scale[lane]
        usable = torch.isfinite(q).all(1)
        grid = scales_in_order(quantizer.scale).to(q.device)
        scales.append(torch.where(usable, torch.searchsorted(grid, scale.nan_to_num()), len(grid)))
        finite = Encoded(q.nan_to_num()[None], scale[None])
        codes.append(torch.where(usable[:, None], element_codes(finite, "block", quantizer.element)[0], 0))
    four = torch.stack(codes)
    return four[..., 0::2] | four[..., 1::2] << 4, torch.stack(scales).to(torch.uint8)


def unpack(codes: Tensor, scales: Tensor, quantizers: Sequence[Quantizer]) -> Tensor:
    """The operand float32 [L, n, B] that the GEMM consumes, but for the tensor's factor; the inverse of `pack`."""
    lanes = []
    for lane, quantizer in enumerate(quantizers):
        elements, grid = (table.to(codes.device) for table in codebook(quantizer))
        four = torch.stack([codes[lane] & 15, codes[lane] >> 4], -1).flatten(1).int()
        lanes.append(elements[four] * grid[scales[lane].int()][:, None])
    return torch.stack(lanes)


@cache
def codebook(quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Elements by their 16 codes, negative from 8 on, and scales by theirs, NaN after the last; float32."""
    q = quantizer.canonical()
    of = element_format(q.element).magnitudes()
    magnitudes = torch.tensor([*of, *[float("nan")] * (8 - len(of))])
    scales = torch.cat([scales_in_order(q.scale), torch.tensor([float("nan")])])
    return torch.cat([magnitudes, -magnitudes]), scales


def quantize_and_pack(
    x: Tensor,
    floats: Tensor,
    ints: Tensor,
    random: Tensor | None,
    adaptive: bool,
    quantizers: Sequence[Quantizer],
    tensor_amax: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale codes, tensor decode factors) of blocks [L, n, B]: `reference.quantize_blocks`, packed."""
    encoded, dec = quantize_blocks(x, floats, ints, random, adaptive, tensor_amax=tensor_amax)
    return *pack(encoded, quantizers), dec


def scales_in_order(scale: Scale) -> Tensor:
    """The scales of the format in the order of their codes."""
    if isinstance(scale, E8M0):
        return torch.tensor([2.0**exponent for exponent in range(-127, 128)])
    return torch.tensor(scale_grid(scale).magnitudes() if scale_grid(scale).bits <= 8 else [0.0] * 256)
