"""Heads cut out of the product of Q, K and V and turned by RoPE, in one kernel in either direction that reads and
writes each number once, with the bits of the definition.

    (a, b) -> (a cos - b sin, b cos + a sin) of both halves of each head of Q and K; V as it is
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import TILE, launch_grid


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
    rows = max(TILE // columns, 1)
    tensors = qkv, q, k, v, cos.contiguous(), sin.contiguous()
    flags = {"BACKWARD": backward, "ROWS": rows, "COLUMNS": columns}
    programs = launch_grid(count, triton.cdiv(length, rows))
    _heads_kernel[programs](*tensors, length, heads, size // 2, **flags, num_warps=4, enable_fp_fusion=False)
