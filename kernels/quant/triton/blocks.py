"""Triton code that quantizes the blocks of a tile, by one lane's row of the descriptor tables: `reference` as Triton
code.

`numbers_of` reads the row once a program, `quantized` and `scaled` use it on every tile, with the bits of
`reference.quantize_blocks`. What no lane needs (see `features`) is left out when they are compiled. The
arithmetic is in `numbers`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.dse.formats import SMALLEST
from fp4dse.kernels.ops.sums.trees import lane_sum, plus
from fp4dse.kernels.quant.descriptor import FLOATS, INTS, WIDE
from fp4dse.kernels.quant.reading import constant_of
from fp4dse.kernels.quant.spec.grid import FLT_MAX, FLT_MIN
from fp4dse.kernels.quant.triton.numbers import (
    as_float,
    as_int,
    binade_of,
    down,
    inverse_of_power,
    larger_of_pairs,
    mantissa_of,
    nearest,
    random_steps,
    round_wide,
    smaller,
)


def column(name: str) -> tl.constexpr:
    """The number of the column in its table: code that uses it reads the column."""
    return constant_of(name, tl.constexpr([*(FLOATS if name in FLOATS else INTS)].index(name)))


_ELEM_PMIN = column("elem_pmin")
_ELEM_ULPS = column("elem_ulps")
_ELEM_MAX = column("elem_max")
_INV_VAL_MAX = column("inv_val_max")
_TENSOR_TARGET = column("tensor_target")
_SCALE_PMIN = column("scale_pmin")
_SCALE_ULPS = column("scale_ulps")
_SCALE_MAX = column("scale_max")
_SCALE_ZERO = column("scale_zero")
_PRESCALE = column("prescale")
_POSTSCALE = column("postscale")
_FLOAT_SCALE = column("float_scale")
_E8M0_CARRY = column("e8m0_carry")
_E8M0_OFFSET = column("e8m0_offset")
_SCALE_UP = column("scale_up")
_ENCODE = column("encode")
_HYBRID = column("hybrid")
_LOG_TIES = column("log_ties")
_HALF_AWAY = column("half_away")
_RANDOM_SHIFT = column("random_shift")
_STOCHASTIC = column("stochastic")
_ADAPT = column("adapt")
_ADAPT_MAE = column("adapt_mae")
_N_FLOATS, _N_INTS = tl.constexpr(len(FLOATS)), tl.constexpr(len(INTS))
_FLT_MIN, _FLT_MAX = tl.constexpr(FLT_MIN), tl.constexpr(FLT_MAX)
_SMALLEST = tl.constexpr(2.0**-149)
_SMALLEST_EXPONENT = tl.constexpr(SMALLEST)
_INF = tl.constexpr(float("inf"))
_WIDE = tl.constexpr(WIDE)


@triton.jit
def larger(a, b):
    """The larger of two numbers, NaN if one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_maximum(magnitude):
    """[n, B] -> [n], NaN where the block holds one. The tests have a twin: the interpreter's maximum drops NaN."""
    return tl.reduce(magnitude, 1, larger)


@triton.jit
def pair_maximum(word):
    """max |x| of both bfloat16 numbers of words [n, m] -> [n], with any signs, NaN if one is. The tests have a twin."""
    return tl.reduce(word, 1, larger_of_pairs)


@triton.jit
def tensor_factor(target, amax, inv_val_max):
    """The encode factor of tensors with these maxima; 1 without a target."""
    bound = tl.div_rn(_FLT_MAX, tl.maximum(2 * inv_val_max, 1.0))
    wanted = tl.maximum(tl.minimum(tl.div_rn(target, amax), bound), _FLT_MIN)
    return tl.where((target > 0) & (amax > 0), wanted, 1.0)


@triton.jit
def _exact_factor(target, amax):
    """The decode factor of `codecs.exact`."""
    quotient = (amax.to(tl.float64) / target.to(tl.float64)).to(tl.float32)
    return tl.where((target > 0) & (amax > 0), tl.minimum(tl.maximum(quotient, _SMALLEST), _FLT_MAX), 1.0)


@triton.jit
def usual_scales(f, i, pmin, inv_ulps):
    """The numbers that usual scales take of a lane's row, f and i; pmin, inv_ulps: of its elements."""
    return (
        tl.load(i + _FLOAT_SCALE),
        tl.load(f + _SCALE_PMIN),
        inverse_of_power(tl.load(f + _SCALE_ULPS)),
        tl.load(f + _SCALE_MAX),
        tl.load(f + _SCALE_ZERO),
        tl.load(i + _E8M0_CARRY),
        tl.load(i + _E8M0_OFFSET),
        least_exponent(pmin, inv_ulps),
    )


