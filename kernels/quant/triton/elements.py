"""Elements by given scales, on a GPU: for blocks as long as a row or a tensor, and what else the operand kernel lacks.

Scales are few, and made before (scales.py). What is left, one read and one write of the operand, is done here, with the
bits of `grid.round_elements` and `codecs.radix4` and the random bits of `philox.random16`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import is_large, launch_grid
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.ops.philox.triton import half_words
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import FLOATS, INTS
from fp4dse.kernels.quant.triton.blocks import column, rounded
from fp4dse.kernels.quant.triton.features import Features
from fp4dse.kernels.quant.triton.numbers import as_float, as_int, binade_of, inverse_of_power

_ELEM_PMIN, _ELEM_ULPS, _ELEM_MAX = (column(f"elem_{name}") for name in ("pmin", "ulps", "max"))
_STOCHASTIC, _RANDOM_SHIFT, _EMA = column("stochastic"), column("random_shift"), column("ema")
_N_FLOATS, _N_INTS = tl.constexpr(len(FLOATS)), tl.constexpr(len(INTS))
_TILE = 2048


@triton.jit
def _power_of_four_below(y, least):
    """As `codecs.radix4`."""
    exponent, least_exponent = as_int(y) >> 23, as_int(least) >> 23
    exponent = exponent - (exponent - least_exponent & 1)
    return tl.where(y < least, 0.0, as_float(exponent << 23))


@triton.jit
def _to_powers_of_four(y, chunk, pmin, draws, STOCHASTIC: tl.constexpr):
    stochastic, shift, key = draws
    threshold = tl.full(y.shape, 0.5, tl.float32)
    if STOCHASTIC:  # noqa: SIM102 - known when compiling, unlike what follows
        if stochastic > 0:
            drawn = half_words(chunk, key) >> shift
            step = as_float(shift + (127 - 17) << 23)  # as in `grid.midpoint_threshold`
            threshold = 1.0 - (2 * drawn + 1).to(tl.float32) * step
    low = _power_of_four_below(y, pmin)
    high_step = tl.where(low > 0, 3 * low, pmin)
    t = tl.div_rn(y - low, high_step)
    whole = tl.floor(t)
    return low + high_step * (whole + tl.where(t - whole >= threshold, 1.0, 0.0))


@triton.jit
def _toward_guide(y, guide, q, pmin, inv_ulps):
    """The neighbour of y on whose side the guide is; q where there is no guide (NaN)."""
    binade = binade_of(y, pmin)
    to_steps, step = inverse_of_power(binade), binade * inv_ulps
    ulps = inverse_of_power(inv_ulps)
    t = y * to_steps * ulps
    low = tl.floor(t)
    at = guide * to_steps * ulps - low
    return tl.where(guide == guide, tl.where(at >= 0.5, tl.ceil(t), low) * step, q)


@triton.jit(do_not_specialize=["site", "stream"])
def elements_kernel(
    x_ptr,
    guide_ptr,
    scale_ptr,
    mult_ptr,
    out_ptr,
    floats_ptr,
    ints_ptr,
    site,
    elements,
    of_block,
    seeds_ptr,
    step_ptr,
    stream,
    TILE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    UNUSUAL: tl.constexpr,
    CODEC: tl.constexpr,
    LARGE: tl.constexpr,
):
    """One tile of a lane's elements, x float32 [L, elements], blocks one after the other; scale, mult: [L, blocks].
    LARGE: see launching.py."""
    lane = tl.program_id(1).to(tl.int64)
    f, i = floats_ptr + lane * _N_FLOATS, ints_ptr + lane * _N_INTS
    pmin, inv_ulps, largest = tl.load(f + _ELEM_PMIN), inverse_of_power(tl.load(f + _ELEM_ULPS)), tl.load(f + _ELEM_MAX)
    key = tl.load(seeds_ptr + lane), stream, tl.load(step_ptr), site
    draws = tl.load(i + _STOCHASTIC), tl.load(i + _RANDOM_SHIFT), key
    chunk = tl.program_id(0) * (TILE // 16) + tl.arange(0, TILE // 16)
    at = (chunk.to(tl.int64) if LARGE else chunk)[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = at < elements
    block = lane * (elements // of_block) + at // of_block
    x = tl.load(x_ptr + lane * elements + at, mask=mask, other=0.0)
    mult = tl.load(mult_ptr + block, mask=mask, other=1.0)
    scale = tl.load(scale_ptr + block, mask=mask, other=1.0)
    y = tl.minimum(tl.abs(x) * mult, largest)  # no NaN: the scale has it
    if CODEC == "radix4":
        q = _to_powers_of_four(y, chunk, pmin, draws, STOCHASTIC)
    else:
        tl.static_assert(CODEC == "block" or CODEC == "softmax" or CODEC == "sawb", "a codec that this kernel lacks")
        q = rounded(y, chunk, pmin, inv_ulps, draws, i, STOCHASTIC, UNUSUAL)
        if guide_ptr is not None:  # noqa: SIM102 - known when compiling, unlike what follows
            if tl.load(i + _EMA) > 0:
                guide = tl.load(guide_ptr + lane * elements + at, mask=mask, other=0.0)
                same_sign = (as_int(guide) ^ as_int(x)) >= 0
                guide = tl.where(same_sign, tl.abs(guide), -tl.abs(guide)) * mult
                q = _toward_guide(y, guide, q, pmin, inv_ulps)
    scale = tl.where(mult == mult, scale, float("nan"))
    out = as_float(as_int(q * scale) | (as_int(x) & -0x80000000))
    tl.store(out_ptr + lane * elements + at, out.to(out_ptr.dtype.element_ty), mask=mask)


def compiled_for(codec: str, features: Features) -> dict[str, Any]:
    """The compile-time constants that decide what the kernel does."""
    return {"CODEC": codec, "STOCHASTIC": features.stochastic, "UNUSUAL": 2 * features.ties}


def launch_elements(x: Tensor, scale: Tensor, mult: Tensor, guide: Tensor | None, call: Call, out: Tensor) -> None:
    """Write q · scale into out; arguments as in `by_scales.elements`."""
    lanes, _, of_block = x.shape
    elements = x[0].numel()
    pointers = x, guide, scale, mult, out, call.floats, call.ints, call.site, elements, of_block
    flags = compiled_for(call.codec, call.features) | {"LARGE": is_large(elements)}
    common = call.seeds, call.step, STREAMS["rounding"]
    programs = launch_grid(triton.cdiv(elements, _TILE), lanes)
    elements_kernel[programs](*pointers, *common, TILE=_TILE, **flags, num_warps=4, enable_fp_fusion=False)
