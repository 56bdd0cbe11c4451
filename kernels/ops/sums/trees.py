"""The tree of additions of `sums.lane_sum`, as Triton code.

It has n_i = ⌈n / 2^i⌉ sums after i levels, and to sum j of level i comes that of number j + n_i of the level before,
if there is one. So a leaf is found from the bits of a position in a full tree of 2^K leaves, and leaves that the full
tree has too many are -0, which no addition feels. In a power of two, a leaf's number is its position.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ABSENT = tl.constexpr(1 << 30)


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def lane_sum(x):
    """Sum of each row of x [n, B], in the order of `sums.lane_sum`: first half + second half, until one is left."""
    for _ in tl.static_range(16):  # no row is longer than 2^16
        if x.shape[1] > 1:
            x = tl.reduce(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1, plus)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def column_sum(x):
    """Sum of each column of x [B, n], as `lane_sum` of rows."""
    for _ in tl.static_range(16):
        if x.shape[0] > 1:
            x = tl.reduce(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0, plus)
    return tl.reshape(x, (x.shape[1],))


@triton.jit
def leaf(position, root, n, LEVELS: tl.constexpr):
    """Number of the leaf of `position` under sum `root` of level LEVELS over n; not below n if there is none."""
    index = position * 0 + root
    for i in tl.static_range(LEVELS):
        high = (n + (1 << (LEVELS - i)) - 1) >> (LEVELS - i)
        index += (position >> i & 1) * high
        index = tl.where(index < (n + (1 << (LEVELS - i - 1)) - 1) >> (LEVELS - i - 1), index, _ABSENT)
    return index


@triton.jit
def columns(D: tl.constexpr, LEVELS: tl.constexpr):
    """Numbers of the leaves of a row of D."""
    position = tl.arange(0, 1 << LEVELS)
    return position if D == 1 << LEVELS else leaf(position, 0, D, LEVELS)
