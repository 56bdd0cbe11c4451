"""The attention core, softmax(q kᵀ / sqrt d) v, which no recipe quantizes: its operands are BF16 as in the baseline.

    S = q kᵀ / sqrt d     P = softmax(S)     o = P v                       q, k, v and P in BF16, S and o as accumulated
    dv = Pᵀ do            dS = P ∘ (do vᵀ - rowsum(do ∘ o))                do and dS in BF16
    dq = dS k / sqrt d    dk = dSᵀ q / sqrt d

These are the roundings of the fused kernels that others train with (2205.14135, 2307.08691): products of BF16 numbers
are accumulated in FP32, scores and softmax stay in FP32, and what leaves is rounded once, to the dtype that came in.
P is made anew in the backward pass, a chunk of queries at a time, so that memory grows with the length and not with its
square. Lanes are folded into the batch.

On a CUDA device kernels compute it (triton.py): the same roundings, with sums and exponentials in the device's way, so
that bits differ from the definition's. The definition is for the CPU, for heads that the kernels do not take, and what
they are compared with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.products import bf16
from fp4dse.kernels.ops.sums import lane_sum

_ATTENTION = Operation(__name__)

CHUNK = 256
"""Queries whose weights are made at a time: part of the definition, since gradients of keys are summed over chunks."""


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, heads: int = 1) -> Tensor:
    """Attention of [N, T, d] each, N = lanes × batch × heads, in v's dtype: [N / heads, T, heads · d], the results of
    the heads of a token side by side, as the next layer takes them. causal: to no later key. ValueError if N is no
    multiple of heads."""
    if q.shape[0] % heads:
        raise ValueError(f"q: found N = {q.shape[0]} with {heads} heads; accepted: N = lanes × batch × heads")
    return _Attention.apply(q, k, v, causal, heads)


def heads_joined(x: Tensor, heads: int) -> Tensor:
    """x [N, T, d] as [N / heads, T, heads · d]."""
    if heads == 1:
        return x
    return x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(2)


def _heads_parted(x: Tensor, heads: int) -> Tensor:
    """The inverse of `heads_joined`."""
    return x.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1) if heads > 1 else x


class _Attention(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, heads: int) -> Tensor:
        ctx.causal, ctx.heads, ctx.dtypes = causal, heads, (q.dtype, k.dtype, v.dtype)
        q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
        if kernels := _ATTENTION.kernels(q, k, v):
            ctx.kernels = kernels
            out, *kept = kernels.forward(q, k, v, causal, ctx.dtypes[2], heads)
            ctx.save_for_backward(q, k, v, out, *kept)
            return out
        parts = [bf16(_weights(q, k, rows, causal), v[:, : _seen(rows, v, causal)].mT) for rows in _chunks(q)]
        out = heads_joined(torch.cat(parts, dim=1).to(ctx.dtypes[2]), heads)
        ctx.save_for_backward(q, k, v, out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *kept = ctx.saved_tensors
        if kept:
            return *ctx.kernels.backward(g, q, k, v, out, *kept, ctx.causal, ctx.dtypes, ctx.heads), None, None
        g, out = (_heads_parted(x, ctx.heads) for x in (g.to(torch.float32), out))
        g, scale = g.contiguous(), q.shape[-1] ** -0.5
        mean = lane_sum(g * out, 2)[..., None]  # of the gradient of a row's weights, under these weights
        dq, dk, dv = [], torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32)
        for rows in _chunks(q):
            end, part = _seen(rows, k, ctx.causal), g[:, rows]
            weights = _weights(q, k, rows, ctx.causal)
            dv[:, :end] += bf16(weights.mT, part.mT)
            d_scores = weights * (bf16(part, v[:, :end]) - mean[:, rows])
            dq.append(bf16(d_scores, k[:, :end].mT))
            dk[:, :end] += bf16(d_scores.mT, q[:, rows].mT)
        gradients = torch.cat(dq, dim=1) * scale, dk * scale, dv
        return *(x.to(dtype) for x, dtype in zip(gradients, ctx.dtypes, strict=True)), None, None


def _chunks(q: Tensor) -> list[slice]:
    return [slice(start, min(start + CHUNK, q.shape[1])) for start in range(0, q.shape[1], CHUNK)]


def _seen(rows: slice, k: Tensor, causal: bool) -> int:
    """The number of keys that some of these queries see."""
    return rows.stop if causal else k.shape[1]


def _weights(q: Tensor, k: Tensor, rows: slice, causal: bool) -> Tensor:
    """softmax(q kᵀ / sqrt d) of some queries, float32 [N, rows, keys]; 0 for keys that come later, where causal."""
    end = _seen(rows, k, causal)
    scores = bf16(q[:, rows], k[:, :end]) * q.shape[-1] ** -0.5
    if causal:
        later = torch.ones(rows.stop - rows.start, end, dtype=torch.bool, device=q.device).triu(rows.start + 1)
        scores = scores.masked_fill(later, float("-inf"))
    return torch.softmax(scores, dim=-1)
