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
from fp4dse.kernels.blocks import cut, join, tile, unit
from fp4dse.kernels.descriptor import descriptor
from fp4dse.kernels.rotation import rotate, rotate_back


class Quantized(msgspec.Struct, frozen=True):
    """A quantized tensor of shape [..., K].

    values        float32 [..., K], decoded, rotated back if a rotation was given
    elements      float32 [..., K], decoded element values
    codes         uint8 [..., K], magnitude index in the low bits, sign above it; None for plain operands
    scales        float32, block scales: [..., K/block], [..., M/t, K/t] for tiles; None for plain operands
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
        blocks = cut(rows, quantizer.block)
        random = None
        if isinstance(quantizer.rounding, Stochastic):
            count = -(-blocks.numel() // 8) * 8
            drawn = philox.random16(seeds, philox.STREAMS["rounding"], step_, site_, count)
            random = drawn[:, : blocks.numel()].view_as(blocks)
        q, scale, factor = reference.quantize_blocks(
            blocks, *descriptor([quantizer], x.device), random, quantizer.canonical().adapt != "none"
        )
        decoded = join((q * scale[:, :, None]) * factor, rows.shape, quantizer.block)
        elements = join(q, rows.shape, quantizer.block)
        codes = element_codes(elements, quantizer.element).view(shape)
        scales, dec = scale.view(_scale_shape(shape, quantizer.block)), factor[0]
    values = decoded.view(rows.shape)
    if rotation:
        values = rotate_back(values, rotation.size, 2, flips)
    return Quantized(values.view(shape), elements.reshape(shape), codes, scales, dec)


def element_codes(q: Tensor, element: str) -> Tensor:
    """uint8 codes of decoded elements: index of the magnitude, sign above it."""
    magnitudes = torch.tensor(ELEMENTS[element].magnitudes(), device=q.device)
    index = torch.searchsorted(magnitudes, q.abs().contiguous())
    return (index + (torch.signbit(q).to(index.dtype) << ELEMENTS[element].bits - 1)).to(torch.uint8)


def _scale_shape(shape: torch.Size, block: int | str) -> tuple[int, ...]:
    """Shape of the block scales of a tensor of `shape`."""
    *outer, k = shape
    if edge := tile(block):
        return (*outer[:-1], outer[-1] // edge, k // edge)
    return (1,) * len(shape) if block == "tensor" else (*outer, 1 if block == "row" else k // unit(block))


def _check(x: Tensor, quantizer: Quantizer, rotation: Hadamard | None) -> None:
    if not x.is_floating_point():
        raise ConfigError("x.dtype", str(x.dtype), "a floating-point tensor")
    if x.numel() == 0 or x.ndim == 0:
        raise ConfigError("x.shape", tuple(x.shape), "at least one element along a last axis")
    block = 1 if quantizer.is_plain else quantizer.block
    edge = tile(block)
    if edge and x.ndim < 2:
        raise ConfigError("x.shape", tuple(x.shape), f"a matrix, because block {block} covers the last two axes")
    parts = [("block", -1, unit(block)), ("rotation", -1, rotation.size if rotation else 1), ("block", -2, edge or 1)]
    for name, axis, size in parts:
        if size > 1 and x.shape[axis] % size:
            accepted = f"a multiple of the {name} size {size} (pad it, or change the {name})"
            raise ConfigError(f"x.shape[{axis}]", x.shape[axis], accepted)
