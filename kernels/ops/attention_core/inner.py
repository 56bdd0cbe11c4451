"""Parts of the programs of the quantized attention core: what is quantized within them, and how operands are loaded.

P and dS come as tiles of FP32 numbers whose second axis is the contraction of the product, and go into it as BF16
numbers that hold element × block scale or, where the whole operand is one block, the element. They are quantized by the
functions of kernels/quant/triton, by the lane's row of the descriptor tables.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.quant.triton.blocks import block_maximum, decoded, numbers_of, quantized
from fp4dse.kernels.quant.triton.of_tensor import elements_of, one_scale

PLAIN, TENSOR = tl.constexpr(0), tl.constexpr(1)
"""In the place of a number of elements that share a scale: rounded to BF16 without one; all of the operand."""


@triton.jit
def slot_of(table, site, common, lane, B: tl.constexpr, TENSOR_SCALE: tl.constexpr, UNUSUAL: tl.constexpr):
    """The numbers by which a lane's operand is quantized, the multiplier of elements where it is one block, and what
    the product is multiplied by.

    table: pointers to floats, ints, the maxima that tensor scales follow, and those of the operand. common: pointers to
    seeds and step, and the stream.
    """
    floats_ptr, ints_ptr, tensor_amax_ptr, amax_ptr = table
    seeds_ptr, step_ptr, stream = common
    if B == PLAIN:
        slot = 0, 1.0, 1.0
    else:
        given = lane, floats_ptr, ints_ptr, tensor_amax_ptr, seeds_ptr, step_ptr, stream, site
        numbers = numbers_of(*given, TENSOR_SCALE, "block")
        if B == TENSOR:
            mult, factor = one_scale(lane, amax_ptr, numbers, UNUSUAL)
            slot = numbers, mult, factor
        else:
            slot = numbers, 1.0, numbers[6]
    return slot


@triton.jit
def quantized_tile(
    x, chunk, slot, B: tl.constexpr, STOCHASTIC: tl.constexpr, ADAPTIVE: tl.constexpr, UNUSUAL: tl.constexpr
):
    """x [R, C] as the product takes it, bfloat16. chunk: numbers in the lane of its runs of 16, int32 [R, C / 16]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    numbers, mult, _ = slot
    if B == PLAIN:
        out = x
    elif B == TENSOR:
        runs = tl.reshape(x, (R * C // 16, 16))
        out = elements_of(runs, tl.reshape(chunk, (R * C // 16,)), mult, numbers, STOCHASTIC, UNUSUAL)
    else:
        cut = tl.reshape(x, (R * C // B, B))
        amax = block_maximum(tl.abs(cut))
        chunk = tl.reshape(chunk, (R * C // 16,))
        q, scale = quantized(cut, amax, chunk, numbers, False, STOCHASTIC, ADAPTIVE, UNUSUAL)
        out = decoded(cut, q, scale)
    return tl.reshape(out, (R, C)).to(tl.bfloat16)


@triton.jit
def runs_of(head, rows, start, length, runs, C: tl.constexpr):
    """Numbers in the lane of the runs of 16 of a tile of C columns from `start` on. runs: of a row, padded."""
    return ((head * length + rows) * runs)[:, None] + (start // 16 + tl.arange(0, C // 16))[None, :]


@triton.jit
def load_along(operand, lane, head, along, length, SIZE: tl.constexpr, D: tl.constexpr):
    """Numbers `along` the contraction of an operand of SIZE rows: [along, D], zero where there is nothing. operand:
    pointer, and from one to the next of lanes, heads, rows, and numbers along the contraction."""
    ptr, of_lane, of_head, of_row, of_number = operand
    row, ptr = tl.arange(0, D), ptr + lane * of_lane + head.to(tl.int64) * of_head
    at = ptr + along[:, None] * of_number + row[None, :].to(tl.int64) * of_row
    return tl.load(at, (along < length)[:, None] & (row < SIZE)[None, :], 0.0)


@triton.jit
def scores_of(a, b, factor, queries, keys, length, CAUSAL: tl.constexpr):
    """a bᵀ · factor, -inf where the query does not see the key. queries, keys: their numbers, as they lie along the two
    sides."""
    seen = keys <= queries if CAUSAL else keys < length  # of queries that exist, no key beyond the end
    return tl.where(seen, tl.dot(a, tl.trans(b)) * factor, float("-inf"))


@triton.jit
def base_2(factor_q_ptr, factor_k_ptr, lane, FACTOR: tl.constexpr):
    """The factor of a lane's scores in base 2."""
    return tl.load(factor_q_ptr + lane) * tl.load(factor_k_ptr + lane) * FACTOR


@triton.jit
def place_of(length, heads, ROWS: tl.constexpr, BACKWARD: tl.constexpr):
    """Matrix, lane, number of the matrix in the lane, block of ROWS rows of a program. BACKWARD: last ones first."""
    blocks = (length + ROWS - 1) // ROWS
    matrix, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if BACKWARD:
        block = blocks - 1 - block  # those that see most begin first
    return matrix.to(tl.int64), (matrix // heads).to(tl.int64), matrix % heads, block
