"""Quantizing 2-D tiles where they lie: [L, R, C] read once and written once, in its own order.

Through `blocks.cut` and `join` a weight is copied twice more than it is quantized. A program takes E rows, of which a
run of columns is several tiles. The transposed operand is the same tensor seen the other way, since a tile's scale does
not care; only what depends on the order of a tile's elements does (`limits.why_not_squares`).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import OTHERS, is_large, launch_grid
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.triton.blocks import block_maximum, decoded, numbers_of, quantized
from fp4dse.kernels.quant.triton.launch import flags

_COLUMNS = 64
"""At most, of a program, which is one warp: a tile's maximum then needs no shared memory. With four warps, and tiles
cut out of rows by reshaping, what Triton 3.6 compiled gave other numbers from run to run."""


@triton.jit
def squares_kernel(
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
    LARGE: tl.constexpr,
):
    """E rows and W columns of a lane, a tile after the other; stride: from lane to lane of x. LARGE: see
    launching.py."""
    lane = tl.program_id(2).to(tl.int64)
    numbers = numbers_of(lane, floats_ptr, ints_ptr, amax_ptr, seeds_ptr, step_ptr, stream, 0, TENSOR_SCALE, "block")
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.store(dec_ptr + lane, numbers[6])
    of_tile = tl.arange(0, E * E)
    DOWN: tl.constexpr = 0 if LARGE else 1
    down = tl.program_id(DOWN).to(tl.int64) if LARGE else tl.program_id(DOWN)
    row = down * E + of_tile // E
    column = tl.program_id(1 - DOWN) * W + (tl.arange(0, W // E) * E)[:, None] + (of_tile % E)[None, :]
    at = row[None, :] * width + column  # [W / E, E · E]
    x = tl.load(x_ptr + lane * stride + at).to(tl.float32)
    q, scale = quantized(
        x, block_maximum(tl.abs(x)), tl.arange(0, W * E // 16), numbers, False, False, ADAPTIVE, UNUSUAL
    )
    tl.store(out_ptr + lane * rows * width + at, decoded(x, q, scale).to(out_ptr.dtype.element_ty))


def squares(x: Tensor, call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [L, R, C], whose lanes may lie apart, in tiles of call.block², as `dtype` and its decode factors float32 [L].

    call: with the maxima where some lane has a tensor scale; what `limits.why_not_squares` lets pass.
    """
    lanes, rows, width = x.shape
    out, dec = x.new_empty(x.shape, dtype=dtype), x.new_empty(lanes, dtype=torch.float32)
    columns = math.gcd(width, _COLUMNS)
    across, down = width // columns, rows // call.block
    large = is_large(rows * width) or down > OTHERS
    tables = call.floats, call.ints, dec if call.tensor_amax is None else call.tensor_amax.contiguous()
    compiled = flags(call.features) | {"E": call.block, "W": columns, "LARGE": large}
    del compiled["STOCHASTIC"]
    sizes = rows, width, x.stride(0), call.seeds, call.step, STREAMS["rounding"]
    programs = launch_grid(down, across, lanes) if large else launch_grid(across, down, lanes)
    squares_kernel[programs](x, out, dec, *tables, *sizes, **compiled, num_warps=1, enable_fp_fusion=False)
    return out, dec