@triton.jit
def numbers_of(
    lane,
    floats_ptr,
    ints_ptr,
    amax_ptr,
    seeds_ptr,
    step_ptr,
    stream,
    site,
    TENSOR_SCALE: tl.constexpr,
    CODEC: tl.constexpr,
):
    """The numbers of a lane that quantizing takes, and the decode factor of its tensor.

    inv_val_max; the tensor's factor, its inverse, and the bound of usable block maxima; of the element; of the usual
    scales; of stochastic rounding; pointers to the row, for what is rarely needed; the decode factor.
    """
    f, i = floats_ptr + lane * _N_FLOATS, ints_ptr + lane * _N_INTS
    inv_val_max = tl.load(f + _INV_VAL_MAX)
    inv_ulps = inverse_of_power(tl.load(f + _ELEM_ULPS))
    element = tl.load(f + _ELEM_PMIN), inv_ulps, tl.load(f + _ELEM_MAX), tl.load(f + _PRESCALE)
    usual = usual_scales(f, i, element[0], inv_ulps)
    key = tl.load(seeds_ptr + lane), stream, tl.load(step_ptr), site
    draws = tl.load(i + _STOCHASTIC), tl.load(i + _RANDOM_SHIFT), key
    enc = inv_val_max * 0.0 + 1.0
    inv_enc = enc
    limit = enc * _INF
    if TENSOR_SCALE:
        target, tensor_amax = tl.load(f + _TENSOR_TARGET), tl.load(amax_ptr + lane)
        enc = tensor_factor(target, tensor_amax, inv_val_max)
        inv_enc = _exact_factor(target, tensor_amax) if CODEC == "exact" else tl.div_rn(1.0, enc)
        limit = tl.where((tensor_amax < _INF) | (target == 0), _INF, 0.0)
    dec = inv_enc * tl.load(f + _POSTSCALE)
    return inv_val_max, (enc, inv_enc, limit), element, usual, draws, (f, i), dec


@triton.jit
def _any_scale(amax, enc, inv_val_max, f, i):
    """Scale and multiplier of blocks for float scales of any kind."""
    encode = tl.load(i + _ENCODE) > 0
    ideal = amax * (enc * inv_val_max)
    wanted = smaller(tl.where(encode, tl.div_rn(1.0, ideal), ideal), tl.load(f + _SCALE_MAX))
    stored = round_wide(wanted, tl.load(f + _SCALE_PMIN), tl.load(f + _SCALE_ULPS), tl.load(i + _SCALE_UP))
    stored = tl.where(stored == 0, tl.load(f + _SCALE_ZERO), stored)
    source = tl.where(tl.load(i + _HYBRID) > 0, wanted, stored)
    mult = tl.where(encode, source * enc, tl.div_rn(1.0, source * tl.div_rn(1.0, enc)))
    inverse = tl.where(stored == 0, 0.0, smaller(tl.div_rn(1.0, stored), _FLT_MAX))
    return tl.where(encode, inverse, stored), smaller(mult, _FLT_MAX)


@triton.jit
def least_exponent(pmin, inv_ulps):
    """`block.least_exponent`, at least 0."""
    return tl.maximum(381 + _SMALLEST_EXPONENT - (as_int(pmin) >> 23) - (as_int(inv_ulps) >> 23), 0)  # 381 = 3 · 127


@triton.jit
def e8m0(amax, carry, offset, least):
    """The power of two that the lane's rule gives for maxima; least: the least biased exponent."""
    exponent = (as_int(amax) + carry >> 23) - offset
    exponent = tl.minimum(tl.maximum(exponent, least), 254)
    return as_float(tl.maximum(exponent << 23, 0x00400000))  # exponent 0 is 2^-127


@triton.jit
def _usual_scale(amax, enc, inv_enc, inv_val_max, usual):
    """Scale and multiplier of blocks for E8M0, and for 8-bit float scales that are rounded to nearest."""
    float_scale, scale_pmin, scale_inv_ulps, scale_max, scale_zero, e8m0_carry, e8m0_offset, least = usual
    if float_scale > 0:
        scale = nearest(tl.minimum(amax * (enc * inv_val_max), scale_max), scale_pmin, scale_inv_ulps)
        scale = tl.where(scale == 0, scale_zero, scale)
    else:
        scale = e8m0(amax * enc, e8m0_carry, e8m0_offset, least)
    return scale, smaller(tl.div_rn(1.0, scale * inv_enc), _FLT_MAX)


@triton.jit
def _to_nearest(y, pmin, inv_ulps, i, UNUSUAL: tl.constexpr):
    """Element magnitudes to nearest, with the ties of the lane."""
    if UNUSUAL >= 2:
        if tl.load(i + _HALF_AWAY) > 0:
            mantissa = mantissa_of(inv_ulps)
            q = down(y, 1 << 22 - mantissa, pmin, mantissa)
        else:
            # a power of two's own binade has one grid point: the tie goes to the even code, not to the larger
            binade = binade_of(y, pmin)
            tie = (y == binade * 1.5) & ((as_int(binade) >> 23 & 1) < tl.load(i + _LOG_TIES))
            q = tl.where(tie, binade, nearest(y, pmin, inv_ulps))
    else:
        q = nearest(y, pmin, inv_ulps)
    return q


