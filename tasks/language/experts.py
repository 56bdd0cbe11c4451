"""A mixture of experts: a router sends every token to the MLPs that it prefers (1701.06538, 2401.04088).

    p = softmax(Router x)                       the k experts e with the largest p_e + b_e
    y = Σ w_e · MLP_e(x) + Shared(x),           w_e = p_e divided by the sum of those k; Shared: an MLP that every token
                                                has (2401.06066), where the model has one

Balance is kept by one of two rules (`Mixture.balance`):

    loss   a term of the loss, E · Σ_e f_e · mean p_e, f_e the share of choices that fell on e (2101.03961); 1 when
           balanced. b = 0
    bias   after every step b_e rises by RATE where e had fewer choices than the mean, and falls by it where it had
           more (2408.15664). It decides who is chosen, not with which weight, and no loss is added

Who is chosen may be given instead (router replay, 2510.11370): the weights w_e are still those of this router.

Every expert multiplies the tokens that chose it and no others, as it would on a device, because what shares a block or
a tensor scale with a token is part of what is studied. Shapes are static: an expert has room for `capacity` times its
even share of the batch, empty positions are zeros, and of a token that finds its expert full that choice is dropped
(2006.16668). First choices take their positions before second ones, earlier tokens before later ones. Without a
capacity every expert has room for every token, and nothing is dropped: products skip what is empty, memory does not.
Tokens move by gathers in both passes, so nothing is added in the order of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import msgspec
import torch
from torch import Tensor, nn

from fp4dse.dse import ConfigError
from fp4dse.kernels import QuantLinear, add_bias, lane_sum
from fp4dse.kernels.autograd import Function
from fp4dse.kernels.quant.operand.state import found, store

RATE = 0.001
"""Step of the biases (2408.15664)."""
BALANCE = 0.01
"""Weight of the balance loss (2101.03961)."""
PLACES = 16
"""Positions of an expert are a multiple of it: what a block needs."""
Balance = Literal["loss", "bias"]


class Mixture(msgspec.Struct, frozen=True):
    """The rules by which tokens are sent: how many experts a token has, and how many tokens an expert.

    chosen    experts of a token
    shared    width of the inside of the MLP that every token has; 0: there is none
    capacity  positions of an expert, times its even share; None: one for every token, so that none is dropped
    balance   the rule that spreads tokens: `loss` or `bias`
    """

    chosen: int = 2
    shared: int = 0
    capacity: float | None = 1.5
    balance: Balance = "loss"

    def positions(self, tokens: int, experts: int) -> int:
        """Positions of an expert."""
        room = tokens if self.capacity is None else min(tokens, self.capacity * self.chosen * tokens / experts)
        return PLACES * math.ceil(room / PLACES)

    def check(self, experts: int) -> None:
        """ConfigError if so many experts cannot be chosen so. A single one would have the weight 1 whatever the router
        says, which then would not learn."""
        if not 2 <= self.chosen <= experts:
            raise ConfigError("chosen", self.chosen, f"2 to {experts}, the number of experts")
        if self.capacity is not None and not 0 < self.capacity < math.inf:
            raise ConfigError("capacity", self.capacity, "a number above 0, or None for room for every token")
        if self.shared < 0:
            raise ConfigError("shared", self.shared, "a width above 0, or 0 for no MLP that every token has")
        if self.balance not in get_args(Balance):
            raise ConfigError("balance", self.balance, " or ".join(get_args(Balance)))


class Experts(nn.Module):
    """x [L, B, T, D], and perhaps the experts of each token, int64 [L, B, T, k], -1 where the router chooses -> y, and
    the balance loss [L], None where biases keep the balance.

    router: D -> E; mlps: E modules and what they compute together, (tokens [L, E, C, D], how many of each C are filled,
    int64 [L, E]) -> [L, E, C, D]; shared: D -> D, or None.
    """

    def __init__(self, router: QuantLinear, mlps: nn.ModuleList, shared: nn.Module | None, mixture: Mixture) -> None:
        super().__init__()
        mixture.check(len(mlps))
        self.router, self.mlps, self.shared, self.mixture = router, mlps, shared, mixture
        if mixture.balance == "bias":
            self.register_buffer("bias", torch.zeros_like(router.weight[..., 0]))
            self.carried = {f"bias {router.layer}": self.get_buffer("bias")}
            moves = [recipe.training.trains == "all" for recipe in router.numerics.recipes]
            self.rate = RATE * torch.tensor(moves, dtype=torch.float32, device=router.weight.device)[:, None]
        self.noted: list[Tensor] | None = None
        """Experts that the router chose, [L, M, k] a pass, where `noting` asks for them."""

    def forward(self, x: Tensor, given: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        count, tokens = len(self.mlps), x.reshape(len(x), -1, x.shape[-1])
        probabilities = torch.softmax(self.router(tokens).to(torch.float32), dim=-1)  # [L, M, E]
        chosen = self.chosen(probabilities.detach())  # [L, M, k]
        if self.noted is not None:
            self.noted.append(chosen)
        if given is not None:
            chosen = torch.where(given.flatten(1, 2) >= 0, given.flatten(1, 2), chosen)
        self._move_biases(chosen)
        y = self.mix(tokens, probabilities, chosen, self.mlps)
        if self.shared is not None:
            y = y + self.shared(tokens)
        if self.mixture.balance == "bias":
            return y.view(x.shape), None
        mean = lane_sum(probabilities, 1) * (1.0 / probabilities.shape[1])  # over tokens, [L, E]
        balance = lane_sum(mean * shares(chosen, count), 1) * count
        return y.view(x.shape), balance

    def mix(
        self, tokens: Tensor, probabilities: Tensor, chosen: Tensor, mlps: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Σ w_e · MLP_e of tokens [L, M, D], of their chosen experts [L, M, k]. mlps: as the module's."""
        lanes, count, room = len(tokens), len(self.mlps), self.mixture.positions(tokens.shape[1], len(self.mlps))
        positions, tokens_of, choices_of, filled = dispatch(chosen, count, room)
        sent = _GatherRows.apply(tokens, tokens_of, positions).view(lanes, count, room, tokens.shape[-1])
        made = mlps(sent, filled).flatten(1, 2)
        back = _GatherRows.apply(made, positions.flatten(1), choices_of[..., None])
        parts = back.view(*tokens.shape[:2], -1, tokens.shape[-1]).unbind(2)
        taken = probabilities.gather(2, chosen).unbind(2)
        total = sum(taken[1:], taken[0])
        terms = [_WeightRows.apply(part, p / total) for part, p in zip(parts, taken, strict=True)]
        y: Tensor = sum(terms[1:], terms[0])
        return y

    def chosen(self, probabilities: Tensor) -> Tensor:
        """The experts that the router chooses for each token, int64 [L, M, k]."""
        bias = self._bias()
        return largest(probabilities if bias is None else probabilities + bias[:, None], self.mixture.chosen)

    def _bias(self) -> Tensor | None:
        if self.mixture.balance == "loss":
            return None
        bias = found(self.carried, "bias", self.router.numerics.use(self.router.layer))
        assert bias is not None
        return bias

    def _move_biases(self, chosen: Tensor) -> None:
        """In training biases move by these choices, once a step, in lanes that train their weights."""
        if (bias := self._bias()) is None:
            return
        use = self.router.numerics.use(self.router.layer)
        if use.training:
            lack = 1.0 / len(self.mlps) - shares(chosen, len(self.mlps))
            store(self.carried, "bias", bias + self.rate * torch.sign(lack), use)


