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

from fp4dse.kernels.quant.triton.numbers import as_int, inverse_of_power, mantissa_of, prmt, saturated, unit_of


def _as_int32(n: int) -> int:
    return (n + 2**31) % 2**32 - 2**31


_BENT, _UNIFORM = tl.constexpr(8388606.0), tl.constexpr(8388608.0)  # 2^23 - 2, 2^23
_STEEP = tl.constexpr(2.0**21)  # over a step from one float32 below 8 to the next
# their bits, eight times, 4 bits apart, as int32
_BENT_CODES, _UNIFORM_CODES = (
    tl.constexpr(_as_int32(0x4AFFFFFC * 0x11111111)),
    tl.constexpr(_as_int32(0x4B000000 * 0x11111111)),
)
_ODD_SIGNS = tl.constexpr(_as_int32(0x80808080))


@triton.jit
def halves(x):
    """Elements of even and of odd number along the last axis."""
    SHAPE: tl.constexpr = (x.shape[0], x.shape[1] // 2, 2)
    return tl.split(tl.reshape(x, SHAPE))


@triton.jit
def nearest_codes(y, signs, usable, element):
    """Codes of magnitudes y [n, B] >= 0 in units of their scales, 8 a word: int32 [n, B / 8].

    signs: their bits of the codes, likewise. usable: [n]; the others get zeros.
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
    word = low + high * 65536 - tl.where(bent, _BENT_CODES, _UNIFORM_CODES) + signs
    return tl.where(usable[:, None], word, 0)


@triton.jit
def signs_of(x, B: tl.constexpr, COLUMNS: tl.constexpr):
    """The sign bits of the codes of a tile x, as `tile` gives it, 8 codes a word: int32 [n, B / 8]."""
    if x.dtype == tl.int32:
        if COLUMNS:
            HALF: tl.constexpr = x.shape[0]
            COUNT: tl.constexpr = x.shape[1] // B
            even, odd = halves(tl.reshape(x, (HALF * COUNT, B)))
            even_first, even_second = _gathered(even)
            odd_first, odd_second = _gathered(odd)
            signs = tl.join(_merged(even_first, odd_first), _merged(even_second, odd_second))
            signs = tl.permute(tl.reshape(signs, (HALF, COUNT, B // 8, 2)), (0, 3, 1, 2))
            signs = tl.reshape(signs, (2 * HALF * COUNT, B // 8))
        else:
            even, odd = _gathered(tl.reshape(x, (x.shape[0] * x.shape[1] * 2 // B, B // 2)))
            signs = _merged(even, odd)
    else:
        even, odd = halves(as_int(tl.reshape(x, (x.shape[0] * x.shape[1] // B, B))))
        signs = _merged(_gathered(even)[1], _gathered(odd)[1])
    return signs


@triton.jit
def _gathered(word):
    """The signs of the lower and of the upper halves of four neighbours, bytes 0 or 255: [n, m] -> [n, m / 4] each."""
    a, b = halves(word)
    a, b = halves(prmt(a, b, 0xFBD9))
    return prmt(a, b, 0x5410), prmt(a, b, 0x7632)


@triton.jit
def _merged(even, odd):
    return odd & _ODD_SIGNS | even & 0x08080808


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
