"""The butterfly of the definition as Triton code."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hadamard(x, N: tl.constexpr):
    """`rotation.hadamard` of each row, without its factor: float32 [n, N], strides 1, 2, 4 …"""
    for k in tl.static_range(10):
        if 1 << k < N:
            pairs = tl.reshape(x, (x.shape[0], N // (2 << k), 2, 1 << k))
            a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
            x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (x.shape[0], N))
    return x
