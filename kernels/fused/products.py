"""Products of narrow matrices on a GPU, in one order for every number of lanes.

Where a matrix has few rows, or its rows do not begin at multiples of 16 bytes, cuBLAS chooses between matrix-vector
kernels, kernels that cut the contraction, and others, by the number of matrices among other things: a lane would not
have the bits in company that it has alone. Here a program makes one tile of one matrix's result, along the whole
contraction. Tiles follow from the shape alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LEAST, _MOST, _BYTES = 16, 64, 128
"""Edges of a tile of the result, and bytes of the contraction that are loaded at a time."""


@triton.jit
def _product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    rows,
    columns,
    length,
    a_lane,
    a_row,
    a_along,
    b_lane,
    b_row,
    b_along,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALONG: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(2).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    a_ptr, b_ptr = a_ptr + lane * a_lane + row[:, None] * a_row, b_ptr + lane * b_lane + column[None, :] * b_row
    out = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, length, ALONG):
        along = start + tl.arange(0, ALONG).to(tl.int64)
        a = tl.load(a_ptr + along[None, :] * a_along, (row < rows)[:, None] & (along < length)[None, :], 0.0)
        b = tl.load(b_ptr + along[:, None] * b_along, (column < columns)[None, :] & (along < length)[:, None], 0.0)
        out = tl.dot(a, b, out, input_precision=PRECISION)
    at = (lane * rows + row)[:, None] * columns + column[None, :]
    tl.store(out_ptr + at, out, (row < rows)[:, None] & (column < columns)[None, :])


def multiply(a: Tensor, b: Tensor, fp32: str) -> Tensor:
    """a [L, R, K] · b [L, S, K]ᵀ in float32 [L, R, S] of bfloat16 operands, or of float32 ones as `fp32` says.

    Any strides. fp32: `ieee` or `tf32`.
    """
    (lanes, rows, length), columns = a.shape, b.shape[1]
    out = a.new_empty(lanes, rows, columns, dtype=torch.float32)
    tile, other = (min(max(triton.next_power_of_2(n), _LEAST), _MOST) for n in (rows, columns))
    grid = lanes, triton.cdiv(rows, tile), triton.cdiv(columns, other)
    tiles = {"PRECISION": fp32, "ROWS": tile, "COLUMNS": other, "ALONG": _BYTES // a.element_size()}
    _product_kernel[grid](a, b, out, rows, columns, length, *a.stride(), *b.stride(), **tiles, num_warps=4)
    return out
