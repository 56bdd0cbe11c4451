"""The gradient of an embedding by one kernel, with the bits of the definition.

A token's rows are added in chunks, pairs of neighbours from its last row backwards, then pairs of pairs; finished sums
of 2^i chunks are kept until there are two of them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.sums.trees import lane_sum

_LEVELS = 6
_CHUNK = 1 << _LEVELS
"""Rows of a token that are added at a time."""


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
    position = tl.arange(0, CHUNK)  # whose highest bit is the lowest of a row's number
    back = position * 0
    for i in tl.static_range(LEVELS):
        back += (position >> i & 1) << (LEVELS - 1 - i)
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


def sum_by_token(g: Tensor, order: Tensor, ends: Tensor) -> Tensor:
    """Sums of float32 g [L, M, D] by token: [L, V, D]. order: int64 [L, M], its rows sorted by token; ends: int64
    [L, V], how many of them belong to this token or one below."""
    lanes, rows, width = g.shape
    size = ends.shape[1]
    out = g.new_empty(lanes, size, width)
    columns = min(triton.next_power_of_2(width), 64)
    tensors, depth = (g.contiguous(), order.contiguous(), ends.contiguous(), out), triton.cdiv(rows, _CHUNK)
    flags = {"CHUNK": _CHUNK, "LEVELS": _LEVELS, "DEPTH": depth.bit_length(), "COLUMNS": columns}
    programs = launch_grid(size, lanes, triton.cdiv(width, columns))
    _token_kernel[programs](*tensors, rows, size, width, **flags, num_warps=4, enable_fp_fusion=False)
    return out
