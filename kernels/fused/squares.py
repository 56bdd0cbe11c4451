"""Quantizing 2-D tiles where they lie: [L, R, C] read once and written once, in its own order.

Through `blocks.cut` and `join` a weight is copied twice more than it is quantized. A program takes E rows, of which a
run of columns is several tiles. The transposed operand is the same tensor seen the other way, since a tile's scale does
not care; only what depends on the order of a tile's elements does (`operators.why_not_squares`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.arithmetic.philox import STREAMS
from fp4dse.kernels.fused.blocks import decoded, numbers_of, quantized
from fp4dse.kernels.fused.launch import flags

_COLUMNS = 128
"""At most, of a program. No tile is cut: with masks for the columns beyond the end, Triton 3.6 wrote some of them."""


@triton.jit
def _kernel(
    x_ptr,
    out_ptr,
    dec_ptr,
    floats_ptr,
    ints_ptr,
    amax_ptr,
    rows,
    width,
    stride,
    seeds_ptr,
    step_ptr,
    stream,
    E: tl.constexpr,
    W: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """E rows and W columns of a lane; stride: from lane to lane of x."""
    lane = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * E + tl.arange(0, E)
    column = tl.program_id(0) * W + tl.arange(0, W)
    numbers = numbers_of(lane, floats_ptr, ints_ptr, amax_ptr, seeds_ptr, step_ptr, stream, 0, TENSOR_SCALE, "block")
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(dec_ptr + lane, numbers[6])
    at = row[:, None] * width + column[None, :]
    x = tl.load(x_ptr + lane * stride + at).to(tl.float32)
    x = tl.permute(tl.reshape(x, (E, W // E, E)), (1, 0, 2))
    x = tl.reshape(x, (W // E, E * E))
    chunk = tl.arange(0, W * E // 16)
    q, scale = quantized(x, chunk, numbers, False, False, ADAPTIVE, UNUSUAL)
    out = tl.reshape(decoded(x, q, scale), (W // E, E, E))
    out = tl.reshape(tl.permute(out, (1, 0, 2)), (E, W))
    tl.store(out_ptr + lane * rows * width + at, out.to(out_ptr.dtype.element_ty))


def squares(
    x: Tensor,
    edge: int,
    floats: Tensor,
    ints: Tensor,
    features: tuple[bool, ...],
    seeds: Tensor,
    step: Tensor,
    amax: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """x [L, R, C], whose lanes may lie apart, as `dtype` and its decode factors float32 [L].

    floats, ints, features: tables of the lanes. amax: float32 [L] tensor maxima, where some lane has a tensor scale.
    """
    lanes, rows, width = x.shape
    out, dec = x.new_empty(x.shape, dtype=dtype), x.new_empty(lanes, dtype=torch.float32)
    columns = math.gcd(width, _COLUMNS)
    grid = width // columns, rows // edge, lanes
    tables = floats, ints, dec if amax is None else amax.contiguous()
    compiled = flags(features)
    del compiled["STOCHASTIC"]
    sizes = rows, width, x.stride(0), seeds, step, STREAMS["rounding"]
    _kernel[grid](x, out, dec, *tables, *sizes, E=edge, W=columns, **compiled, num_warps=4, enable_fp_fusion=False)
    return out, dec
