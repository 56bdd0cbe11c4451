"""The order of the channels that a layer treats apart (dse/channels.py): those chosen first.

    score  = by norm Σ x²; by mean Σ |x|; by amax max |x|        over the rows of x, float32, in the order of ops/sums
           by error Σ |x - x̂| / M + Σ |w - ŵ| / N                over the M rows of x and the N of w
    order  = channels by falling score, of equals the first first; NaN is largest

Both operands are put into this order before they are cut into blocks, so that channels of like size share blocks; but
where the score is of errors, which depend on the blocks, channels stay in their places.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp4dse.kernels.ops.sums import divided, wide_sum

SCORES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "norm": lambda x, rows: wide_sum(x * x, rows),
    "amax": lambda x, rows: x.abs().amax(rows),
    "mean": lambda x, rows: wide_sum(x.abs(), rows),
}
"""Statistic -> the score of channels, over the dimension of rows."""


def by_score(x: Tensor, dim: int, by: str) -> Tensor:
    """int64 [L, K]: the order of the channels that lie along dimension `dim` (1 or 2) of x [L, ·, ·]."""
    score = SCORES[by](x.to(torch.float32), 3 - dim)
    return torch.argsort(score, dim=1, descending=True, stable=True)


def by_errors(*errors: Tensor) -> Tensor:
    """int64 [L, K]: the order of channels by the errors [L, ·, K] of the operands."""
    score = sum(divided(wide_sum(error.abs(), 1), error.shape[1]) for error in errors)
    assert isinstance(score, Tensor)
    return torch.argsort(score, dim=1, descending=True, stable=True)


def in_order(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """x [L, ·, ·] with its channels along `dim` in this order [L, K]."""
    return x.gather(dim, _index(x, order, dim))


def put_back(x: Tensor, order: Tensor, dim: int) -> Tensor:
    """The inverse of `in_order`."""
    return torch.empty_like(x).scatter_(dim, _index(x, order, dim), x)


def _index(x: Tensor, order: Tensor, dim: int) -> Tensor:
    return order.unsqueeze(3 - dim).expand_as(x)
