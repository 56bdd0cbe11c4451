"""The one reduction that lanes use: a fixed tree of additions, so that bits do not depend on the number of lanes.

Library reductions choose their order from the whole tensor's shape and the number of threads. Here the axis is halved
again and again by element-wise additions, which gives the same bits on every device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation

_SUMS = Operation(__name__)


class _LaneSum(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.shape, ctx.dim = x.shape, dim
        return _tree(x.detach(), dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return g.unsqueeze(ctx.dim).expand(ctx.shape), None


def lane_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over one dimension in a fixed order: first half + second half, until one is left. Odd middles carry over."""
    return _LaneSum.apply(x, dim % x.dim())


def wide_sum(x: Tensor, dim: int) -> Tensor:
    """The lane sum of x as float32, without a gradient. On a GPU, nothing is copied for it."""
    if kernels := _SUMS.kernels(x):
        return kernels.lane_sum(x.detach(), dim)
    return _tree(x.detach().to(torch.float32), dim % x.dim())


def _tree(x: Tensor, dim: int) -> Tensor:
    if x.dtype == torch.float32 and (kernels := _SUMS.kernels(x)):
        return kernels.lane_sum(x, dim)
    while x.shape[dim] > 1:
        n = x.shape[dim]
        half = n // 2
        head = x.narrow(dim, 0, half) + x.narrow(dim, n - half, half)
        x = torch.cat([head, x.narrow(dim, half, 1)], dim) if n % 2 else head
    return x.squeeze(dim)


def lane_mean(x: Tensor) -> Tensor:
    """Mean of everything but the lane axis: [L, …] -> [L]."""
    if x.dim() == 1:
        return x
    flat = x.reshape(len(x), -1)
    return divided(lane_sum(flat, 1), flat.shape[1])


def divided(total: Tensor, count: int) -> Tensor:
    """total / count. By a number, a GPU would multiply with its inverse, which is the same for a power of two alone."""
    if count and not count & (count - 1):
        return total * (1 / count)
    return total / torch.full_like(total, count)
