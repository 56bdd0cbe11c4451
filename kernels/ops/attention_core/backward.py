"""The programs of the backward pass of the quantized attention core: what each computes, and in which order, says
triton.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.attention.kernels import load_rows, store_rows
from fp4dse.kernels.ops.attention_core.inner import (
    base_2,
    load_along,
    place_of,
    quantized_tile,
    runs_of,
    scores_of,
    slot_of,
)
from fp4dse.kernels.quant.triton.blocks import block_maximum, larger


@triton.jit
def _gradient(p, g, v, mean, factor):
    """dS = P ∘ (g vᵀ · factor - mean); or transposed, of v and g and a mean along the other axis."""
    return p * (tl.dot(g, tl.trans(v)) * factor - mean)


@triton.jit
def maxima_kernel(
    q_ptr,
    k_ptr,
    factor_q_ptr,
    factor_k_ptr,
    m_ptr,
    inverse_ptr,
    g_ptr,
    v_ptr,
    factor_g_ptr,
    factor_v_ptr,
    mean_ptr,
    out_ptr,
    length,
    heads,
    FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
    OTHER: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """max |dS| of a block of queries, float32 [programs], NaN if one is. g, v: bfloat16 [N, length, OTHER], and factors
    [L]; mean: rowsum(do ∘ o), float32 [N, length]; the rest as in `statistics_kernel`."""
    matrix, lane, _, block = place_of(length, heads, QUERIES, CAUSAL)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    begin, other, row = matrix * length * WIDTH, matrix * length * OTHER, matrix * length + rows
    q = load_rows(q_ptr + begin, rows, length, WIDTH, D, True)
    g = load_rows(g_ptr + other, rows, length, OTHER, D, True)
    m = tl.load(m_ptr + row, rows < length, 0.0)
    inverse = tl.load(inverse_ptr + row, rows < length, 0.0)
    mean = tl.load(mean_ptr + row, rows < length, 0.0)
    factor = base_2(factor_q_ptr, factor_k_ptr, lane, FACTOR)
    factor_dp = tl.load(factor_g_ptr + lane) * tl.load(factor_v_ptr + lane)
    amax = tl.full((QUERIES,), 0.0, tl.float32)
    last = tl.minimum(length, (block + 1) * QUERIES) if CAUSAL else length
    for start in range(0, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr + begin, keys, length, WIDTH, D, True)
        v = load_rows(v_ptr + other, keys, length, OTHER, D, True)
        s = scores_of(q, k, factor, rows[:, None], keys[None, :], length, CAUSAL)
        p = tl.exp2(s - m[:, None]) * inverse[:, None]
        amax = larger(amax, block_maximum(tl.abs(_gradient(p, g, v, mean[:, None], factor_dp))))
    tl.store(out_ptr + tl.program_id(0) + tl.arange(0, 1), block_maximum(tl.reshape(amax, (1, QUERIES))))


@triton.jit(do_not_specialize=["site_1", "site_2", "stream"])
def keys_kernel(
    q_ptr,
    k_ptr,
    factor_q_ptr,
    factor_k_ptr,
    m_ptr,
    inverse_ptr,
    g_ptr,
    v_ptr,
    factor_g_ptr,
    factor_v_ptr,
    mean_ptr,
    first_ptr,
    first_lane,
    first_head,
    first_row,
    first_number,
    factor_first_ptr,
    second_ptr,
    second_lane,
    second_head,
    second_row,
    second_number,
    factor_second_ptr,
    dk_ptr,
    dv_ptr,
    floats_ptr_1,
    ints_ptr_1,
    tensor_amax_ptr_1,
    amax_ptr_1,
    site_1,
    runs_1,
    floats_ptr_2,
    ints_ptr_2,
    tensor_amax_ptr_2,
    amax_ptr_2,
    site_2,
    runs_2,
    seeds_ptr,
    step_ptr,
    stream,
    length,
    heads,
    FACTOR: tl.constexpr,
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    OTHER: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    B_1: tl.constexpr,
    TENSOR_SCALE_1: tl.constexpr,
    STOCHASTIC_1: tl.constexpr,
    ADAPTIVE_1: tl.constexpr,
    UNUSUAL_1: tl.constexpr,
    B_2: tl.constexpr,
    TENSOR_SCALE_2: tl.constexpr,
    STOCHASTIC_2: tl.constexpr,
    ADAPTIVE_2: tl.constexpr,
    UNUSUAL_2: tl.constexpr,
):
    """dv and dk of a block of keys: Pᵀ times the first operand, do along the queries, and dSᵀ times the second, q along
    the queries; tiles are made transposed. Arguments as in the kernels above; 1 is the slot of P, 2 that of dS."""
    matrix, lane, head, block = place_of(length, heads, KEYS, False)
    keys = block * KEYS + tl.arange(0, KEYS)
    begin, other, row = matrix * length * WIDTH, matrix * length * OTHER, matrix * length
    k = load_rows(k_ptr + begin, keys, length, WIDTH, D, True)
    v = load_rows(v_ptr + other, keys, length, OTHER, D, True)
    factor = base_2(factor_q_ptr, factor_k_ptr, lane, FACTOR)
    factor_dp = tl.load(factor_g_ptr + lane) * tl.load(factor_v_ptr + lane)
    common = seeds_ptr, step_ptr, stream
    table_1 = floats_ptr_1, ints_ptr_1, tensor_amax_ptr_1, amax_ptr_1
    table_2 = floats_ptr_2, ints_ptr_2, tensor_amax_ptr_2, amax_ptr_2
    slot_1 = slot_of(table_1, site_1, common, lane, B_1, TENSOR_SCALE_1, UNUSUAL_1)
    slot_2 = slot_of(table_2, site_2, common, lane, B_2, TENSOR_SCALE_2, UNUSUAL_2)
    first = first_ptr, first_lane, first_head, first_row, first_number
    second = second_ptr, second_lane, second_head, second_row, second_number
    dk, dv = tl.full((KEYS, D), 0.0, tl.float32), tl.full((KEYS, D), 0.0, tl.float32)
    for start in range(block * KEYS // QUERIES * QUERIES if CAUSAL else 0, length, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        q = load_rows(q_ptr + begin, rows, length, WIDTH, D, True)
        g = load_rows(g_ptr + other, rows, length, OTHER, D, True)
        m = tl.load(m_ptr + row + rows, rows < length, 0.0)
        inverse = tl.load(inverse_ptr + row + rows, rows < length, 0.0)
        mean = tl.load(mean_ptr + row + rows, rows < length, 0.0)
        s = scores_of(k, q, factor, rows[None, :], keys[:, None], length, CAUSAL)
        p = tl.exp2(s - m[None, :]) * inverse[None, :]
        chunk_1 = runs_of(head, keys, start, length, runs_1, QUERIES)
        p_quantized = quantized_tile(p, chunk_1, slot_1, B_1, STOCHASTIC_1, ADAPTIVE_1, UNUSUAL_1)
        dv = tl.dot(p_quantized, load_along(first, lane, head, rows, length, SIZE, D), dv)
        ds = _gradient(p, v, g, mean[None, :], factor_dp)
        chunk_2 = runs_of(head, keys, start, length, runs_2, QUERIES)
        ds_quantized = quantized_tile(ds, chunk_2, slot_2, B_2, STOCHASTIC_2, ADAPTIVE_2, UNUSUAL_2)
        dk = tl.dot(ds_quantized, load_along(second, lane, head, rows, length, SIZE, D), dk)
    dv = dv * slot_1[2] * tl.load(factor_first_ptr + lane)
    dk = dk * slot_2[2] * tl.load(factor_second_ptr + lane) * SCALE
    store_rows(dv_ptr + matrix * length * SIZE, dv, keys, length, SIZE, D)
    store_rows(dk_ptr + matrix * length * SIZE, dk, keys, length, SIZE, D)


@triton.jit(do_not_specialize=["site", "stream"])
def queries_kernel(
    q_ptr,
    k_ptr,
    factor_q_ptr,
    factor_k_ptr,
    m_ptr,
    inverse_ptr,
    g_ptr,
    v_ptr,
    factor_g_ptr,
    factor_v_ptr,
    mean_ptr,
    other_ptr,
    other_lane,
    other_head,
    other_row,
    other_number,
    factor_other_ptr,
    dq_ptr,
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
    SCALE: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    OTHER: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    B: tl.constexpr,
    TENSOR_SCALE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
):
    """dq of a block of queries: dS times the other operand, k along the keys. Arguments as in the kernels above."""
    matrix, lane, head, block = place_of(length, heads, QUERIES, CAUSAL)
    rows = block * QUERIES + tl.arange(0, QUERIES)
    begin, other, row = matrix * length * WIDTH, matrix * length * OTHER, matrix * length + rows
    q = load_rows(q_ptr + begin, rows, length, WIDTH, D, True)
    g = load_rows(g_ptr + other, rows, length, OTHER, D, True)
    m = tl.load(m_ptr + row, rows < length, 0.0)
    inverse = tl.load(inverse_ptr + row, rows < length, 0.0)
    mean = tl.load(mean_ptr + row, rows < length, 0.0)
    factor = base_2(factor_q_ptr, factor_k_ptr, lane, FACTOR)
    factor_dp = tl.load(factor_g_ptr + lane) * tl.load(factor_v_ptr + lane)
    table, common = (floats_ptr, ints_ptr, tensor_amax_ptr, amax_ptr), (seeds_ptr, step_ptr, stream)
    slot = slot_of(table, site, common, lane, B, TENSOR_SCALE, UNUSUAL)
    along = other_ptr, other_lane, other_head, other_row, other_number
    dq = tl.full((QUERIES, D), 0.0, tl.float32)
    last = tl.minimum(length, (block + 1) * QUERIES) if CAUSAL else length
    for start in range(0, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr + begin, keys, length, WIDTH, D, True)
        v = load_rows(v_ptr + other, keys, length, OTHER, D, True)
        s = scores_of(q, k, factor, rows[:, None], keys[None, :], length, CAUSAL)
        ds = _gradient(tl.exp2(s - m[:, None]) * inverse[:, None], g, v, mean[:, None], factor_dp)
        chunk = runs_of(head, rows, start, length, runs, KEYS)
        ds = quantized_tile(ds, chunk, slot, B, STOCHASTIC, ADAPTIVE, UNUSUAL)
        dq = tl.dot(ds, load_along(along, lane, head, keys, length, SIZE, D), dq)
    dq = dq * slot[2] * tl.load(factor_other_ptr + lane) * SCALE
    store_rows(dq_ptr + matrix * length * SIZE, dq, rows, length, SIZE, D)