@triton.jit
def block_scales(amax, inv_val_max, tensor, usual, row, UNUSUAL: tl.constexpr):
    """Scale and multiplier of blocks with maxima amax [n], [n] each."""
    enc, inv_enc, _ = tensor
    f, i = row
    if UNUSUAL % 2 == 1:
        kind = tl.load(i + _ENCODE) + tl.load(i + _HYBRID) + tl.load(i + _SCALE_UP)
        if (kind > 0) | (tl.load(f + _SCALE_MAX) > _WIDE):
            scale, mult = _any_scale(amax, enc, inv_val_max, f, i)
        else:
            scale, mult = _usual_scale(amax, enc, inv_enc, inv_val_max, usual)
    else:
        scale, mult = _usual_scale(amax, enc, inv_enc, inv_val_max, usual)
    return scale, mult


@triton.jit
def rounded(y, chunk, pmin, inv_ulps, draws, i, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    """y [n, B] >= 0, at most the largest element, to the grid of pmin and inv_ulps as the lane does; chunk as below."""
    if STOCHASTIC:
        stochastic, shift, key = draws
        if stochastic > 0:
            mantissa = mantissa_of(inv_ulps)
            q = down(y, tl.reshape(random_steps(chunk, shift, mantissa, key), y.shape), pmin, mantissa)
        else:
            q = _to_nearest(y, pmin, inv_ulps, i, UNUSUAL)
    else:
        q = _to_nearest(y, pmin, inv_ulps, i, UNUSUAL)
    return q


@triton.jit
def _encoded(
    magnitude,
    amax,
    chunk,
    inv_val_max,
    tensor,
    element,
    usual,
    draws,
    row,
    STOCHASTIC: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """Element magnitudes [n, B] and scales [n]; arguments as in `quantized`."""
    pmin, inv_ulps, largest, prescale = element
    scale, mult = block_scales(amax, inv_val_max, tensor, usual, row, UNUSUAL)
    y = tl.minimum(magnitude * (mult * prescale)[:, None], largest)  # no NaN: the scale has it
    scale = tl.where(amax < tensor[2], scale, float("nan"))
    return rounded(y, chunk, pmin, inv_ulps, draws, row[1], STOCHASTIC, UNUSUAL), scale


@triton.jit
def total(x):
    """Sum of each row of integers x [n, B], in any order."""
    return tl.reduce(x, 1, plus)


@triton.jit
def _error(magnitude, q, scale, dec, absolute):
    """Error of each block [n]."""
    error = tl.abs((q * scale[:, None]) * dec - magnitude)
    return lane_sum(tl.where(absolute > 0, error, error * error))


@triton.jit
def quantized(
    x, amax, chunk, numbers, HELD: tl.constexpr, STOCHASTIC: tl.constexpr, ADAPTIVE: tl.constexpr, UNUSUAL: tl.constexpr
):
    """Element magnitudes [n, B] and scales [n], NaN for unusable blocks, of x: float32 [n, B].

    amax: maxima of its blocks, [n]. chunk: numbers in the lane of its runs of 16, [n · B / 16]. numbers: from
    `numbers_of`. HELD: blocks are runs of 16, and a thread holds whole ones. UNUSUAL: 1 for `Features.scales`, and 2
    for `Features.ties`.
    """
    inv_val_max, tensor, element, usual, draws, row, dec = numbers
    magnitude = tl.abs(x)
    if HELD:
        chunk -= as_int(amax) >> 31  # changes nothing, but so a thread draws for the numbers that it holds
    rest = tensor, element, usual, draws, row
    q, scale = _encoded(magnitude, amax, chunk, inv_val_max, *rest, STOCHASTIC, UNUSUAL)
    if ADAPTIVE:  # noqa: SIM102 - known when compiling, unlike what follows
        if tl.load(row[1] + _ADAPT) > 0:
            q2, scale2 = _encoded(magnitude, amax, chunk, inv_val_max * 1.5, *rest, STOCHASTIC, UNUSUAL)
            absolute = tl.load(row[1] + _ADAPT_MAE)
            second = _error(magnitude, q2, scale2, dec, absolute) < _error(magnitude, q, scale, dec, absolute)
            q, scale = tl.where(second[:, None], q2, q), tl.where(second, scale2, scale)
    return q, scale


@triton.jit
def scaled(x, amax, numbers, UNUSUAL: tl.constexpr):
    """Magnitudes of x [n, B] in units of scales, not yet limited, and scales [n], NaN for unusable blocks."""
    inv_val_max, tensor, element, usual, _, row, _ = numbers
    scale, mult = block_scales(amax, inv_val_max, tensor, usual, row, UNUSUAL)
    return tl.abs(x) * (mult * element[3])[:, None], tl.where(amax < tensor[2], scale, float("nan"))


@triton.jit
def decoded(x, q, scale):
    """The blocks that the GEMM consumes, float32 [n, B]: q · scale with the sign of x."""
    return as_float(as_int(q * scale[:, None]) | (as_int(x) & -0x80000000))
