"""The largest magnitude of each lane by a kernel that reads it at the speed of memory.

Magnitudes are compared as integers, in whose order a NaN is the largest, so that it is found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid

_TILE = 8192
"""Numbers of a program."""


@triton.jit
def higher(a, b):
    """The larger of two integers."""
    return tl.maximum(a, b)


@triton.jit
def _max_abs_kernel(x_ptr, out_ptr, n, TILE: tl.constexpr):
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    magnitude = tl.load(x_ptr + lane * n + at, at < n, 0) & 0x7FFFFFFF
    tl.store(out_ptr + lane * tl.num_programs(0) + tl.program_id(0), tl.reduce(magnitude, 0, higher))


def max_abs(x: Tensor) -> Tensor:
    """`max_abs` of float32 x [L, P]."""
    lanes, n = x.shape
    parts = triton.cdiv(n, _TILE)
    out = x.new_empty(lanes, parts)
    bits = x.contiguous().view(torch.int32), out.view(torch.int32)
    _max_abs_kernel[launch_grid(parts, lanes)](*bits, n, TILE=_TILE, num_warps=8)
    return out.amax(1)
