"""Tokens to experts on other GPUs and back (expert parallelism), packed as recipes store operands (2603.02731).

Each of n ranks has the tokens of 1/n of a batch, one after the other, and E/n of the experts. Choices are gathered from
all ranks first, so that every expert's places are given in the order of the whole batch and with its capacity
(`experts.dispatch`): what is dropped does not depend on n. Then there are four all-to-alls:

    forward dispatch    x to the experts that chose it               MXFP4 by default
    forward combine     their results to the tokens                  BF16
    backward dispatch   gradients of the results to the experts      FP8 under factors of 128
    backward combine    gradients of x to the tokens                 BF16

What does not depend on the tokens that are under way may be computed meanwhile: `begin` sends them and `end` has them.
In the backward pass it is the other way round: the gradients leave in what is the end of the forward pass, so that what
was computed in between has its backward pass while they are under way.

A row travels as its codes, then its scales, in bytes (kernels/ops/messages). A format whose values it keeps when it
quantizes them again (MXFP4 does) leaves the expert's product with the bits that it has on one GPU, if backward operands
are made from the forward's copy, too. Sums over a token's choices are in their order.

Lengths of messages are numbers of the host, so a step with them cannot be captured. What is said of optimizers, dense
layers and balance is not part of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4dse.dse import ConfigError, Quantizer
from fp4dse.dse.quantizer import BF16
from fp4dse.kernels.autograd import Function
from fp4dse.kernels.ops.messages import packed, placed, why_not_sent

Swap = Callable[[Tensor, list[int], list[int]], Callable[[], Tensor]]
"""(rows uint8 [S, B], ordered by the rank that they go to; how many go to each rank; how many come from each) -> a
function that waits for the rows that come and returns them, ordered by the rank that they are from."""


class Formats(msgspec.Struct, frozen=True):
    """The quantizers that rows are stored by in each all-to-all; element `none` sends FP32."""

    x: Quantizer = Quantizer.named("mxfp4")
    results: Quantizer = BF16
    g: Quantizer = Quantizer.named("fp8-1x128")
    gradients: Quantizer = BF16

    def check(self) -> None:
        """ConfigError for a quantizer whose rows cannot be sent one by one."""
        for name in self.__struct_fields__:
            if reason := why_not_sent(getattr(self, name)):
                raise ConfigError(f"formats.{name}", getattr(self, name).label(), reason)


class Plan(NamedTuple):
    """The rows that a rank sends in a dispatch, and the places that they come to; a combine goes back the same way.

    sends     int64 [S], of each row which of the rank's choices it is, lane · M · k + k · token + choice, M its tokens
    to        how many go to each rank
    places    int64 [R], of each row that comes its place among L · E/n · room
    received  how many come from each rank
    came      int64 [L · E/n · room], of each place the number of the row that comes to it, -1 where none does
    returned  int64 [L · M · k], likewise of each choice the row that comes back for it
    shape     L, M, k, E/n, room
    """

    sends: Tensor
    to: list[int]
    places: Tensor
    received: list[int]
    came: Tensor
    returned: Tensor
    shape: tuple[int, int, int, int, int]


def make_plan(choices_of: Tensor, tokens: int, choices: int, room: int, place: tuple[int, int]) -> Plan:
    """The plan of a rank. choices_of: int64 [L, P] of all ranks, as `dispatch` returns it; tokens: of all ranks;
    choices: of a token; room: of an expert; place: the rank, and how many there are.

    ConfigError if tokens or experts cannot be shared out evenly.
    """
    (lanes, positions), (rank, ranks) = choices_of.shape, place
    for name, number in (("tokens", tokens), ("experts", positions // room)):
        if number % ranks:
            raise ConfigError(name, number, f"a multiple of {ranks}, the number of ranks")
    own = tokens // ranks
    parts = choices_of.view(lanes, ranks, -1).unbind(1)  # [L, places of a rank]
    source = [part // (own * choices) for part in parts]  # `ranks` where a place is empty
    lane = torch.arange(lanes, device=choices_of.device)[:, None] * own * choices
    mine = [from_ == rank for from_ in source]
    to_each = [(part - rank * own * choices + lane)[here] for part, here in zip(parts, mine, strict=True)]
    of_each = [torch.nonzero(source[rank].flatten() == other)[:, 0] for other in range(ranks)]
    sends, places = torch.cat(to_each), torch.cat(of_each)
    came, returned = _numbers(places, lanes * positions // ranks), _numbers(sends, lanes * own * choices)
    shape = lanes, own, choices, positions // room // ranks, room
    return Plan(sends, [*map(len, to_each)], places, [*map(len, of_each)], came, returned, shape)


def _numbers(places: Tensor, count: int) -> Tensor:
    """The number of each of so many places among `places`: int64 [count], -1 of those that are not there."""
    numbers = torch.arange(len(places), device=places.device)
    return torch.full((count,), -1, device=places.device).scatter_(0, places, numbers)


class Exchange:
    """The all-to-alls of one layer. sent: way -> bytes that went to other ranks so far."""

    def __init__(self, swap: Swap, rank: int, formats: Formats | None = None) -> None:
        self.swap, self.rank, self.formats = swap, rank, formats or Formats()
        self.formats.check()
        self.sent: dict[str, int] = {}

    def begin(self, x: Tensor, plan: Plan) -> Passage:
        """This rank's tokens x [L, M, D] on their way to the experts. `end` gives what this rank's experts get, float32
        [L, E/n, room, D], zeros in empty places."""
        return self._begun(_Passage(self, plan, _TO_EXPERTS), x)

    def combine(self, results: Tensor, plan: Plan) -> Tensor:
        """Results of this rank's experts [L, E/n, room, D] -> those of its tokens' choices, float32 [L, M, k, D], zeros
        for choices that were dropped."""
        return self.end(self.begin_combine(results, plan))

    def begin_combine(self, results: Tensor, plan: Plan) -> Passage:
        """The first half of `combine`."""
        return self._begun(_Passage(self, plan, _TO_TOKENS), results)

    def end(self, passage: Passage) -> Tensor:
        """The rows that were under way, once all are there."""
        return _End.apply(*passage)

    @staticmethod
    def _begun(of: _Passage, x: Tensor) -> Passage:
        return _Begin.apply(x, of), of

    def to_experts(self, x: Tensor, plan: Plan, q: Quantizer, way: str) -> Callable[[], Tensor]:
        """x [L, M, D], or a row for each choice [L, M, k, D], on its way to the experts' places: float32 [L, E/n, room,
        D]."""
        lanes, _, choices, experts, room = plan.shape
        each, width = choices if x.ndim == 3 else 1, x.shape[-1]
        arrived = self._swapped(packed(x.flatten(0, -2), plan.sends, q, each), plan.to, plan.received, way)
        return lambda: placed(arrived(), plan.came, width, q).view(lanes, experts, room, width)

    def to_tokens(self, x: Tensor, plan: Plan, q: Quantizer, way: str) -> Callable[[], Tensor]:
        """Rows at the experts' places [L, E/n, room, D] on their way to the choices: float32 [L, M, k, D]."""
        (lanes, tokens, choices, _, _), width = plan.shape, x.shape[-1]
        arrived = self._swapped(packed(x.flatten(0, 2), plan.places, q), plan.received, plan.to, way)
        return lambda: placed(arrived(), plan.returned, width, q).view(lanes, tokens, choices, width)

    def _swapped(self, message: Tensor, to: list[int], received: list[int], way: str) -> Callable[[], Tensor]:
        gone = sum(number for other, number in enumerate(to) if other != self.rank)
        self.sent[way] = self.sent.get(way, 0) + gone * message.shape[1]
        return self.swap(message, to, received)


