"""Quantize one tensor and look at everything that would be stored: the reference for people."""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import ConfigError, Hadamard, Quantizer
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.quantizer import Stochastic
from fp4dse.kernels import philox, reference
from fp4dse.kernels.descriptor import descriptor
from fp4dse.kernels.rotation import rotate, rotate_back


class Quantized(msgspec.Struct, frozen=True):
    """A quantized tensor of shape [..., K].

    values        float32 [..., K], decoded, rotated back if a rotation was given
    elements      float32 [..., K], decoded element values
    codes         uint8 [..., K], magnitude index in the low bits, sign in bit 3; None for plain operands
    scales        float32 [..., K/block], block scales; None for plain operands
    tensor_scale  float32 scalar, decode factor
    meta          what else the format stores

    (elements * scales) * tensor_scale, left to right, is the decoded tensor before rotating back.
    """

    values: Tensor
    elements: Tensor
    codes: Tensor | None
    scales: Tensor | None
    tensor_scale: Tensor
    meta: dict[str, Any] = {}


def quantize(
    x: Tensor, quantizer: Quantizer, *, rotation: Hadamard | None = None, seed: int = 0, step: int = 0, site: int = 0
) -> Quantized:
    """Quantize x [..., K] along its last axis. x: floating point, computed in float32.

    seed, step, site key the random bits of stochastic rounding and of the rotation signs: the same three give the
    same bits on every device. Raises ConfigError for a K that the block or the rotation does not divide, an empty
    tensor or a dtype that is not floating point. Nothing is padded.
    """
    _check(x, quantizer, rotation)
    shape, k = x.shape, x.shape[-1]
    seeds = torch.tensor([seed], dtype=torch.int64, device=x.device)
    step_, site_ = (torch.tensor(v, dtype=torch.int64, device=x.device) for v in (step, site))
    rows = x.detach().to(torch.float32).reshape(1, -1, k)
    flips = None
    if rotation:
        if rotation.signs == "random":
            flips = philox.signs(seeds, step_, site_, rotation.size)
        rows = rotate(rows, rotation.size, 2, flips)
    one = torch.ones((), device=x.device)
    if quantizer.is_plain:
        elements = reference.round_bf16(rows) if quantizer.element == "bf16" else rows
        decoded, codes, scales, dec = elements, None, None, one
    else:
        blocks = rows.reshape(1, -1, quantizer.block)
        random = None
        if isinstance(quantizer.rounding, Stochastic):
            stream = philox.STREAMS["rounding"]
            random = philox.random16(seeds, stream, step_, site_, blocks.numel()).view_as(blocks)
        q, scale, factor = reference.quantize_blocks(blocks, *descriptor([quantizer], x.device), random)
        decoded = (q * scale[:, :, None]) * factor
        codes = element_codes(q, quantizer.element).view(shape)
        elements, scales, dec = q, scale.view(*shape[:-1], k // quantizer.block), factor[0]
    values = decoded.view(rows.shape)
    if rotation:
        values = rotate_back(values, rotation.size, 2, flips)
    return Quantized(values.view(shape), elements.reshape(shape), codes, scales, dec)


def element_codes(q: Tensor, element: str) -> Tensor:
    """uint8 codes of decoded elements: index of the magnitude, sign above it."""
    magnitudes = torch.tensor(ELEMENTS[element].magnitudes(), device=q.device)
    index = torch.searchsorted(magnitudes, q.abs().contiguous())
    return (index + (torch.signbit(q).to(index.dtype) << 3)).to(torch.uint8)


def _check(x: Tensor, quantizer: Quantizer, rotation: Hadamard | None) -> None:
    if not x.is_floating_point():
        raise ConfigError("x.dtype", str(x.dtype), "a floating-point tensor")
    if x.numel() == 0 or x.ndim == 0:
        raise ConfigError("x.shape", tuple(x.shape), "at least one element along a last axis")
    k = x.shape[-1]
    for name, unit in (
        ("block", 0 if quantizer.is_plain else quantizer.block),
        ("rotation", rotation.size if rotation else 0),
    ):
        if unit and k % unit:
            raise ConfigError("x.shape[-1]", k, f"a multiple of the {name} size {unit} (pad it, or change the {name})")
