"""Scales and multipliers of blocks from their maxima, on a GPU: in one launch what the reference does with each lane's
numbers in some ninety operations, none of which takes as long as it takes to launch it.

The maxima of a factor's blocks are given, or a factor has one block, as in FP8 under a factor of 128 numbers or a tile.
Bits are those of `reference.with_numbers` and of the general codec's scales; where scales are stored by chance, it is
the reference that makes them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import FLOATS, INTS
from fp4dse.kernels.quant.triton.blocks import block_scales, column, tensor_factor, usual_scales
from fp4dse.kernels.quant.triton.features import Features
from fp4dse.kernels.quant.triton.numbers import as_float, as_int, inverse_of_power

_ELEM_PMIN, _ELEM_ULPS, _INV_VAL_MAX = column("elem_pmin"), column("elem_ulps"), column("inv_val_max")
_TENSOR_TARGET, _PRESCALE, _POSTSCALE = (column(name) for name in ("tensor_target", "prescale", "postscale"))
_N_FLOATS, _N_INTS = tl.constexpr(len(FLOATS)), tl.constexpr(len(INTS))
_INF = tl.constexpr(float("inf"))
_TILE = 256


@triton.jit
def scales_kernel(
    low_ptr,
    high_ptr,
    amax_ptr,
    scale_ptr,
    mult_ptr,
    dec_ptr,
    floats_ptr,
    ints_ptr,
    blocks,
    of_factor,
    TILE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """A tile of a lane's blocks, of which each `of_factor` in turn share a factor. amax: as in `scales`."""
    lane = tl.program_id(1).to(tl.int64)
    f, i = floats_ptr + lane * _N_FLOATS, ints_ptr + lane * _N_INTS
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    mask = number < blocks
    at, factor = lane * blocks + number, lane * (blocks // of_factor) + number // of_factor
    low = as_int(tl.load(low_ptr + at, mask, 0.0)) & 0x7FFFFFFF  # as integers NaN is larger than infinity
    amax = as_float(tl.maximum(low, as_int(tl.load(high_ptr + at, mask, 0.0)) & 0x7FFFFFFF))
    tensor_amax = amax
    if amax_ptr is not None:
        tensor_amax = tl.load(amax_ptr + factor, mask, 0.0)
    inv_val_max = tl.load(f + _INV_VAL_MAX)
    target = tl.broadcast_to(tl.load(f + _TENSOR_TARGET), (TILE,))
    enc = tensor_factor(target, tensor_amax, inv_val_max)
    inv_enc = tl.div_rn(1.0, enc)
    usual = usual_scales(f, i, tl.load(f + _ELEM_PMIN), inverse_of_power(tl.load(f + _ELEM_ULPS)))
    scale, mult = block_scales(amax, inv_val_max, (enc, inv_enc, 0.0), usual, (f, i), UNUSUAL)
    usable = (amax < _INF) & ((tensor_amax < _INF) | (target == 0))
    tl.store(scale_ptr + at, scale, mask)
    tl.store(mult_ptr + at, tl.where(usable, mult * tl.load(f + _PRESCALE), float("nan")), mask)
    tl.store(dec_ptr + factor, inv_enc * tl.load(f + _POSTSCALE), mask & (number % of_factor == 0))


def compiled_for(features: Features) -> dict[str, Any]:
    """The compile-time constants that decide what the kernel does."""
    return {"UNUSUAL": int(features.scales)}


def launch_scales(low: Tensor, high: Tensor, amax: Tensor | None, call: Call, out: tuple[Tensor, ...]) -> None:
    """Write scales, multipliers and factors into out; arguments as in `by_scales.scales`."""
    lanes, blocks = low.shape
    pointers = low, high, amax, *out, call.floats, call.ints
    programs = launch_grid(triton.cdiv(blocks, _TILE), lanes)
    how = compiled_for(call.features) | {"TILE": _TILE, "num_warps": 2, "enable_fp_fusion": False}
    scales_kernel[programs](*pointers, blocks, blocks // out[2].shape[1], **how)
