"""The programs of the attention core: what each computes, and in which order, says triton.py.

Loops over keys or queries end with those that are masked, because they come later or are none, so that the others need
no mask. Exponentials are those of base 2, with its logarithm of e in the factor of the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plus(a, b):
    return a + b


@triton.jit
def higher_of(a, b):
    return tl.maximum(a, b)


@triton.jit
def side_by_side(matrix, length, SIZE: tl.constexpr, HEADS: tl.constexpr):
    """Where a matrix begins in [N / HEADS, length, HEADS, SIZE]: HEADS · SIZE numbers lie from a row to its next."""
    return (matrix // HEADS * length * HEADS + matrix % HEADS) * SIZE


@triton.jit
def load_rows(x_ptr, rows, length, SIZE: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, HEADS: tl.constexpr = 1):
    """Rows of x [length, SIZE] as [rows, D], zero where there is nothing. Not MASKED: all rows exist. HEADS: matrices
    that lie side by side."""
    columns = tl.arange(0, D)
    at = x_ptr + rows[:, None] * (HEADS * SIZE) + columns[None, :]
    if MASKED:
        return tl.load(at, (rows[:, None] < length) & (columns[None, :] < SIZE), 0.0)
    if D > SIZE:
        return tl.load(at, columns[None, :] < SIZE, 0.0)
    return tl.load(at)


@triton.jit
def store_rows(x_ptr, x, rows, length, SIZE: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr = 1):
    """[rows, D] into rows of x [length, SIZE], in its dtype. HEADS: matrices that lie side by side."""
    columns = tl.arange(0, D)
    mask = (rows[:, None] < length) & (columns[None, :] < SIZE)
    tl.store(x_ptr + rows[:, None] * (HEADS * SIZE) + columns[None, :], x.to(x_ptr.dtype.element_ty), mask)


@triton.jit
def _scores(a, b, queries, keys, length, FACTOR: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """a bᵀ · FACTOR, -inf where MASKED and the query does not see the key. queries, keys: their numbers, as they lie
    along the two sides."""
    scores = tl.dot(a, tl.trans(b)) * FACTOR
    if MASKED:
        seen = keys < length
        if CAUSAL:
            seen = seen & (keys <= queries)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _maxima_and_sums(
    m,
    total,
    q,
    k_ptr,
    rows,
    first,
    last,
    length,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """m and total of these rows after more keys, from `first` to `last`."""
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, length, SIZE, D, MASKED)
        s = _scores(q, k, rows[:, None], keys[None, :], length, FACTOR, CAUSAL, MASKED)
        higher = tl.maximum(m, tl.reduce(s, 1, higher_of))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(m - base) + tl.reduce(tl.exp2(s - base[:, None]), 1, plus)
        m = higher
    return m, total


@triton.jit
def _outputs(
    out,
    q,
    k_ptr,
    v_ptr,
    m,
    inverse,
    rows,
    first,
    last,
    length,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """out + P v over keys from `first` to `last`."""
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, length, SIZE, D, MASKED)
        v = load_rows(v_ptr, keys, length, SIZE, D, MASKED)
        s = _scores(q, k, rows[:, None], keys[None, :], length, FACTOR, CAUSAL, MASKED)
        p = tl.exp2(s - m[:, None]) * inverse[:, None]
        out = tl.dot(p.to(tl.bfloat16), v, out)
    return out


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    m_ptr,
    inverse_ptr,
    length,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    ONE: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A block of queries of one matrix. q, k, v: bfloat16 [N, length, SIZE]; out: [N / HEADS, length, HEADS, SIZE]; m,
    inverse: float32 [N, length]. ONE: a block holds all keys."""
    blocks = (length + QUERIES - 1) // QUERIES
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block  # those that see most begin first
    rows = block * QUERIES + tl.arange(0, QUERIES)
    begin = matrix * length * SIZE
    q = load_rows(q_ptr + begin, rows, length, SIZE, D, True)
    k_ptr, v_ptr = k_ptr + begin, v_ptr + begin
    out = tl.full((QUERIES, D), 0.0, tl.float32)
    if ONE:
        keys = tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, length, SIZE, D, True)
        s = _scores(q, k, rows[:, None], keys[None, :], length, FACTOR, CAUSAL, True)
        m = tl.reduce(s, 1, higher_of)
        p = tl.exp2(s - m[:, None])
        inverse = 1.0 / tl.reduce(p, 1, plus)
        v = load_rows(v_ptr, keys, length, SIZE, D, True)
        out = tl.dot((p * inverse[:, None]).to(tl.bfloat16), v, out)
    else:
        m = tl.full((QUERIES,), float("-inf"), tl.float32)
        total = tl.full((QUERIES,), 0.0, tl.float32)
        last = tl.minimum(length, (block + 1) * QUERIES) if CAUSAL else length
        whole = (block * QUERIES if CAUSAL else length) // KEYS * KEYS  # every query sees the keys before
        m, total = _maxima_and_sums(m, total, q, k_ptr, rows, 0, whole, length, FACTOR, SIZE, D, KEYS, CAUSAL, False)
        m, total = _maxima_and_sums(m, total, q, k_ptr, rows, whole, last, length, FACTOR, SIZE, D, KEYS, CAUSAL, True)
        inverse = 1.0 / total
        out = _outputs(out, q, k_ptr, v_ptr, m, inverse, rows, 0, whole, length, FACTOR, SIZE, D, KEYS, CAUSAL, False)
        out = _outputs(out, q, k_ptr, v_ptr, m, inverse, rows, whole, last, length, FACTOR, SIZE, D, KEYS, CAUSAL, True)
    store_rows(out_ptr + side_by_side(matrix, length, SIZE, HEADS), out, rows, length, SIZE, D, HEADS)
    tl.store(m_ptr + matrix * length + rows, m, rows < length)
    tl.store(inverse_ptr + matrix * length + rows, inverse, rows < length)


