"""What a decoder does around its products, each in one kernel that reads and writes a tensor once: heads cut out of the
product of Q, K and V and turned by RoPE, SwiGLU, and the gradient of an embedding.

Every operation is a single IEEE rounding in the order of the functions of `tasks.language.operators`, so that the bits
are theirs.

    heads      (a, b) -> (a cos - b sin, b cos + a sin) of both halves of each head of Q and K; V as it is
    SwiGLU     silu(gate) ∘ up; silu is rounded to the dtype of both, as it is between two functions
    embedding  Σ of the rows of each token, pairs of neighbours from the token's last row backwards, then pairs of pairs
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.fused.grids import grid
from fp4dse.kernels.fused.pointwise import sigmoid
from fp4dse.kernels.fused.trees import lane_sum

_TILE = 1024
_BIG = {"num_warps": 4, "enable_fp_fusion": False}
_LEVELS = 6
_CHUNK = 1 << _LEVELS
"""Rows of a token that are added at a time."""


@triton.jit
def _turn(from_ptr, to_ptr, source, target, half, mask, cos, sin):
    a = tl.load(from_ptr + source, mask, 0.0).to(tl.float32)
    b = tl.load(from_ptr + source + half, mask, 0.0).to(tl.float32)
    tl.store(to_ptr + target, (a * cos - b * sin).to(to_ptr.dtype.element_ty), mask)
    tl.store(to_ptr + target + half, (b * cos + a * sin).to(to_ptr.dtype.element_ty), mask)


@triton.jit
def _move(from_ptr, to_ptr, source, target, half, mask):
    a, b = tl.load(from_ptr + source, mask, 0.0), tl.load(from_ptr + source + half, mask, 0.0)
    tl.store(to_ptr + target, a.to(to_ptr.dtype.element_ty), mask)
    tl.store(to_ptr + target + half, b.to(to_ptr.dtype.element_ty), mask)


@triton.jit
def _heads_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    cos_ptr,
    sin_ptr,
    length,
    heads,
    half,
    BACKWARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Some positions of one head. Backward, which turns the other way, the packed tensor is written."""
    n, width = tl.program_id(0).to(tl.int64), heads * half * 2
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    mask = (row < length)[:, None] & (column < half)[None, :]
    table = row[:, None] * half + column[None, :]
    cos, sin = tl.load(cos_ptr + table, mask, 0.0), tl.load(sin_ptr + table, mask, 0.0)
    apart = (n * length + row)[:, None] * (2 * half) + column[None, :]
    packed = (n // heads * length + row)[:, None] * (3 * width) + n % heads * (2 * half) + column[None, :]
    if BACKWARD:
        _turn(q_ptr, qkv_ptr, apart, packed, half, mask, cos, -sin)
        _turn(k_ptr, qkv_ptr, apart, packed + width, half, mask, cos, -sin)
        _move(v_ptr, qkv_ptr, apart, packed + 2 * width, half, mask)
    else:
        _turn(qkv_ptr, q_ptr, packed, apart, half, mask, cos, sin)
        _turn(qkv_ptr, k_ptr, packed + width, apart, half, mask, cos, sin)
        _move(qkv_ptr, v_ptr, packed + 2 * width, apart, half, mask)


@triton.jit
def _swiglu_kernel(
    x_ptr, g_ptr, out_ptr, rows, width, BACKWARD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    one, both = row[:, None] * width + column[None, :], row[:, None] * (2 * width) + column[None, :]
    dtype = x_ptr.dtype.element_ty
    gate, up = tl.load(x_ptr + both, mask, 0.0).to(tl.float32), tl.load(x_ptr + both + width, mask, 0.0).to(tl.float32)
    s = sigmoid(gate)
    silu = (gate * s).to(dtype).to(tl.float32)
    if BACKWARD:
        g = tl.load(g_ptr + one, mask, 0.0).to(tl.float32)
        inner = (g * up).to(dtype).to(tl.float32)
        tl.store(out_ptr + both, (inner * (s * (1.0 + gate * (1.0 - s)))).to(dtype), mask)
        tl.store(out_ptr + both + width, (g * silu).to(dtype), mask)
    else:
        tl.store(out_ptr + one, (silu * up).to(dtype), mask)


@triton.jit
def _with_one_more(parts, part, number, DEPTH: tl.constexpr):
    """A binary counter: of `number` parts so far, parts[i] holds the sum of 2^i if bit i is set, else -0."""
    changed = ()
    for i in tl.static_range(DEPTH):
        reached = (number & ((1 << i) - 1)) == (1 << i) - 1
        taken = reached & ((number >> i & 1) == 1)
        changed += (tl.where(taken, -0.0, tl.where(reached, part, parts[i])),)  # type: ignore[assignment]
        part = tl.where(taken, parts[i] + part, part)
    return changed


@triton.jit
def _token_kernel(
    g_ptr,
    order_ptr,
    ends_ptr,
    out_ptr,
    rows,
    size,
    width,
    CHUNK: tl.constexpr,
    LEVELS: tl.constexpr,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One token's sum over some columns. `parts` holds one finished sum of 2^i chunks, or -0, for each i."""
    token, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < width
    end = tl.load(ends_ptr + lane * size + token)
    count = (end - tl.load(ends_ptr + lane * size + token - 1, token > 0, 0)).to(tl.int32)
    place = tl.arange(0, CHUNK)  # whose highest bit is the lowest of a row's number
    back = place * 0
    for i in tl.static_range(LEVELS):
        back += (place >> i & 1) << (LEVELS - 1 - i)
    nothing = tl.full([COLUMNS], -0.0, tl.float32)
    parts = (nothing,)
    for _ in tl.static_range(DEPTH - 1):
        parts += (nothing,)  # type: ignore[assignment]
    chunk = 0
    while chunk * CHUNK < count:
        number = chunk * CHUNK + back
        at = tl.load(order_ptr + lane * rows + (end - 1 - number), number < count, 0)
        mask = (number < count)[:, None] & inside[None, :]
        x = tl.load(g_ptr + (lane * rows + at)[:, None] * width + column[None, :], mask, -0.0)
        parts = _with_one_more(parts, lane_sum(tl.trans(x)), chunk, DEPTH)
        chunk += 1
    total = parts[0]
    for i in tl.static_range(1, DEPTH):
        total = total + parts[i]
    total = tl.where(count > 0, total, 0.0)
    tl.store(out_ptr + (lane * size + token) * width + column, total, inside)


def heads_apart(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned, and v of qkv [L, B, T, 3·D]: [L·B·heads, T, D / heads] each, of its dtype. cos, sin: float32
    tables of at least T positions."""
    lanes, batch, length, width = qkv.shape
    size = width // 3 // heads
    q, k, v = (qkv.new_empty(lanes * batch * heads, length, size) for _ in range(3))
    _launch_heads(qkv.contiguous(), q, k, v, cos, sin, heads, backward=False)
    return q, k, v


def heads_together(q: Tensor, k: Tensor, v: Tensor, shape: torch.Size, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of qkv, of this shape, from those of what `heads_apart` makes of it."""
    qkv = q.new_empty(shape)
    heads = shape[3] // 3 // q.shape[2]
    _launch_heads(qkv, q.contiguous(), k.contiguous(), v.contiguous(), cos, sin, heads, backward=True)
    return qkv


def _launch_heads(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, heads: int, backward: bool
) -> None:
    count, length, size = q.shape
    columns = triton.next_power_of_2(size // 2)
    rows = max(_TILE // columns, 1)
    tensors = qkv, q, k, v, cos.contiguous(), sin.contiguous()
    flags = {"BACKWARD": backward, "ROWS": rows, "COLUMNS": columns}
    _heads_kernel[grid(count, triton.cdiv(length, rows))](*tensors, length, heads, size // 2, **flags, **_BIG)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) ∘ up of x [..., 2·F], gate before up: [..., F] of its dtype."""
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    _launch_swiglu(x, y, y, backward=False)
    return y


def swiglu_gradient(x: Tensor, g: Tensor) -> Tensor:
    """The gradient of x from g, that of `swiglu`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_swiglu(x, g.contiguous(), out, backward=True)
    return out


def _launch_swiglu(x: Tensor, g: Tensor, out: Tensor, backward: bool) -> None:
    width = x.shape[-1] // 2
    columns = min(triton.next_power_of_2(width), 256)
    rows, count = _TILE // columns, x.numel() // (2 * width)
    places = grid(triton.cdiv(count, rows), triton.cdiv(width, columns))
    _swiglu_kernel[places](x, g, out, count, width, BACKWARD=backward, ROWS=rows, COLUMNS=columns, **_BIG)


def sum_by_token(g: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Sums of float32 g [L, M, D] by token: [L, V, D]. order: int64 [L, M], its rows sorted by token; ends: int64
    [L, V], how many of them belong to this token or one below."""
    lanes, rows, width = g.shape
    size = ends.shape[1]
    out = g.new_empty(lanes, size, width)
    columns = min(triton.next_power_of_2(width), 64)
    tensors, depth = (g.contiguous(), order.contiguous(), ends.contiguous(), out), triton.cdiv(rows, _CHUNK)
    flags = {"CHUNK": _CHUNK, "LEVELS": _LEVELS, "DEPTH": depth.bit_length(), "COLUMNS": columns}
    _token_kernel[grid(size, lanes, triton.cdiv(width, columns))](*tensors, rows, size, width, **flags, **_BIG)
    return out
