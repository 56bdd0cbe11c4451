"""4-bit codes and scale codes of blocks on a GPU, as `packed.py` lays them out.

Where every lane rounds elements to nearest even, a code is the integer part of a sum, so that the units for integers
rest. With d the grid's step near zero, y >= 0, and sat(·) a clamp to [0, 1] that costs nothing:

    uniform grid, largest code 7:   RN(8 sat(y / 8d) + 2^23) - [y >= 7.5d]
    E2M1:                           RN(RN(4 sat(y / 8d) + 2^23 - 2) + sat(y / 4d - 2))

Above 2^23 float32 has the integers, below it the halves too: the first sum of E2M1 rounds to d up to y = 4d and to 2d
up to 8d, and its bits count codes through that power of two; the second rounds to 4d. All sums begin at an even code,
so that ties go to even ones. Scaling by d is exact, so that each line rounds as often as it has an RN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.fused.numbers import as_float, as_int, inverse_of_power, mantissa_of, prmt, saturated, unit_of

_BENT, _UNIFORM = tl.constexpr(8388606.0), tl.constexpr(8388608.0)  # 2^23 - 2, 2^23
_STEEP = tl.constexpr(2.0**21)  # over a step from one float32 below 8 to the next
_NIBBLES = tl.constexpr(0x11111111)
_SIGNS = tl.constexpr(-0x77777778)  # 0x88888888


@triton.jit
def halves(x):
    """Elements of even and of odd number along the last axis."""
    SHAPE: tl.constexpr = (x.shape[0], x.shape[1] // 2, 2)
    return tl.split(tl.reshape(x, SHAPE))


@triton.jit
def nearest_codes(x, y, usable, element):
    """Codes of blocks x [n, B] float32 with magnitudes y >= 0 in units of their scales: int32 [n, B / 8], 8 a word.

    usable: [n]; the others get zeros.
    """
    pmin, inv_ulps, largest, _ = element
    per_step = inverse_of_power(pmin * inv_ulps)
    bent = largest * per_step > 8
    rise, base = tl.where(bent, 4.0, 8.0), tl.where(bent, _BENT, _UNIFORM)
    slope = per_step * tl.where(bent, 0.25, _STEEP)
    offset, last = tl.where(bent, -2.0, 1 - 7.5 * _STEEP), tl.where(bent, 1.0, -1.0)
    t = tl.fma(saturated(y, per_step * 0.125, 0.0), rise, base)
    t = as_int(tl.fma(saturated(y, slope, offset), last, t))
    low, high = halves(t)
    low, high = halves(low + high * 16)
    low, high = halves(low + high * 256)
    word = low + high * 65536 - as_int(base) * _NIBBLES
    even, odd = halves(as_int(x))
    word += (_sign_bytes(odd) & -0x0F0F0F10 | _sign_bytes(even) & 0x0F0F0F0F) & _SIGNS
    return tl.where(usable[:, None], word, 0)


@triton.jit
def _sign_bytes(x):
    """Four neighbours a word, a byte each, that is 0 or 255: int32 [n, m] -> [n, m / 4]."""
    a, b = halves(x)
    a, b = halves(prmt(a, b, 0xFB))
    return prmt(a, b, 0x5410)


@triton.jit
def codes_of(x, q, scale, element):
    """4-bit codes, two a byte, int32 [n, B/2], of what `quantized` returns for x."""
    usable = scale == scale
    mantissa = mantissa_of(element[1])
    # codes as the upper bits of numbers, multiplied to their place in the uppermost byte
    unit = tl.where(usable, unit_of(element[0]), 0.0)
    low, high = halves(as_int(q * unit[:, None]))
    byte = low * (2 << mantissa) + high * (32 << mantissa)
    low, high = halves(as_int(x))
    sign = tl.where(usable, -0x80000000, 0)[:, None]
    byte = byte | high & sign | low >> 4 & (sign >> 4 & 1 << 27)
    return byte >> 24


@triton.jit
def scale_codes(scale, usual):
    """Codes of scales [n], int32."""
    usable = scale == scale
    if usual[0] > 0:
        of_scale, shift = unit_of(usual[1]), 23 - mantissa_of(usual[2])
        stored = tl.where(usable, as_int(scale * of_scale) >> shift, (as_int(usual[3] * of_scale) >> shift) + 1)
    else:
        stored = tl.where(usable, as_int(scale) >> 23, 255)
    return stored