@triton.jit(do_not_specialize=["total"])  # the only number that depends on how many matrices there are
def prepare_kernel(
    g_ptr,
    out_ptr,
    low_ptr,
    mean_ptr,
    total,
    length,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """The gradient g in BF16, [total, SIZE], and its product with out, summed over each row. g and out: [total /
    (HEADS · length), length, HEADS, SIZE]."""
    rows, columns = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    begin = rows * SIZE
    if HEADS > 1:
        begin = side_by_side(rows // length, length, SIZE, HEADS) + rows % length * (HEADS * SIZE)
    at, mask = begin[:, None] + columns[None, :], (rows[:, None] < total) & (columns[None, :] < SIZE)
    g, out = tl.load(g_ptr + at, mask, 0.0).to(tl.float32), tl.load(out_ptr + at, mask, 0.0).to(tl.float32)
    tl.store(mean_ptr + rows, tl.reduce(g * out, 1, plus), rows < total)
    store_rows(low_ptr, g, rows, total, SIZE, D)


@triton.jit
def _toward_keys(
    dk,
    dv,
    k,
    v,
    q_ptr,
    g_ptr,
    m_ptr,
    inverse_ptr,
    mean_ptr,
    keys,
    first,
    last,
    length,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dk + dSᵀ q and dv + Pᵀ do over queries from `first` to `last`; Pᵀ and dSᵀ are made transposed."""
    for start in range(first, last, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        q = load_rows(q_ptr, rows, length, SIZE, D, MASKED)
        g = load_rows(g_ptr, rows, length, SIZE, D, MASKED)
        m = tl.load(m_ptr + rows, rows < length, 0.0)
        inverse = tl.load(inverse_ptr + rows, rows < length, 0.0)
        mean = tl.load(mean_ptr + rows, rows < length, 0.0)
        s = _scores(k, q, rows[None, :], keys[:, None], length, FACTOR, CAUSAL, MASKED)
        p = tl.exp2(s - m[None, :]) * inverse[None, :]
        dv = tl.dot(p.to(tl.bfloat16), g, dv)
        ds = p * (tl.dot(v, tl.trans(g)) - mean[None, :])
        dk = tl.dot(ds.to(tl.bfloat16), q, dk)
    return dk, dv


@triton.jit
def keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    m_ptr,
    inverse_ptr,
    mean_ptr,
    dk_ptr,
    dv_ptr,
    length,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dk and dv of a block of keys of one matrix. g: the gradient of out, bfloat16; the rest as in the forward."""
    blocks = (length + KEYS - 1) // KEYS
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    keys = block * KEYS + tl.arange(0, KEYS)
    begin, row = matrix * length * SIZE, matrix * length
    k = load_rows(k_ptr + begin, keys, length, SIZE, D, True)
    v = load_rows(v_ptr + begin, keys, length, SIZE, D, True)
    q_ptr, g_ptr = q_ptr + begin, g_ptr + begin
    m_ptr, inverse_ptr, mean_ptr = m_ptr + row, inverse_ptr + row, mean_ptr + row
    dk, dv = tl.full((KEYS, D), 0.0, tl.float32), tl.full((KEYS, D), 0.0, tl.float32)
    whole = length // QUERIES * QUERIES
    first = 0
    if CAUSAL:
        first = tl.minimum(((block + 1) * KEYS + QUERIES - 2) // QUERIES * QUERIES, whole)  # they see all these keys
        dk, dv = _toward_keys(
            dk, dv, k, v, q_ptr, g_ptr, m_ptr, inverse_ptr, mean_ptr, keys, block * KEYS // QUERIES * QUERIES, first,
            length, FACTOR, SIZE, D, QUERIES, CAUSAL, True,
        )  # fmt: skip
    dk, dv = _toward_keys(
        dk, dv, k, v, q_ptr, g_ptr, m_ptr, inverse_ptr, mean_ptr, keys, first, whole,
        length, FACTOR, SIZE, D, QUERIES, CAUSAL, False,
    )  # fmt: skip
    dk, dv = _toward_keys(
        dk, dv, k, v, q_ptr, g_ptr, m_ptr, inverse_ptr, mean_ptr, keys, whole, length,
        length, FACTOR, SIZE, D, QUERIES, CAUSAL, True,
    )  # fmt: skip
    store_rows(dk_ptr + begin, dk * SCALE, keys, length, SIZE, D)
    store_rows(dv_ptr + begin, dv, keys, length, SIZE, D)


@triton.jit
def _toward_queries(
    dq,
    q,
    g,
    k_ptr,
    v_ptr,
    m,
    inverse,
    mean,
    rows,
    first,
    last,
    length,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """dq + dS k over keys from `first` to `last`."""
    for start in range(first, last, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_rows(k_ptr, keys, length, SIZE, D, MASKED)
        v = load_rows(v_ptr, keys, length, SIZE, D, MASKED)
        s = _scores(q, k, rows[:, None], keys[None, :], length, FACTOR, CAUSAL, MASKED)
        p = tl.exp2(s - m[:, None]) * inverse[:, None]
        ds = p * (tl.dot(g, tl.trans(v)) - mean[:, None])
        dq = tl.dot(ds.to(tl.bfloat16), k, dq)
    return dq


@triton.jit
def queries_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    m_ptr,
    inverse_ptr,
    mean_ptr,
    dq_ptr,
    length,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dq of a block of queries of one matrix, arguments as in `keys_kernel`."""
    blocks = (length + QUERIES - 1) // QUERIES
    matrix, block = (tl.program_id(0) // blocks).to(tl.int64), tl.program_id(0) % blocks
    if CAUSAL:
        block = blocks - 1 - block
    rows = block * QUERIES + tl.arange(0, QUERIES)
    begin, row = matrix * length * SIZE, matrix * length + rows
    q = load_rows(q_ptr + begin, rows, length, SIZE, D, True)
    g = load_rows(g_ptr + begin, rows, length, SIZE, D, True)
    m = tl.load(m_ptr + row, rows < length, 0.0)
    inverse = tl.load(inverse_ptr + row, rows < length, 0.0)
    mean = tl.load(mean_ptr + row, rows < length, 0.0)
    k_ptr, v_ptr = k_ptr + begin, v_ptr + begin
    last = tl.minimum(length, (block + 1) * QUERIES) if CAUSAL else length
    whole = (block * QUERIES if CAUSAL else length) // KEYS * KEYS
    dq = tl.full((QUERIES, D), 0.0, tl.float32)
    dq = _toward_queries(
        dq, q, g, k_ptr, v_ptr, m, inverse, mean, rows, 0, whole, length, FACTOR, SIZE, D, KEYS, CAUSAL, False
    )
    dq = _toward_queries(
        dq, q, g, k_ptr, v_ptr, m, inverse, mean, rows, whole, last, length, FACTOR, SIZE, D, KEYS, CAUSAL, True
    )
    store_rows(dq_ptr + begin, dq * SCALE, rows, length, SIZE, D)


@triton.jit
def whole_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    out_ptr,
    m_ptr,
    inverse_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    length,
    SCALE: tl.constexpr,
    FACTOR: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEADS: tl.constexpr,
):
    """All gradients of one matrix of at most ROWS queries. g and out: as they came; the rest as in `keys_kernel`."""
    matrix, rows = tl.program_id(0).to(tl.int64), tl.arange(0, ROWS)
    begin, row, beside = matrix * length * SIZE, matrix * length + rows, side_by_side(matrix, length, SIZE, HEADS)
    g = load_rows(g_ptr + beside, rows, length, SIZE, D, True, HEADS).to(tl.float32)
    out = load_rows(out_ptr + beside, rows, length, SIZE, D, True, HEADS).to(tl.float32)
    mean, low = tl.reduce(g * out, 1, plus), g.to(tl.bfloat16)
    q = load_rows(q_ptr + begin, rows, length, SIZE, D, True)
    k = load_rows(k_ptr + begin, rows, length, SIZE, D, True)
    v = load_rows(v_ptr + begin, rows, length, SIZE, D, True)
    m = tl.load(m_ptr + row, rows < length, 0.0)
    inverse = tl.load(inverse_ptr + row, rows < length, 0.0)
    s = _scores(q, k, rows[:, None], rows[None, :], length, FACTOR, CAUSAL, True)
    p = tl.exp2(s - m[:, None]) * inverse[:, None]
    ds = (p * (tl.dot(low, tl.trans(v)) - mean[:, None])).to(tl.bfloat16)
    store_rows(dv_ptr + begin, tl.dot(tl.trans(p.to(tl.bfloat16)), low), rows, length, SIZE, D)
    store_rows(dk_ptr + begin, tl.dot(tl.trans(ds), q) * SCALE, rows, length, SIZE, D)
    store_rows(dq_ptr + begin, tl.dot(ds, k) * SCALE, rows, length, SIZE, D)
