"""Quantize one tensor and look at everything that would be stored: the reference for people."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import ConfigError, Hadamard, Quantizer
from fp4dse.dse.quantizer import tile
from fp4dse.dse.rounding import Stochastic, samples_of
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.kernels.ops import philox
from fp4dse.kernels.ops.rotation import rotate, rotate_back, signs_of
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec import reference
from fp4dse.kernels.quant.spec.blocks import cut, join
from fp4dse.kernels.quant.spec.codecs.codes import element_codes
from fp4dse.kernels.quant.spec.feedback import power_above


class Quantized(msgspec.Struct, frozen=True):
    """A quantized tensor of shape [..., K].

    values        float32 [..., K], decoded, rotated back if a rotation was given
    elements      float32 [..., K], decoded element values; IF4's are in sevenths: seven times E2M1, or six times INT4;
                  of MixFP4's E1M2 they are the doubled values, integers, as the stored scale is half
    codes         uint8 [..., K], magnitude index in the low bits, sign above it; None for plain operands
    scales        float32, block scales: [..., K/block], [..., M/t, K/t] for tiles, [..., K] where elements of a block
                  have different ones; None for plain operands
    tensor_scale  float32 scalar, decode factor; [rows, 1] for one per row, [rows, K/128] for one per segment,
                  [rows/128, K/128] for one per tile
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
    quantizer = quantizer.canonical()
    _check(x, quantizer, rotation)
    shape, k = x.shape, x.shape[-1]
    seeds = torch.tensor([seed], dtype=torch.int64, device=x.device)
    step_, site_ = (torch.tensor(v, dtype=torch.int64, device=x.device) for v in (step, site))
    rows = x.detach().to(torch.float32).reshape(1, -1, k)
    flips = None
    if rotation:
        flips = signs_of(rotation, x.device, lambda: philox.signs(seeds, step_, site_, rotation.size))
        rows = rotate(rows, rotation.size, 2, flips, rotation.order)
    if quantizer.is_plain:
        elements = reference.round_bf16(rows) if quantizer.element == "bf16" else rows
        out = Quantized(elements, elements, None, None, torch.ones((), device=x.device))
    else:
        out = _block_scaled(rows, quantizer, Draws(seeds, step_, site_))
    values = out.values
    if rotation:
        values = rotate_back(values, rotation.size, 2, flips, rotation.order)
    scales = None if out.scales is None else out.scales.view(_scale_shape(shape, quantizer.block, out.scales))
    return msgspec.structs.replace(
        out,
        values=values.reshape(shape),
        elements=out.elements.reshape(shape),
        codes=None if out.codes is None else out.codes.view(shape),
        scales=scales,
    )


class Draws(NamedTuple):
    """Keys of random numbers: int64 [1], and two scalars."""

    seeds: Tensor
    step: Tensor
    site: Tensor

    def __call__(self, stream: str, count: int) -> Tensor:
        return philox.random16(self.seeds, philox.STREAMS[stream], self.step, self.site, count)


def _block_scaled(rows: Tensor, q: Quantizer, draws: Draws) -> Quantized:
    """rows [1, R, K] quantized; scales [1, n], or [1, n, B] where they differ within a block."""
    blocks = cut(rows, q.block)
    stochastic = isinstance(q.rounding, Stochastic)
    power = q.tensor_scale is not None and q.tensor_scale.amax == "feedback"
    encoded, dec = reference.quantize_blocks(
        blocks,
        *descriptor([q], rows.device),
        draws("rounding", blocks.numel()).view_as(blocks) if stochastic else None,
        q.adapt.startswith("4over6"),
        codec=q.codec,
        factors=q.factors(rows.shape[1], rows.shape[2]),
        tensor_amax=power_above(reference.tensor_maxima(blocks)) if power else None,
        scale_random=draws("scales", blocks.shape[1]) if q.stochastic_scales else None,
    )
    elements = join(encoded.q, rows.shape, q.block)
    if dec.ndim == 1:
        dec = dec[:, None]
    values = reference.decoded(encoded) * reference.widened(dec, blocks.shape[1])[:, :, None]
    return Quantized(
        values=join(values, rows.shape, q.block),
        elements=elements,
        codes=join(element_codes(encoded, q.codec, q.element), rows.shape, q.block),
        scales=encoded.scale if encoded.scale.ndim == 2 else join(encoded.scale, rows.shape, q.block),
        tensor_scale=dec[0, 0] if q.factors_over == "tensor" else dec.view(rows.shape[1] // (tile(q.block) or 1), -1),
        meta={name: value[0] for name, value in encoded.meta.items()},
    )


def _scale_shape(shape: torch.Size, block: int | str, scales: Tensor) -> tuple[int, ...]:
    """Shape of the block scales of a tensor of `shape`."""
    *outer, k = shape
    if scales.ndim == 3:
        return tuple(shape)
    if edge := tile(block):
        return (*outer[:-1], outer[-1] // edge, k // edge)
    return (1,) * len(shape) if block == "tensor" else (*outer, k // block if isinstance(block, int) else 1)


def _check(x: Tensor, quantizer: Quantizer, rotation: Hadamard | None) -> None:
    if not x.is_floating_point():
        raise ConfigError("x.dtype", str(x.dtype), "a floating-point tensor")
    if x.numel() == 0 or x.ndim == 0:
        raise ConfigError("x.shape", tuple(x.shape), "at least one element along a last axis")
    for _, error in quantizer_faults(quantizer):
        raise error
    if not quantizer.is_plain and (samples := samples_of(quantizer.rounding)) > 1:
        raise ConfigError("quantizer.rounding.samples", samples, "1 (each sample is a tensor of its own)")
    edge = 0 if quantizer.is_plain else tile(quantizer.block)
    if edge and x.ndim < 2:
        raise ConfigError(
            "x.shape", tuple(x.shape), f"a matrix, because block {quantizer.block} covers the last two axes"
        )
    parts = [
        ("block", -1, quantizer.unit),
        ("rotation", -1, rotation.size if rotation else 1),
        ("block", -2, edge or 1),
    ]
    for name, axis, size in parts:
        if size > 1 and x.shape[axis] % size:
            accepted = f"a multiple of the {name} size {size} (pad it, or change the {name})"
            raise ConfigError(f"x.shape[{axis}]", x.shape[axis], accepted)
