"""Weights rounded to BF16 at the speed of memory, lane by lane."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid

_TILE = 4096
"""Numbers of a program."""


@triton.jit
def _rounded_kernel(x_ptr, out_ptr, n, apart, TILE: tl.constexpr):
    """x: float32 [L, n], lanes `apart` from one another; out: bfloat16 [L, n]."""
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + lane * apart + at, at < n, 0.0)
    tl.store(out_ptr + lane * n + at, x.to(tl.bfloat16), at < n)


def rounded(x: Tensor, out: Tensor) -> Tensor:
    """x, float32 [L, …] with each lane in one piece, written to `out`, bfloat16 in one piece."""
    n = x[0].numel()
    _rounded_kernel[launch_grid(triton.cdiv(n, _TILE), len(x))](x, out, n, x.stride(0), TILE=_TILE, num_warps=8)
    return out
