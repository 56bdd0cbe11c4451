"""Operands that are one block: elements in BF16, which holds them, and scale times decode factor as a number a lane.

The operand that the reference gives to a product is element × scale, which with a scale of FP32 is rounded to FP32 and
needs products of FP32 numbers. Where the scale is the same all over, it may as well multiply the product, and matrix
units take the elements. These are the reference's bits, and so are scale and factor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import is_large, launch_grid
from fp4dse.kernels.ops.philox import STREAMS
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.triton.blocks import block_scales, numbers_of, rounded
from fp4dse.kernels.quant.triton.launch import flags, tensor_maxima
from fp4dse.kernels.quant.triton.numbers import as_float, as_int

_TILE = 2048


@triton.jit
def one_scale(lane, amax_ptr, numbers, UNUSUAL: tl.constexpr):
    """Multiplier of a lane's elements, and what the product is multiplied by, NaN where the operand is unusable.

    amax: maxima of the operands, float32 [L]. numbers: from `blocks.numbers_of`.
    """
    inv_val_max, tensor, element, usual, _, row, dec = numbers
    amax = tl.load(amax_ptr + lane)
    scale, mult = block_scales(amax, inv_val_max, tensor, usual, row, UNUSUAL)
    return mult * element[3], tl.where(amax < tensor[2], scale, float("nan")) * dec


@triton.jit
def elements_of(x, chunk, mult, numbers, STOCHASTIC: tl.constexpr, UNUSUAL: tl.constexpr):
    """Elements, float32, of x [n, 16], runs of the operand; chunk: their numbers in the lane, [n]."""
    _, _, element, _, draws, row, _ = numbers
    pmin, inv_ulps, largest, _ = element
    y = tl.minimum(tl.abs(x) * mult, largest)  # no NaN: the factor has it
    q = rounded(y, chunk, pmin, inv_ulps, draws, row[1], STOCHASTIC, UNUSUAL)
    return as_float(as_int(q) | (as_int(x) & -0x80000000))


@triton.jit(do_not_specialize=["site", "stream"])
def of_tensor_kernel(
    x_ptr,
    out_ptr,
    factor_ptr,
    amax_ptr,
    floats_ptr,
    ints_ptr,
    tensor_amax_ptr,
    site,
    elements,
    seeds_ptr,
    step_ptr,
    stream,
    TILE: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    UNUSUAL: tl.constexpr,
    LARGE: tl.constexpr,
):
    """One tile of a lane's operand x [L, elements], float32 or bfloat16. LARGE: see ops/launching.py."""
    lane = tl.program_id(1).to(tl.int64)
    given = lane, floats_ptr, ints_ptr, tensor_amax_ptr, seeds_ptr, step_ptr, stream, site
    numbers = numbers_of(*given, TENSOR_SCALE, "block")
    mult, factor = one_scale(lane, amax_ptr, numbers, UNUSUAL)
    if tl.program_id(0) == 0:
        tl.store(factor_ptr + lane, factor)
    chunk = tl.program_id(0) * (TILE // 16) + tl.arange(0, TILE // 16)
    at = (chunk.to(tl.int64) if LARGE else chunk)[:, None] * 16 + tl.arange(0, 16)[None, :]
    x = tl.load(x_ptr + lane * elements + at, at < elements, 0.0).to(tl.float32)
    q = elements_of(x, chunk, mult, numbers, STOCHASTIC, UNUSUAL)
    tl.store(out_ptr + lane * elements + at, q.to(tl.bfloat16), at < elements)


def of_tensor(x: Tensor, call: Call) -> tuple[Tensor, Tensor]:
    """Elements, bfloat16 of x's shape, and factors, float32 [L], of lanes that are a block each.

    x: float32 or bfloat16 [L, R, C].
    call: of codec `block`; `tensor_amax` where scales follow other maxima than those of x.
    """
    x = x.contiguous()
    lanes, elements = len(x), x[0].numel()
    amax = tensor_maxima(x)
    out, factor = torch.empty_like(x, dtype=torch.bfloat16), torch.empty_like(amax)
    pointers = x, out, factor, amax, call.floats, call.ints, amax if call.tensor_amax is None else call.tensor_amax
    compiled = flags(call.features) | {"TILE": _TILE, "LARGE": is_large(elements)}
    del compiled["ADAPTIVE"]
    numbers = call.site, elements, call.seeds, call.step, STREAMS["rounding"]
    programs = launch_grid(triton.cdiv(elements, _TILE), lanes)
    of_tensor_kernel[programs](*pointers, *numbers, **compiled, num_warps=4, enable_fp_fusion=False)
    return out, factor