@contextmanager
def noting(model: nn.Module) -> Iterator[list[Tensor]]:
    """In the block, the experts that each router of a model chooses are appended to the list, [L, M, k] a layer and
    pass."""
    noted: list[Tensor] = []
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    for layer in layers:
        layer.noted = noted
    try:
        yield noted
    finally:
        for layer in layers:
            layer.noted = None


def with_balance(each: Tensor, balance: Tensor) -> Tensor:
    """Losses [L, …] of tokens and the weighted balance loss [L] on each: [L, ·, 1]."""
    return add_bias(each.reshape(len(each), -1, 1), BALANCE * balance[:, None])


def largest(x: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest along the last axis, the largest first, the first of equal ones: int64
    [..., count]."""
    found = []
    for _ in range(count):
        found.append(x.argmax(dim=-1, keepdim=True))
        x = x.scatter(-1, found[-1], -math.inf)
    return torch.cat(found, dim=-1)


def dispatch(chosen: Tensor, experts: int, room: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Assign a position to every choice. chosen: int64 [L, M, k], expert of each choice; room: positions of an expert.
    Returns, for P positions in all, expert after expert:

    positions   [L, M, k]   the position of each choice; P where it is dropped
    tokens_of   [L, P]      the token at each position; M where it is empty
    choices_of  [L, P]      the choice at each position, as k · token + its rank; k · M where it is empty
    filled      [L, E]      positions of each expert that are not empty; they are its first ones
    """
    lanes, tokens, count = chosen.shape
    queue = chosen.transpose(1, 2).reshape(lanes, -1)  # first choices, then second ones
    mine = queue[..., None] == torch.arange(experts, device=chosen.device)
    rank = (mine.cumsum(dim=1) - 1).gather(2, queue[..., None])[..., 0]
    position = torch.where(rank < room, queue * room + rank, experts * room)
    positions = position.view(lanes, count, tokens).transpose(1, 2).contiguous()
    number = torch.arange(count * tokens, device=chosen.device).expand(lanes, -1)
    empty = torch.full((lanes, experts * room + 1), count * tokens, device=chosen.device)
    choices_of = empty.scatter(1, positions.flatten(1), number)[:, :-1]
    return positions, choices_of // count, choices_of, mine.sum(dim=1).clamp(max=room)


def shares(chosen: Tensor, experts: int) -> Tensor:
    """Share of the choices that fell on each expert, float32 [L, E]."""
    flat = chosen.flatten(1)
    counts = (flat[..., None] == torch.arange(experts, device=chosen.device)).sum(dim=1)  # of integers: any order
    return counts.to(torch.float32) * (1.0 / flat.shape[1])


class _GatherRows(Function[Tensor]):
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


class _WeightRows(Function[Tensor]):
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
