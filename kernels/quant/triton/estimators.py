"""The gradient that passes backwards through a quantizer, on a GPU: `estimators.through` in one kernel.

The forward pass keeps nothing but the operand, which the layer has anyway, and its tensor maxima. Rotated operand,
elements and scales are made again here, by the forward kernel's own functions and from the same random bits, and the
gradient that comes out is rotated back: three tensors are read or written once. Formats are those of each lane's
row of the descriptor tables; the relaxations are compile-time constants, with their numbers in a table
(`estimators.numbers`). Every operation is the one of the function that it stands for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.elementary.triton import exp_nonpositive, power
from fp4dse.kernels.ops.launching import is_large, launch_grid
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.ops.sums.trees import lane_sum
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.spec import estimators
from fp4dse.kernels.quant.spec.grid import FLT_MAX
from fp4dse.kernels.quant.triton.blocks import block_maximum, column, larger, numbers_of, quantized
from fp4dse.kernels.quant.triton.codecs import encoded, exponentials, soft_maximum
from fp4dse.kernels.quant.triton.eights import put
from fp4dse.kernels.quant.triton.launch import factor, flags, together
from fp4dse.kernels.quant.triton.limits import span
from fp4dse.kernels.quant.triton.numbers import as_float, as_int, inverse_of_power, mantissa_of, power_below, smaller
from fp4dse.kernels.quant.triton.tiles import rotated, singles, tile

_PRESCALE, _POSTSCALE, _ENCODE = column("prescale"), column("postscale"), column("encode")
_NEAR, _FLT_MAX = tl.constexpr(estimators.NEAR), tl.constexpr(FLT_MAX)
_E8M0_MIN, _E8M0_MAX = tl.constexpr(0x00400000), tl.constexpr(0x7F000000)  # bits of 2^-127, 2^127
_KNOTS = tl.constexpr(estimators.KNOTS // 2)
_TILE = 1024


@triton.jit
def _position(x, unit, largest):
    """`estimators.position`."""
    z = smaller(larger(tl.div_rn(x, unit), -_FLT_MAX), _FLT_MAX)
    z = tl.where(x == 0, x, z)
    on_edge = as_float(as_int(z) & -0x80000000 | as_int(largest))
    return tl.where(tl.abs(tl.abs(z) - largest) <= largest * _NEAR, on_edge, z)


@triton.jit
def _second_largest(points):
    _, inv_ulps, largest = points
    return as_float(as_int(largest) - 1 & -(1 << 23 - mantissa_of(inv_ulps)))


@triton.jit
def _interval(magnitude, points):
    """`estimators._interval` by the bits: up to the second smallest binade's start all intervals are equal."""
    pmin, inv_ulps, _ = points
    low = tl.minimum(magnitude, _second_largest(points))
    uniform = low < pmin * 2
    step = pmin * inv_ulps
    steps = tl.floor(low * tl.div_rn(1.0, pmin) * inverse_of_power(inv_ulps))
    width = tl.where(uniform, step, power_below(low) * inv_ulps)
    low = tl.where(uniform, steps * step, as_float(as_int(low) & -(1 << 23 - mantissa_of(inv_ulps))))
    return low + width * 0.5, width


