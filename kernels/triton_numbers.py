"""The arithmetic of the fused kernels: rounding and random numbers with the reference's bits, in fewer operations.

    to nearest   with C = 1.5 · 2^23 grid steps, (y + C) - C is y rounded to nearest even on the grid of its binade
    by threshold half a step lower, the same gives the grid point below y; y - threshold >= below decides. Where y is
                 on the grid, either neighbour may come out as `below`: the threshold, in (0, 1), mends it
    fma          only where the product is exact, so that it equals the two operations; the compiler may fuse none
    draws        the upper bits of a 16-bit draw become the end of a float32

Formats have at most 18 mantissa bits, and 2^24 times their largest value is a float32; others: `round_wide`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ALL = tl.constexpr(tl.PropagateNan.ALL)
_FLT_MIN = tl.constexpr(2.0**-126)
_EXPONENT = tl.constexpr(0x7F800000)
_HALF_RANGE = tl.constexpr(0x7F000000)  # see reference.py
_TO_INTEGER = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding it leaves integers, ties to even, on both sides of zero
_M0, _M1 = tl.constexpr(0xD2511F53), tl.constexpr(0xCD9E8D57)  # Philox, as in philox.py
_W0, _W1 = tl.constexpr(0x9E3779B9), tl.constexpr(0xBB67AE85)


@triton.jit
def as_float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def as_int(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def inverse_of_power(x):
    return as_float(-as_int(x) + _HALF_RANGE)


@triton.jit
def smaller(a, b):
    """The smaller of two numbers, NaN if one is."""
    return tl.minimum(a, b, propagate_nan=_ALL)


@triton.jit
def binade_of(y, pmin):
    """The power of two below y, at least pmin."""
    return tl.maximum(as_float(as_int(y) & _EXPONENT), pmin)


@triton.jit
def nearest(y, pmin, inv_ulps):
    """y >= 0 to the nearest number of a grid with 1/inv_ulps steps a binade, ties to even."""
    binade = binade_of(y, pmin)
    magic = inv_ulps * _TO_INTEGER
    return tl.fma(binade, -magic, tl.fma(binade, magic, y))


@triton.jit
def up_from(y, pmin, inv_ulps, threshold):
    """y >= 0 to the grid, up from the position between two grid points that `threshold` is, else down.

    threshold: minus the position, in (0, 1), times inv_ulps, which makes it a part of the binade.
    """
    binade = binade_of(y, pmin)
    magic = inv_ulps * _TO_INTEGER
    below = tl.fma(binade, -magic, tl.fma(binade, magic, tl.fma(binade, inv_ulps * -0.5, y)))
    up = tl.fma(binade, threshold, y) >= below
    return tl.fma(binade, tl.where(up, inv_ulps, 0.0), below)


@triton.jit
def philox(index, seed, stream, step, site):
    """Philox 4×32-10 of counters (index, step, site, 0) and key (seed, stream): four uint32 of index's shape.

    The first two rounds are scalar in half of the state; there seed and step count with all their 64 bits, as in
    philox.py.
    """
    seed, step, site = seed.to(tl.uint64), step.to(tl.uint64), site.to(tl.uint64)
    k0, k1 = seed.to(tl.uint32) + _W0, stream.to(tl.uint32) + _W1
    p0, p1 = index.to(tl.uint32).to(tl.uint64) * _M0, site * _M1
    q0 = ((p1 >> 32) ^ step ^ seed) * _M0
    q1 = ((p0 >> 32).to(tl.uint32) ^ stream.to(tl.uint32)).to(tl.uint64) * _M1
    c0, c1 = (q1 >> 32).to(tl.uint32) ^ (p1.to(tl.uint32) ^ k0), q1.to(tl.uint32)
    c2, c3 = p0.to(tl.uint32) ^ ((q0 >> 32).to(tl.uint32) ^ k1), q0.to(tl.uint32) | tl.full(c0.shape, 0, tl.uint32)
    for _ in tl.static_range(8):
        k0, k1 = k0 + _W0, k1 + _W1
        p0, p1 = c0.to(tl.uint64) * _M0, c2.to(tl.uint64) * _M1
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def thresholds(block, shift, inv_ulps, key, B: tl.constexpr):
    """-(1 - (2r+1) / 2^(b+1)) · inv_ulps for b = 16 - shift bits r, float32 [n, B]. block: numbers in the lane, [n].

    The inverted bits r' are the end of the float32 128 + r' / 2^b, from which 128 - 2^-(b+1) is taken. Eight
    consecutive elements share a counter and stay in the thread that computes it.
    """
    seed, stream, step, site = key
    index = block[:, None] * (B // 8) + tl.arange(0, B // 8)[None, :]
    c0, c1, c2, c3 = philox(index, seed, stream, step, site)
    words = tl.join(tl.join(c0, c2), tl.join(c1, c3))  # [n, B/8, 2, 2]: words 0, 1, 2, 3 in order
    draws = tl.join(words, words >> 16).to(tl.int32, bitcast=True)
    draws = tl.reshape(draws, (block.shape[0], B))
    kept = 0x10000 - (1 << shift)
    base = 128.0 - as_float((shift << 23) + 0x37000000)  # 128 - 2^(shift - 17)
    return tl.fma(as_float((draws & kept) ^ (kept + 0x43000000)), -inv_ulps, base * inv_ulps)


@triton.jit
def round_wide(y, pmin, ulps, up):
    """Round y >= 0 to a scale format of any range and precision, to nearest even, or up where `up`; as round_scale."""
    binade = binade_of(y, pmin)
    t = y * inverse_of_power(binade) * ulps
    even = tl.where(t < 8388608.0, (t + 8388608.0) - 8388608.0, t)
    low = tl.where(even > t, even - 1.0, even)
    above = tl.where(t - low >= _FLT_MIN, low + 1.0, low)
    return tl.where(up > 0, above, even) * (binade * inverse_of_power(ulps))
