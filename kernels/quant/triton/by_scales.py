"""Operands whose scales are made before their elements: what the operand kernel does not take. A kernel makes elements,
and another the scales of the general codec; other scales are the reference's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.quant.call import Call, schema, unflat
from fp4dse.kernels.quant.spec.codecs import SCALES
from fp4dse.kernels.quant.spec.codecs.block import general_scales
from fp4dse.kernels.quant.spec.reference import with_numbers
from fp4dse.kernels.quant.triton.limits import SCALE_CODECS


def by_scales(
    x: Tensor, call: Call, dtype: torch.dtype, *, guide: Tensor | None = None, factors: int = 1, **more: Any
) -> tuple[Tensor, Tensor]:
    """`reference.decode_operand` with `philox.random16`: values [L, n, B] as `dtype`, decode factors [L], [L, factors].

    x: float32 [L, n, B], blocks of any length, of one of `limits.SCALE_CODECS`, no lane adaptive, nothing to rotate.
    guide, factors, more: as in `reference.quantize_blocks`.
    """
    low, high = torch.aminmax(x, dim=2)  # no temporary of x's size
    amax = None if call.tensor_amax is None else call.tensor_amax[:, None]
    more |= {"factors": factors, "tensor_amax": amax, "guide": guide}
    if SCALES[call.codec] is general_scales and more.get("scale_random") is None:
        if amax is None and factors != low.shape[1]:
            amax = torch.maximum(high, -low).view(len(x), factors, -1).amax(dim=2)
        scale, mult, dec = scales(low, high, amax, call)
    else:
        blocks, dec = with_numbers(x, torch.maximum(high, -low), call.floats, call.ints, **more)
        scale, mult = (t.contiguous() for t in SCALES[call.codec](blocks))
        mult = mult * blocks.prescale
    return elements(x, scale, mult, guide, call, dtype), dec[:, 0] if factors == 1 else dec


def scales(low: Tensor, high: Tensor, amax: Tensor | None, call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and multipliers [L, n], NaN where a block or its factor's are unusable, and decode factors, by the general
    codec without random bits.

    low, high: the least and the largest number of each block, float32 [L, n]. amax: maxima of magnitudes that factors
    follow, float32 [L, factors]; None where each block has a factor of its own.
    """
    return _scales(low, high, amax, *call)


@torch.library.custom_op(
    "fp4dse::scales",
    mutates_args=(),
    schema=f"(Tensor low, Tensor high, Tensor? amax, {schema()}) -> (Tensor, Tensor, Tensor)",
)
def _scales(low: Tensor, high: Tensor, amax: Tensor | None, *of_call: Any) -> tuple[Tensor, Tensor, Tensor]:
    from fp4dse.kernels.quant.triton.scales import launch_scales

    out = _empty(low, amax)
    with torch.cuda.device_of(low):
        launch_scales(low, high, None if amax is None else amax.contiguous(), unflat(of_call), out)
    return out


@_scales.register_fake
def _(low: Tensor, _high: Tensor, amax: Tensor | None, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _empty(low, amax)


def _empty(low: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Tensors for scales, multipliers and factors."""
    dec = torch.empty_like(low if amax is None else amax, memory_format=torch.contiguous_format)
    return torch.empty_like(low), torch.empty_like(low), dec


def elements(x: Tensor, scale: Tensor, mult: Tensor, guide: Tensor | None, call: Call, dtype: torch.dtype) -> Tensor:
    """q · scale as `dtype` of x [L, n, B], q being x · mult on the element grid; NaN where mult is.

    scale, mult: float32 [L, n]. guide: float32, of x's shape, or None, see `grid.round_elements`. The grid of the codec
    `radix4` is one of powers of four.
    """
    return _elements(x, scale, mult, guide, dtype, *call)


@torch.library.custom_op(
    "fp4dse::elements",
    mutates_args=(),
    schema=f"(Tensor x, Tensor scale, Tensor mult, Tensor? guide, ScalarType dtype, {schema()}) -> Tensor",
)
def _elements(
    x: Tensor, scale: Tensor, mult: Tensor, guide: Tensor | None, dtype: torch.dtype, *of_call: Any
) -> Tensor:
    from fp4dse.kernels.quant.triton.elements import launch_elements

    call = unflat(of_call)
    if call.codec not in SCALE_CODECS:
        raise ValueError(f"codec: found {call.codec}; accepted: {', '.join(SCALE_CODECS)}")
    out = torch.empty_like(x, dtype=dtype)
    with torch.cuda.device_of(x):
        launch_elements(x, scale, mult, guide, call, out)
    return out


@_elements.register_fake
def _(x: Tensor, _scale: Tensor, _mult: Tensor, _guide: Tensor | None, dtype: torch.dtype, *_: Any) -> Tensor:
    return torch.empty_like(x, dtype=dtype)