@triton.jit
def _relaxed(z, q, points, numbers_ptr, knots_ptr, KIND: tl.constexpr, MASKED: tl.constexpr):
    """The derivative of a relaxation at z, where the forward pass made q of it: one of `estimators.FACTORS`.

    points: the grid's smallest binade, step relative to a binade, largest. knots_ptr: None for a spline of thirds.
    Masked relaxations count in the last interval alone, which is the same for all.
    """
    magnitude, largest = tl.abs(z), points[2]
    place = largest if MASKED else magnitude
    a, b, c = tl.load(numbers_ptr), tl.load(numbers_ptr + 1).to(tl.float32), tl.load(numbers_ptr + 2).to(tl.float32)
    if KIND == "clipped":
        out = tl.where(magnitude <= largest, 1.0, 0.0)
    elif KIND == "dge":
        centre, width = _interval(place, points)
        t = tl.div_rn(magnitude - centre, width * 0.5)
        out = tl.where(magnitude <= largest, smaller(power(tl.abs(t), a) * b, c), 0.0)
    elif KIND == "power-law":
        centre, width = _interval(place, points)
        u = tl.abs(magnitude - centre)
        out = tl.where(u > 0, power(u, a) * b * (width * 0.5), 0.0)
    elif KIND == "sigmoid":
        centre, width = _interval(place, points)
        e = exp_nonpositive(-tl.abs(tl.div_rn((magnitude - centre) * 12.0, width * a.to(tl.float32))))
        half = e + 1.0
        out = larger(tl.div_rn(e, half * half) * b, c)
    elif KIND == "spline":
        if knots_ptr is None:
            centre, width = _interval(place, points)
            slope = tl.where(tl.abs(magnitude - centre) * 6.0 < width, 3.0, 0.0)
        else:
            slope = place * 0.0 + tl.load(knots_ptr + _KNOTS).to(tl.float32)
            for n in tl.static_range(_KNOTS):
                knot, after = tl.load(knots_ptr + n), tl.load(knots_ptr + _KNOTS + 1 + n)
                slope = tl.where(place < knot.to(tl.float32), slope, after.to(tl.float32))
        out = larger(slope, a.to(tl.float32))
    elif KIND == "trust":
        coarsest = power_below(_second_largest(points)) * points[1]
        out = tl.where(tl.abs(q - z) <= coarsest * 0.5, 1.0, 0.0)
    else:
        tl.static_assert(KIND == "ste", "a relaxation that this kernel does not have")
        out = tl.full(z.shape, 1.0, tl.float32)
    if MASKED:
        out = tl.where(magnitude >= largest, out, 1.0)
    return out


@triton.jit
def _first_largest(magnitude, amax):
    """`estimators._first_largest`."""
    B: tl.constexpr = magnitude.shape[1]
    left = (tl.arange(0, B) * -1 + B).to(tl.float32)[None, :]  # to the end of the block
    left = tl.where(magnitude == amax[:, None], left, 0.0)
    return tl.where((left > 0) & (left == block_maximum(left)[:, None]), 1.0, 0.0)


@triton.jit
def _softmax(magnitude, amax):
    """`estimators._softmax`."""
    e = exponentials(magnitude, amax)
    return tl.div_rn(e, lane_sum(e)[:, None])


@triton.jit
def _rounded_slope(
    magnitude, amax, dec, slope, numbers, numbers_ptr, CODEC: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr
):
    """`estimators.rounded_slope`, [n]."""
    float_scale, pmin, inv_ulps, largest, _, _, _, _ = numbers[3]
    if float_scale == 0:
        pmin, inv_ulps, largest = (
            as_float(as_int(pmin) * 0 + _E8M0_MIN),
            pmin * 0 + 1.0,
            as_float(as_int(pmin) * 0 + _E8M0_MAX),
        )
    points = pmin, inv_ulps, largest
    if CODEC == "softmax":
        amax = soft_maximum(magnitude, amax)
    wanted = amax * slope
    encode = tl.load(numbers[5][1] + _ENCODE) > 0
    u = _position(tl.where(encode, dec, wanted), tl.where(encode, wanted, dec), points[2])
    return _relaxed(u, u, points, numbers_ptr, None, KIND, MASKED) * slope


