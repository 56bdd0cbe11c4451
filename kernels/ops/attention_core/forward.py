"""The programs of the forward pass of the quantized attention core: what each computes, and in which order, says
triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.attention.kernels import higher_of, load_rows, plus, store_rows
from fp4dse.kernels.ops.attention_core.inner import (
    base_2,
    load_along,
    place_of,
    quantized_tile,
    runs_of,
    scores_of,
    slot_of,
)


@triton.jit
def statistics_kernel(
    q_ptr,
    k_ptr,
    factor_q_ptr,
    factor_k_ptr,
    m_ptr,
    inverse_ptr,
    length,
    heads,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Maxima m of the scores of a block of queries and inverse sums of 2^(s - m), float32 [N, length]. q, k: bfloat16
    [N, length, WIDTH] and factors [L]; heads: matrices of a lane."""
    matrix, lane, _, block = place_of(length, heads, QUERIES, CAUSAL)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    begin = matrix * length * WIDTH
    q = load_rows(q_ptr + begin, rows, length, WIDTH, D, True)
    factor = base_2(factor_q_ptr, factor_k_ptr, lane, FACTOR)
    m = tl.full((QUERIES,), float("-inf"), tl.float32)
    total = tl.full((QUERIES,), 0.0, tl.float32)
    last = tl.minimum(length, (block + 1) * QUERIES) if CAUSAL else length
    for start in range(0, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr + begin, keys, length, WIDTH, D, True)
        s = scores_of(q, k, factor, rows[:, None], keys[None, :], length, CAUSAL)
        higher = tl.maximum(m, tl.reduce(s, 1, higher_of))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(m - base) + tl.reduce(tl.exp2(s - base[:, None]), 1, plus)
        m = higher
    tl.store(m_ptr + matrix * length + rows, m, rows < length)
    tl.store(inverse_ptr + matrix * length + rows, 1.0 / total, rows < length)


@triton.jit(do_not_specialize=["site", "stream"])
def outputs_kernel(
    q_ptr,
    k_ptr,
    factor_q_ptr,
    factor_k_ptr,
    m_ptr,
    inverse_ptr,
    v_ptr,
    v_lane,
    v_head,
    v_row,
    v_number,
    factor_v_ptr,
    out_ptr,
    floats_ptr,
    ints_ptr,
    tensor_amax_ptr,
    amax_ptr,
    site,
    runs,
    seeds_ptr,
    step_ptr,
    stream,
    length,
    heads,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    NORMALIZED: tl.constexpr,
    B: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """o of a block of queries. v: an operand along the keys, see `load_along`; out: [N, length, SIZE]; runs: of 16
    numbers in a row of P, padded; the rest as in `statistics_kernel` and `slot_of`."""
    matrix, lane, head, block = place_of(length, heads, QUERIES, CAUSAL)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    begin, row = matrix * length * WIDTH, matrix * length + rows
    q = load_rows(q_ptr + begin, rows, length, WIDTH, D, True)
    m = tl.load(m_ptr + row, rows < length, 0.0)
    inverse = tl.load(inverse_ptr + row, rows < length, 0.0)
    factor = base_2(factor_q_ptr, factor_k_ptr, lane, FACTOR)
    table, common = (floats_ptr, ints_ptr, tensor_amax_ptr, amax_ptr), (seeds_ptr, step_ptr, stream)
    slot = slot_of(table, site, common, lane, B, TENSOR_SCALE, UNUSUAL)
    v_operand = v_ptr, v_lane, v_head, v_row, v_number
    out = tl.full((QUERIES, D), 0.0, tl.float32)
    last = tl.minimum(length, (block + 1) * QUERIES) if CAUSAL else length
    for start in range(0, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr + begin, keys, length, WIDTH, D, True)
        v = load_along(v_operand, lane, head, keys, length, SIZE, D)
        p = tl.exp2(scores_of(q, k, factor, rows[:, None], keys[None, :], length, CAUSAL) - m[:, None])
        if NORMALIZED:
            p = p * inverse[:, None]
        chunk = runs_of(head, rows, start, length, runs, KEYS)
        out = tl.dot(quantized_tile(p, chunk, slot, B, STOCHASTIC, ADAPTIVE, UNUSUAL), v, out)
    out = out * slot[2] * tl.load(factor_v_ptr + lane)
    if not NORMALIZED:
        out = out * inverse[:, None]
    store_rows(out_ptr + matrix * length * SIZE, out, rows, length, SIZE, D)
