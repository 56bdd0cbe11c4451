"""Rows of an embedding, and their gradient: the sum of the rows of each token, in an order that is the token's own.

Library kernels add gradients of look-ups in the order in which threads come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation

_EMBEDDING = Operation(__name__)


class _Embedding(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.size = weight.shape[1]
        return _rows(weight, tokens)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return sum_by_token(g, tokens, ctx.size), None


def embedding(weight: Tensor, tokens: Tensor) -> Tensor:
    """Rows of weight [L, V, D] for tokens, int64 [L, B, T]: [L, B, T, D]."""
    flat = tokens.reshape(len(tokens), -1)
    return _Embedding.apply(weight, flat).view(*tokens.shape, weight.shape[-1])


def sum_by_token(g: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Sum of the rows of g [L, M, D] that belong to each token, tokens int64 [L, M] below size: [L, size, D].

    Rows are sorted by token, in the order in which they stand; then every row adds the one 1, 2, 4 … before it as long
    as that is of the same token, so that the last of each token holds all of them. The order of additions is that of
    the token's own rows.
    """
    tokens, order = torch.sort(tokens, dim=1, stable=True)
    every = torch.arange(size, device=tokens.device).expand(len(tokens), size).contiguous()
    after = torch.searchsorted(tokens, every, right=True)  # where the rows of a token end
    if g.dtype == torch.float32 and (kernels := _EMBEDDING.kernels(g)):
        return kernels.sum_by_token(g, order, after)
    sums = _rows(g, order)
    step = 1
    while step < tokens.shape[1]:
        same = (tokens[:, step:] == tokens[:, :-step])[..., None]
        later = torch.where(same, sums[:, step:] + sums[:, :-step], sums[:, step:])
        sums = torch.cat([sums[:, :step], later], dim=1)
        step *= 2
    last = (after - 1).clamp(min=0)
    present = (tokens.gather(1, last) == every)[..., None]
    return torch.where(present, _rows(sums, last), 0.0)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [L, R, D] at the rows index [L, S]: [L, S, D]."""
    return x.gather(1, index[..., None].expand(*index.shape, x.shape[-1]))
