"""Heads of attention as Llama 2, Qwen2 and Qwen3 have them: fewer keys and values than queries (grouped-query
attention, 2305.13245), and an RMS norm over each head's query and key (Qwen3, 2505.09388).

Both are undone before the core: keys and values are repeated, so that the core has as many of each. Gradients of a
group are added in the order of its heads, in FP32, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.ops.rms_norm import rms_norm


class _Repeated(Function[Tensor]):
    """x [..., K, d] -> [..., K · times, d], every head `times` times in a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.times = times
        return x.repeat_interleave(times, dim=-2)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        parts = g.unflatten(-2, (-1, ctx.times)).to(torch.float32).unbind(-2)
        return sum(parts[1:], parts[0]).to(g.dtype), None


def equal_heads(
    qkv: Tensor, heads: int, kv_heads: int, gains: tuple[Tensor, Tensor] | None = None, eps: float = 0.0
) -> Tensor:
    """qkv [L, B, T, (heads + 2 · kv_heads) · d] as [L, B, T, 3 · heads · d]. gains: of the norms of queries and keys,
    [L, d] each; None without norms."""
    apart = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = apart.split([heads, kv_heads, kv_heads], dim=-2)
    if gains is not None:
        q, k = rms_norm(q, gains[0], eps), rms_norm(k, gains[1], eps)
    if kv_heads < heads:
        k, v = (_Repeated.apply(x, heads // kv_heads) for x in (k, v))
    return torch.cat([q, k, v], dim=-2).flatten(-2)
