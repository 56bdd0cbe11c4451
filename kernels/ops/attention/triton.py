"""Attention, forward and backward, without a matrix of weights in memory.

    forward    for a block of queries, twice over the keys: first m = max s and l = sum 2^(s - m) of each row, s being
               q kᵀ · log2(e) / sqrt d, then o = P v with P = 2^(s - m) / l, rounded to BF16 as the definition has it
    backward   mean = rowsum(do ∘ o) and do in BF16, once; then dk and dv for a block of keys over the queries, and dq
               for a block of queries over the keys, P made anew from m and 1/l. All at once where a matrix is short

The usual fused kernels (2205.14135, 2307.08691) go over the keys once, with weights that are not normalised yet, and so
round other numbers than P. The second time costs one more product of three; where one block holds all keys there is
none. Operands of products are BF16, everything else is FP32, and what leaves is rounded once. Exponentials and the
order in which products are accumulated are the device's: bits differ from those of the CPU.

A matrix is computed by programs of its own, whose tiles follow from the length, the head's size and whether it is
causal, and nothing is added atomically: its bits do not depend on how many others there are, nor on what they hold.
"""

from __future__ import annotations

from math import e, log2, sqrt

import torch
import triton
from torch import Tensor

from fp4dse.kernels.ops.attention.kernels import (
    forward_kernel,
    keys_kernel,
    prepare_kernel,
    queries_kernel,
    whole_kernel,
)
from fp4dse.kernels.ops.launching import launch_grid

LARGEST = 128
"""Numbers that a head may have."""

_ROWS = 64  # of a program that prepares the gradient
_SHORT = 128
"""Queries that a program may take whole."""

_TILES = {
    ("forward", False): (64, 64, 4, 2),
    ("forward", True): (64, 64, 4, 3),
    ("keys", False): (64, 64, 4, 3),
    ("keys", True): (32, 128, 8, 2),
    ("queries", False): (64, 64, 4, 2),
    ("queries", True): (64, 64, 8, 2),
}
"""(queries, keys, warps, stages) by kernel and whether heads have more than 64 numbers."""


def tiles(kernel: str, length: int, size: int) -> dict[str, int]:
    """Queries and keys of a block, warps and stages of `forward`, `keys` or `queries`: of the problem alone."""
    queries, keys, warps, stages = _TILES[kernel, size > 64]
    most = padded(length)
    keys = most if kernel == "forward" and length <= _SHORT else min(keys, most)
    queries = min(queries, most)
    rows = keys if kernel == "keys" else queries  # of the tile that is accumulated
    return {"QUERIES": queries, "KEYS": keys, "num_warps": min(warps, max(1, rows // 16)), "num_stages": stages}


def short(length: int, size: int) -> dict[str, int] | None:
    """Rows and warps of a program that makes all gradients of a matrix; None if that would be too much for one."""
    rows = padded(length)
    return {"ROWS": rows, "num_warps": rows // 16} if rows <= (_SHORT if size <= 64 else _SHORT // 2) else None


def why_not(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The reason why the kernels do not take q, k, v, or None if they do."""
    if not q.shape == k.shape == v.shape:
        return f"q, k, v: found {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}; accepted: one shape"
    if not (q.numel() and q.shape[2] <= LARGEST):
        return f"q: found {tuple(q.shape)}; accepted: [N, T, d], none of them 0 and d up to {LARGEST}"
    return None


def forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, dtype: torch.dtype, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q kᵀ / sqrt d) v of bfloat16 [N, T, d] each, in `dtype`, [N / heads, T, heads · d], and what `backward`
    needs: for each query the maximum m of its scores in base 2 and the inverse of the sum of 2^(s - m), float32 [N,
    T]."""
    number, length, size = q.shape
    q, k, v = (_aligned(x) for x in (q, k, v))
    out = torch.empty(number // heads, length, heads * size, dtype=dtype, device=q.device)
    m, inverse = torch.empty(2, number, length, dtype=torch.float32, device=q.device).unbind(0)
    shape = tiles("forward", length, size)
    programs = launch_grid(number * triton.cdiv(length, shape["QUERIES"]))
    one = length <= shape["KEYS"]
    flags = {"ONE": one, "CAUSAL": causal, "HEADS": heads}
    forward_kernel[programs](q, k, v, out, m, inverse, length, **flags, **_sizes(size), **shape)
    return out, m, inverse


def backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    m: Tensor,
    inverse: Tensor,
    causal: bool,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in `dtypes` from g, that of out; the rest as `forward` took and returned it."""
    number, length, size = q.shape
    g, q, k, v = (_aligned(x) for x in (g, q, k, v))
    dq, dk, dv = (torch.empty(q.shape, dtype=dtype, device=q.device) for dtype in dtypes)
    sizes = _sizes(size) | {"SCALE": size**-0.5, "CAUSAL": causal}
    if (whole := short(length, size)) is not None:
        tensors = q, k, v, g, out, m, inverse, dq, dk, dv
        whole_kernel[launch_grid(number)](*tensors, length, **sizes, **whole, HEADS=heads)
        return dq, dk, dv
    low, mean, rows = torch.empty_like(q), torch.empty_like(m), number * length
    of_rows = {"SIZE": size, "D": sizes["D"], "ROWS": _ROWS, "HEADS": heads, "enable_fp_fusion": False}
    prepare_kernel[launch_grid(triton.cdiv(rows, _ROWS))](g, out, low, mean, rows, length, **of_rows)
    read = q, k, v, low, m, inverse, mean
    shape = tiles("keys", length, size)
    keys_kernel[launch_grid(number * triton.cdiv(length, shape["KEYS"]))](*read, dk, dv, length, **sizes, **shape)
    shape = tiles("queries", length, size)
    queries_kernel[launch_grid(number * triton.cdiv(length, shape["QUERIES"]))](*read, dq, length, **sizes, **shape)
    return dq, dk, dv


def padded(n: int) -> int:
    """As many rows or columns as a product has at least."""
    return max(16, triton.next_power_of_2(n))


def _sizes(size: int) -> dict[str, float]:
    """Of a head, and what makes scores of base 2 of its products. These are rounded before a maximum is subtracted, or
    the exponential of huge ones would be infinite."""
    return {"SIZE": size, "D": padded(size), "FACTOR": log2(e) / sqrt(size), "enable_fp_fusion": False}


def _aligned(x: Tensor) -> Tensor:
    """x in one piece and at an address that the kernels are compiled for, so that they are the same for all views."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
