"""A mixture of experts: a router sends every token to the two MLPs that it prefers (1701.06538, 2401.04088).

    p = softmax(Router x)          two experts a, b with the largest p
    y = w_a · MLP_a(x) + w_b · MLP_b(x),     w = p_a, p_b divided by their sum
    balance = E · Σ_e f_e · mean p_e,        f_e the share of choices that fell on e (2101.03961); 1 when balanced

Every expert multiplies the tokens that chose it and no others, as it would on a device, because what shares a block or
a tensor scale with a token is part of what is studied. Shapes are static: an expert has room for `CAPACITY` times its
even share of the batch, empty positions are zeros, and of a token that finds its expert full that choice is dropped
(2006.16668). First choices take their positions before second ones, earlier tokens before later ones. Tokens move by
gathers in both passes, so nothing is added in the order of threads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from fp4dse.kernels import QuantLinear, lane_sum
from fp4dse.kernels.autograd import Function

CHOICES = 2
CAPACITY = 1.5


class Experts(nn.Module):
    """x [L, B, T, D] -> y, and the balance loss [L]. `router`: D -> E; `mlps`: E modules that map [L, C, D] to it."""

    def __init__(self, router: QuantLinear, mlps: nn.ModuleList) -> None:
        super().__init__()
        self.router, self.mlps = router, mlps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lanes, count, tokens = len(x), len(self.mlps), x.reshape(len(x), -1, x.shape[-1])
        probabilities = torch.softmax(self.router(tokens).to(torch.float32), dim=-1)  # [L, M, E]
        chosen = two_largest(probabilities.detach())  # [L, M, 2]
        positions, tokens_of, choices_of = dispatch(chosen, count)
        sent = _GatherRows.apply(tokens, tokens_of, positions).view(lanes, count, -1, x.shape[-1])
        parts = [mlp(part) for mlp, part in zip(self.mlps, (p.contiguous() for p in sent.unbind(1)), strict=True)]
        back = _GatherRows.apply(torch.cat(parts, dim=1), positions.flatten(1), choices_of[..., None])
        a, b = back.view(lanes, -1, CHOICES, x.shape[-1]).unbind(2)
        p, q = probabilities.gather(2, chosen).unbind(2)
        y = _WeightRows.apply(a, p / (p + q)) + _WeightRows.apply(b, q / (p + q))
        share = _shares(chosen, count)
        mean = lane_sum(probabilities, 1) * (1.0 / probabilities.shape[1])  # over tokens, [L, E]
        balance = lane_sum(mean * share, 1) * count
        return y.view(x.shape), balance


def two_largest(x: Tensor) -> Tensor:
    """Indices of the largest and second largest along the last axis, the first of equal ones: int64 [..., 2]."""
    first = x.argmax(dim=-1, keepdim=True)
    second = x.scatter(-1, first, -math.inf).argmax(dim=-1, keepdim=True)
    return torch.cat([first, second], dim=-1)


def capacity(tokens: int, experts: int) -> int:
    """Places of an expert, a multiple of 16 (what a block needs)."""
    return 16 * math.ceil(CAPACITY * CHOICES * tokens / experts / 16)


def dispatch(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assign a position to every choice. chosen: int64 [L, M, 2], expert of each choice. Returns, for P positions in
    all, expert after expert:

    positions   [L, M, 2]   the position of each choice; P where it is dropped
    tokens_of   [L, P]      the token at each position; M where it is empty
    choices_of  [L, P]      the choice at each position, as 2 · token + (0 first, 1 second); 2M where it is empty
    """
    lanes, tokens, _ = chosen.shape
    room = capacity(tokens, experts)
    queue = chosen.transpose(1, 2).reshape(lanes, -1)  # first choices, then second ones
    mine = queue[..., None] == torch.arange(experts, device=chosen.device)
    rank = (mine.cumsum(dim=1) - 1).gather(2, queue[..., None])[..., 0]
    position = torch.where(rank < room, queue * room + rank, experts * room)
    positions = position.view(lanes, CHOICES, tokens).transpose(1, 2).contiguous()
    number = torch.arange(CHOICES * tokens, device=chosen.device).expand(lanes, -1)
    empty = torch.full((lanes, experts * room + 1), CHOICES * tokens, device=chosen.device)
    choices_of = empty.scatter(1, positions.flatten(1), number)[:, :-1]
    return positions, choices_of // CHOICES, choices_of


def _shares(chosen: Tensor, experts: int) -> Tensor:
    """Share of the choices that fell on each expert, float32 [L, E]."""
    flat = chosen.flatten(1)
    counts = (flat[..., None] == torch.arange(experts, device=chosen.device)).sum(dim=1)  # of integers: any order
    return counts.to(torch.float32) * (1.0 / flat.shape[1])


class _GatherRows(Function):
    """Rows of x [L, R, D] at index [L, S], 0 for index R. inverse [L, R, k]: where each row went, S for nowhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _rows_or_zero(x, index)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        parts = [_rows_or_zero(g, at) for at in inverse.unbind(2)]
        return sum(parts[1:], parts[0]), None, None


def _rows_or_zero(x: Tensor, index: Tensor) -> Tensor:
    inside = index < x.shape[1]
    rows = x.gather(1, torch.where(inside, index, 0)[..., None].expand(*index.shape, x.shape[-1]))
    return torch.where(inside[..., None], rows, 0.0)


class _WeightRows(Function):
    """x [L, M, D] times w float32 [L, M], in x's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return (x * w[..., None]).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, w = ctx.saved_tensors
        g = g.to(torch.float32)
        return (g * w[..., None]).to(x.dtype), lane_sum(g * x, 2)
