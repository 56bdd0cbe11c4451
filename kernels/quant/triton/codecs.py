"""The codecs of `kernels/quant/spec/codecs` as Triton code, for tiles of the fused kernel; the general one is `blocks`.

Every function takes magnitudes [n, B] of blocks, block maxima [n], numbers in the lane of runs of 16 (`chunk`) and of
blocks (`number`), and `numbers` of the lane; and gives element magnitudes [n, B] and scales [n, 1] or [n, B]. Blocks
that are unusable may get anything. What is computed, and why, is said under the same names in `codecs`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.quantizer import MACRO_BLOCK
from fp4dse.kernels.ops.elementary.triton import exp_nonpositive, log
from fp4dse.kernels.ops.philox.triton import draws16
from fp4dse.kernels.ops.sums.trees import lane_sum
from fp4dse.kernels.quant.spec.codecs.dialects import NEAREST
from fp4dse.kernels.quant.spec.codecs.eden import LARGEST
from fp4dse.kernels.quant.spec.codecs.hif4 import SCALE_MAX, SCALE_MIN, SEVENTH
from fp4dse.kernels.quant.spec.codecs.quest import OPTIMAL_CLIP
from fp4dse.kernels.quant.spec.codecs.razer import SPECIAL
from fp4dse.kernels.quant.spec.codecs.softmax import SHARPNESS
from fp4dse.kernels.quant.triton.blocks import block_maximum, block_scales, column, e8m0, rounded, total
from fp4dse.kernels.quant.triton.numbers import (
    as_float,
    as_int,
    inverse_of_power,
    keep_mantissa,
    power_below,
    round_double,
    round_scale_by_chance,
    smaller,
)

_SEVENTH = tl.constexpr(SEVENTH)
_HIF4_MIN, _HIF4_MAX = tl.constexpr(SCALE_MIN), tl.constexpr(SCALE_MAX)
_EDEN_LARGEST = tl.constexpr(LARGEST)
_CLIP = tl.constexpr(OPTIMAL_CLIP / 6)
_LARGEST_POWER = tl.constexpr(2.0**127)
_FLT_MIN, _UNIT_MAX = tl.constexpr(2.0**-126), tl.constexpr(2.0**126)
_INT_PMIN = tl.constexpr(2.0 ** ELEMENTS["int4"].emin)
_INT_INV_ULPS = tl.constexpr(2.0 ** -ELEMENTS["int4"].mantissa)
_INT_MAX = tl.constexpr(ELEMENTS["int4"].max)
_MACRO_BLOCK = tl.constexpr(MACRO_BLOCK)
_TOP_MANTISSA, _ONE = tl.constexpr(0x007F8000), tl.constexpr(0x3F800000)
_INF = tl.constexpr(float("inf"))
_TINY = tl.constexpr(2.0**-1022)
_LOG_TIES, _SCALE_UP = column("log_ties"), column("scale_up")
_SCALE_STOCHASTIC = column("scale_stochastic")
_SPECIAL = tl.constexpr(SPECIAL)
_SHARPNESS, _SOFTNESS = tl.constexpr(SHARPNESS), tl.constexpr(1 / SHARPNESS)
_TO_INTEGER = tl.constexpr(12582912.0)  # see numbers
# all levels, and their squared errors, as one integer each: 4 and 8 bits for a number of halves, 16 for a dialect
_LEVELS = [int(level) for level in NEAREST.flatten().tolist()]
_NEAREST = tl.constexpr(sum(level << 4 * n for n, level in enumerate(_LEVELS)))
_SQUARES = tl.constexpr(sum((level - n % 16) ** 2 << 8 * n for n, level in enumerate(_LEVELS)))


@triton.jit
def coded(
    x,
    amax,
    chunk,
    number,
    numbers,
    CODEC: tl.constexpr,
    HELD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """The blocks that the GEMM consumes of x, float32 [n, B], by a codec other than `block`; arguments as in
    `quantized`.

    number: numbers of the blocks in the lane, [n].
    """
    q, scale = encoded(x, amax, chunk, number, numbers, CODEC, HELD, STOCHASTIC, UNUSUAL)
    sign = as_int(x) & -0x80000000
    if CODEC == "razer":
        sign = tl.where(q == 0, 0, sign)  # there is no -0
    limit = numbers[1][2]
    scale = tl.where((amax < limit)[:, None], scale, float("nan"))
    return as_float(as_int(q * scale) | sign)


@triton.jit
def encoded(
    x,
    amax,
    chunk,
    number,
    numbers,
    CODEC: tl.constexpr,
    HELD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """Element magnitudes [n, B] and scales [n, 1] or [n, B]; arguments as in `coded`."""
    magnitude = tl.abs(x)
    if HELD:
        chunk -= as_int(amax) >> 31  # as in `quantized`
    if CODEC == "eden":
        q, scale = _eden(magnitude, amax, chunk, number, numbers, UNUSUAL)
    elif CODEC == "hif4":
        q, scale = _hif4(magnitude, chunk, numbers, STOCHASTIC, UNUSUAL)
    elif CODEC == "quest":
        q, scale = _quest(x, magnitude, amax, chunk, numbers, STOCHASTIC, UNUSUAL)
    elif CODEC == "split":
        q, scale = _split(x, magnitude, chunk, numbers, STOCHASTIC, UNUSUAL)
    elif CODEC == "if4":
        q, scale = _if4(magnitude, amax, chunk, numbers, STOCHASTIC, UNUSUAL)
    elif CODEC == "mixfp4":
        q, scale = _mixfp4(magnitude, amax, chunk, numbers, STOCHASTIC, UNUSUAL)
    elif CODEC == "exact":
        q, scale = _exact(magnitude, amax, numbers, UNUSUAL)
    elif CODEC == "macro":
        q, scale = _macro(magnitude, amax, chunk, numbers, STOCHASTIC, UNUSUAL)
    elif CODEC == "razer":
        q, scale = _razer(x, magnitude, amax, chunk, numbers, UNUSUAL)
    elif CODEC == "softmax":
        scale, y = _scaled(magnitude, soft_maximum(magnitude, amax), numbers, UNUSUAL)
        q, scale = _to_grid(y, chunk, numbers, STOCHASTIC, UNUSUAL), scale[:, None]
    else:
        tl.static_assert(CODEC == "dialects", "a codec that this kernel does not have")
        q, scale = _dialects(magnitude, amax, numbers, UNUSUAL)
    return q, scale


@triton.jit
def exponentials(magnitude, amax):
    """`codecs.softmax.exponentials` of magnitudes [n, B] of blocks with maxima amax [n]."""
    ratio = tl.div_rn(magnitude, tl.where(amax > 0, amax, 1.0)[:, None])
    return exp_nonpositive((ratio - 1.0) * _SHARPNESS)


@triton.jit
def soft_maximum(magnitude, amax):
    """`codecs.softmax.soft_maxima`, [n]."""
    return amax * (log(lane_sum(exponentials(magnitude, amax))) * _SOFTNESS + 1.0)


@triton.jit
def _scaled(magnitude, amax, numbers, UNUSUAL: tl.constexpr):
    """Scales [n] and magnitudes [n, B] times multipliers of the general codec."""
    inv_val_max, tensor, element, usual, _, row, _ = numbers
    scale, mult = block_scales(amax, inv_val_max, tensor, usual, row, UNUSUAL)
    return scale, magnitude * (mult * element[3])[:, None]


@triton.jit
def _to_grid(y, chunk, numbers, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    """y [n, B] to the element grid, saturated. No NaN comes out of the minimum."""
    pmin, inv_ulps, largest, _ = numbers[2]
    return rounded(tl.minimum(y, largest), chunk, pmin, inv_ulps, numbers[4], numbers[5][1], STOCHASTIC, UNUSUAL)


@triton.jit
def _eden(magnitude, amax, chunk, number, numbers, UNUSUAL: tl.constexpr):
    usual, key = numbers[3], numbers[4][2]
    by_chance = tl.load(numbers[5][1] + _SCALE_STOCHASTIC)
    scale, y = _scaled(magnitude, amax, numbers, UNUSUAL)
    q = _to_grid(y, chunk, numbers, False, UNUSUAL)
    y = tl.minimum(y, _EDEN_LARGEST)
    norm, product = lane_sum(y * y), lane_sum(y * q)
    corrected = scale * tl.div_rn(norm, product)
    corrected = smaller(tl.where((product == 0) | (scale == 0), scale, corrected), usual[3])
    return q, round_scale_by_chance(corrected, usual[1], usual[2], draws16(number, key), by_chance)[:, None]


@triton.jit
def _hif4(magnitude, chunk, numbers, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    n: tl.constexpr = magnitude.shape[0]
    x = keep_mantissa(magnitude, 7)
    v16 = block_maximum(tl.reshape(x, (n * 16, 4)))
    v8 = tl.reshape(block_maximum(tl.reshape(v16, (n * 8, 2))), (n, 8))
    v16, x = tl.reshape(v16, (n, 8, 2)), tl.reshape(x, (n, 8, 2, 4))
    wanted = keep_mantissa(block_maximum(v8) * _SEVENTH, 7)
    scale = keep_mantissa(tl.minimum(tl.maximum(wanted, _HIF4_MIN), _HIF4_MAX), 2)
    r = keep_mantissa(tl.div_rn(1.0, scale), 7)
    half = tl.where(v8 * r[:, None] >= 4, 0.5, 1.0)
    quarter = v16 * r[:, None, None] * half[:, :, None] >= 2
    down = (half[:, :, None] * tl.where(quarter, 0.5, 1.0))[:, :, :, None]
    y = x * r[:, None, None, None] * down
    p = _to_grid(tl.reshape(y, magnitude.shape), chunk, numbers, STOCHASTIC, UNUSUAL)
    q = tl.reshape(p, x.shape) * inverse_of_power(down)
    return tl.reshape(q, magnitude.shape), scale[:, None]


@triton.jit
def _quest(x, magnitude, amax, chunk, numbers, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    share = 1.0 / x.shape[1]
    unit = tl.minimum(tl.maximum(power_below(amax), _FLT_MIN), _UNIT_MAX)
    z = x * inverse_of_power(unit)[:, None]
    centred = z - (lane_sum(z) * share)[:, None]
    deviation = tl.sqrt_rn(lane_sum(centred * centred) * share) * unit
    scale = tl.minimum(power_below(deviation * _CLIP + 1e-8), _LARGEST_POWER)
    mult = inverse_of_power(scale * 0.5) * 0.5
    q = _to_grid(magnitude * (mult * numbers[2][3])[:, None], chunk, numbers, STOCHASTIC, UNUSUAL)
    return q, scale[:, None]


@triton.jit
def _split(x, magnitude, chunk, numbers, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    inv_val_max, tensor, element, usual, _, row, _ = numbers
    is_negative = as_int(x) < 0
    maximum = block_maximum(tl.where(is_negative, 0.0, magnitude))
    positive, up = block_scales(maximum, inv_val_max, tensor, usual, row, UNUSUAL)
    maximum = block_maximum(tl.where(is_negative, magnitude, 0.0))
    negative, down = block_scales(maximum, inv_val_max, tensor, usual, row, UNUSUAL)
    mult = tl.where(is_negative, (down * element[3])[:, None], (up * element[3])[:, None])
    q = _to_grid(magnitude * mult, chunk, numbers, STOCHASTIC, UNUSUAL)
    return q, tl.where(is_negative, negative[:, None], positive[:, None])


@triton.jit
def _if4(magnitude, amax, chunk, numbers, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    pmin, inv_ulps, largest, _ = numbers[2]
    draws, i = numbers[4], numbers[5][1]
    scale, z = _scaled(magnitude, amax, numbers, UNUSUAL)
    z = tl.minimum(z, largest)
    z7 = z * 7
    real = rounded(z, chunk, pmin, inv_ulps, draws, i, STOCHASTIC, UNUSUAL) * 7
    zero = pmin * 0.0
    sixths = tl.div_rn(z7, largest)
    whole = rounded(sixths, chunk, zero + _INT_PMIN, zero + _INT_INV_ULPS, draws, i, STOCHASTIC, UNUSUAL) * 6
    integer = lane_sum((whole - real) * (whole + real - 2 * z7)) < 0
    return tl.where(integer[:, None], whole, real), scale[:, None]


@triton.jit
def _mixfp4(magnitude, amax, chunk, numbers, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    inv_val_max, tensor, element, usual, draws, row, _ = numbers
    pmin, _, largest, prescale = element
    zero = pmin * 0.0
    most = zero + _INT_MAX
    scale, z = _scaled(magnitude, amax, numbers, UNUSUAL)
    real = _to_grid(z, chunk, numbers, STOCHASTIC, UNUSUAL)
    scale2, mult = block_scales(amax, tl.div_rn(inv_val_max * largest, most), tensor, usual, row, UNUSUAL)
    y = tl.minimum(magnitude * (mult * prescale)[:, None], most)
    whole = rounded(y, chunk, zero + _INT_PMIN, zero + _INT_INV_ULPS, draws, row[1], STOCHASTIC, UNUSUAL)
    first, second = real - z, whole * tl.div_rn(scale2, scale)[:, None] - z
    is_real = lane_sum(first * first) < lane_sum(second * second)
    return tl.where(is_real[:, None], real, whole), tl.where(is_real, scale, scale2)[:, None]


@triton.jit
def _razer(x, magnitude, amax, chunk, numbers, UNUSUAL: tl.constexpr):
    scale, z = _scaled(magnitude, amax, numbers, UNUSUAL)
    z = tl.minimum(z, numbers[2][2])
    negative = x < 0
    gain = tl.maximum(1 - 2 * tl.abs(z - _SPECIAL), 0.0)
    minus = lane_sum(tl.where(negative, -gain, gain)) < 0
    is_special = (gain > 0) & (negative == minus[:, None])
    return tl.where(is_special, _SPECIAL, _to_grid(z, chunk, numbers, False, UNUSUAL)), scale[:, None]


@triton.jit
def _macro(magnitude, amax, chunk, numbers, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    _, _, _, _, _, carry, offset, _ = numbers[3]
    n: tl.constexpr = magnitude.shape[0]
    SHARE: tl.constexpr = _MACRO_BLOCK // magnitude.shape[1]
    of_macro = block_maximum(tl.reshape(amax, (n // SHARE, SHARE)))
    factor = as_float(as_int(tl.div_rn(numbers[2][2], of_macro)) & _TOP_MANTISSA | _ONE)
    factor = tl.where(of_macro < _INF, factor, float("nan"))
    factor = tl.reshape(tl.broadcast_to(factor[:, None], (n // SHARE, SHARE)), (n,))
    power = e8m0(amax * factor, carry, offset, 0)
    mult = tl.div_rn(factor, power) * numbers[2][3]
    q = _to_grid(magnitude * mult[:, None], chunk, numbers, STOCHASTIC, UNUSUAL)
    return q, tl.div_rn(power, factor)[:, None]


@triton.jit
def _exact(magnitude, amax, numbers, UNUSUAL: tl.constexpr):
    pmin, inv_ulps, largest, _ = numbers[2]
    _, scale_pmin, scale_inv_ulps, scale_max, scale_zero, _, _, _ = numbers[3]
    factor, largest = numbers[1][1].to(tl.float64), largest.to(tl.float64)
    wanted = tl.minimum(amax.to(tl.float64) / (largest * factor), scale_max.to(tl.float64))
    log_ties, up = 0, 0
    if UNUSUAL:
        i = numbers[5][1]
        log_ties, up = tl.load(i + _LOG_TIES), tl.load(i + _SCALE_UP)
    scale = round_double(wanted, scale_pmin, scale_inv_ulps, 0, up).to(tl.float32)
    scale = tl.where(scale == 0, scale_zero, scale)
    divisor = tl.maximum(scale.to(tl.float64) * factor, _TINY)
    y = tl.minimum(magnitude.to(tl.float64) / divisor[:, None], largest)
    return round_double(y, pmin, inv_ulps, log_ties, 0).to(tl.float32), scale[:, None]


@triton.jit
def _dialects(magnitude, amax, numbers, UNUSUAL: tl.constexpr):
    """Errors from how often each number of halves is in the block: 16 counters of 8 bits in two words."""
    scale, y = _scaled(magnitude, amax, numbers, UNUSUAL)
    z = ((tl.minimum(y * 2, 15.0) + _TO_INTEGER) - _TO_INTEGER).to(tl.int32)
    is_low = z < 8
    place = (z & 7) * 4
    one = tl.full(z.shape, 1, tl.int64) << (place * 2).to(tl.int64)
    low_counts, high_counts = total(tl.where(is_low, one, 0)), total(tl.where(is_low, 0, one))
    least = tl.full(amax.shape, 0x7FFFFFFF, tl.int32)
    low, high = least, least  # levels of the best dialect, for 0 to 7 halves and for 8 to 15
    for d in tl.static_range(16):
        error = tl.full(amax.shape, 0, tl.int32)
        for n in tl.static_range(16):
            if (_SQUARES >> 128 * d + 8 * n & 255) != 0:
                counts = low_counts if n < 8 else high_counts
                error += (counts >> 8 * (n % 8) & 255).to(tl.int32) * (_SQUARES >> 128 * d + 8 * n & 255)
        better = error < least
        least = tl.where(better, error, least)
        low = tl.where(better, (_NEAREST >> 64 * d & 0xFFFFFFFF ^ 0x80000000) - 0x80000000, low)
        high = tl.where(better, (_NEAREST >> 64 * d + 32 & 0xFFFFFFFF ^ 0x80000000) - 0x80000000, high)
    level = tl.where(is_low, low[:, None], high[:, None]) >> place & 15
    return level.to(tl.float32) * 0.5, scale[:, None]