@triton.jit(do_not_specialize=["rows", "site", "stream"])
def through_kernel(
    g_ptr,
    x_ptr,
    signs_ptr,
    out_ptr,
    floats_ptr,
    ints_ptr,
    amax_ptr,
    numbers_ptr,
    site,
    rows,
    apart,
    seeds_ptr,
    step_ptr,
    stream,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    ROTATION: tl.constexpr,
    FACTOR: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
    CODEC: tl.constexpr,
    ELEMENT: tl.constexpr,
    MASKED: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_ROUNDING: tl.constexpr,
    LARGE: tl.constexpr,
):
    """ROWS rows of W numbers of a lane. g, out: float32 [L, rows, W]; x: bfloat16 or float32, lanes `apart`. LARGE: see
    launching.py."""
    HELD: tl.constexpr = B == 16 and ROTATION <= 16
    lane, row0 = tl.program_id(1).to(tl.int64), (tl.program_id(0).to(tl.int64) if LARGE else tl.program_id(0)) * ROWS
    x = tile(x_ptr + lane * apart, row0, rows, 0, W, ROWS, W, False, True, False)
    g = tile(g_ptr + lane * rows * W, row0, rows, 0, W, ROWS, W, False, True, False)
    numbers = numbers_of(lane, floats_ptr, ints_ptr, amax_ptr, seeds_ptr, step_ptr, stream, site, TENSOR_SCALE, CODEC)
    f, largest = numbers[5][0], numbers[2][2]
    prescale = tl.load(f + _PRESCALE)
    dec = tl.div_rn(numbers[6].to(tl.float32), prescale * tl.load(f + _POSTSCALE))

    # the forward pass once more
    x, amax = singles(rotated(x, signs_ptr, lane, ROTATION, FACTOR), B, False)
    g = tl.reshape(rotated(g, signs_ptr, lane, ROTATION, FACTOR), x.shape)
    chunk = (row0 * (W // 16) + tl.arange(0, ROWS * W // 16)).to(tl.int32)
    if CODEC == "block":
        q, scale = quantized(x, amax, chunk, numbers, HELD, STOCHASTIC, ADAPTIVE, UNUSUAL)
        scale = scale[:, None]
    else:
        number = (row0 * (W // B) + tl.arange(0, ROWS * W // B)).to(tl.int32)
        q, scale = encoded(x, amax, chunk, number, numbers, CODEC, HELD, STOCHASTIC, UNUSUAL)
    q = as_float(as_int(q) | (as_int(x) & -0x80000000))

    unit = scale * dec
    z = _position(x, unit, largest)
    points = numbers[2][0], numbers[2][1], largest
    factor = _relaxed(z, q, points, numbers_ptr, numbers_ptr + 6, ELEMENT, MASKED)
    usable = (amax < numbers[1][2])[:, None] & (scale == scale)
    factor = tl.where(usable, factor, float("nan"))
    out = g * factor
    if SCALE != "none":
        magnitude = tl.abs(x)
        share = tl.where(unit > 0, g * (q - z * factor), 0.0)
        if SCALE == "exact" or SCALE == "softmax":
            share = lane_sum(share)[:, None]
        if SCALE == "softmax" or SCALE == "softmax-diagonal":
            weight = _softmax(magnitude, amax)
        else:
            tl.static_assert(SCALE == "exact" or SCALE == "diagonal", "a gradient of the scale that this kernel lacks")
            weight = _first_largest(magnitude, amax)
        slope = tl.div_rn(numbers[0], prescale)
        term = share * (weight * tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)))
        if SCALE_ROUNDING == "ste":
            out += term * slope
        else:
            rest = numbers, numbers_ptr + 3
            out += term * _rounded_slope(magnitude, amax, dec, slope, *rest, CODEC, SCALE_ROUNDING, MASKED)[:, None]

    out = rotated(tl.reshape(out, (ROWS, W)), None, lane, ROTATION, FACTOR)
    if signs_ptr is not None:
        groups = tl.reshape(out, (ROWS * W // ROTATION, ROTATION))
        groups = groups * tl.load(signs_ptr + lane * ROTATION + tl.arange(0, ROTATION))[None, :]
        out = tl.reshape(groups, (ROWS, W))
    put(out, out_ptr, lane, row0, rows, 0, W, True)


def launch(g: Tensor, x: Tensor, call: Call, numbers: Tensor, form: tuple[str, bool, str, str], out: Tensor) -> None:
    """Write the gradient into out; arguments as in `operators.through`, with signs for each lane."""
    x, width = together(x), span(call.block, call.rotation, call.codec)
    rows, height = x[0].numel() // width, max(1, _TILE // width)
    amax = call.floats if call.tensor_amax is None else call.tensor_amax
    pointers = g.contiguous(), x, call.signs, out, call.floats, call.ints, amax, numbers
    keys = call.site, rows, x.stride(0), call.seeds, call.step, STREAMS["rounding"]
    sizes = {"B": call.block, "ROWS": height, "W": width, "ROTATION": call.rotation, "FACTOR": factor(call.rotation)}
    forms = dict(zip(("ELEMENT", "MASKED", "SCALE", "SCALE_ROUNDING"), form, strict=True)) | {"CODEC": call.codec}
    constants = sizes | flags(call.features) | forms | {"LARGE": is_large(x[0].numel())}
    programs = launch_grid(triton.cdiv(rows, height), len(x))
    through_kernel[programs](*pointers, *keys, **constants, num_warps=4, enable_fp_fusion=False)