def without_multicast() -> None:
    """Have NCCL leave NVLink multicast (NVLS) off in this process, whatever its environment said: in a virtual machine
    its use can put GPUs out of service that others share. NCCL asks once, when it makes the first communicator."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"


def swap_over(group: dist.ProcessGroup | None = None) -> Swap:
    """All-to-alls of a process group of torch.distributed; None: the default one. Multicast is switched off."""
    without_multicast()

    def swap(rows: Tensor, to: list[int], received: list[int]) -> Callable[[], Tensor]:
        out, rows = rows.new_empty(sum(received), rows.shape[1]), rows.contiguous()
        work = dist.all_to_all_single(out, rows, received, to, group=group, async_op=True)

        def arrived() -> Tensor:
            work.wait()  # on a GPU its stream does, not this process
            return out

        return arrived

    return swap


def gathered(chosen: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The choices [L, M, k] of all ranks as those of the whole batch, [L, n · M, k]. Multicast is switched off."""
    without_multicast()
    parts = [torch.empty_like(chosen) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, chosen.contiguous(), group=group)
    return torch.cat(parts, dim=1)


class _Passage:
    """One way of tokens, and the way back of their gradients. Of each the function that waits for what is under way."""

    def __init__(self, exchange: Exchange, plan: Plan, ways: tuple[_Way, _Way]) -> None:
        self.exchange, self.plan, self.ways = exchange, plan, ways
        self.arrived: Callable[[], Tensor] | None = None
        self.shape, self.dtype = torch.Size(), torch.float32

    def send(self, x: Tensor, back: bool) -> None:
        way = self.ways[back]
        send = self.exchange.to_experts if way.to_experts else self.exchange.to_tokens
        self.arrived = send(x, self.plan, getattr(self.exchange.formats, way.format), way.name)

    def receive(self) -> Tensor:
        assert self.arrived is not None
        found, self.arrived = self.arrived(), None
        return found


class _Way(NamedTuple):
    """An all-to-all: its name, the field of Formats, and where rows go."""

    name: str
    format: str
    to_experts: bool


_TO_EXPERTS = _Way("forward dispatch", "x", True), _Way("backward combine", "gradients", False)
_TO_TOKENS = _Way("forward combine", "results", False), _Way("backward dispatch", "g", True)
Passage = tuple[Tensor, _Passage]
"""Rows that are under way, behind a tensor without numbers that ties the two ends."""


class _Begin(Function[Tensor]):
    """x leaves; in the backward pass its gradients have come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: _Passage) -> Tensor:
        ctx.of, of.shape, of.dtype = of, x.shape, x.dtype
        of.send(x, back=False)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        g = ctx.of.receive()
        if g.ndim > len(ctx.of.shape):  # of each choice of a token
            parts = g.unbind(2)
            g = sum(parts[1:], parts[0])
        return g.to(ctx.of.dtype), None


class _End(Function[Tensor]):
    """x has come; in the backward pass its gradients leave."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, of: _Passage) -> Tensor:
        ctx.of = of
        return of.receive()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        ctx.of.send(g, back=True)
        return g.new_empty(0), None
