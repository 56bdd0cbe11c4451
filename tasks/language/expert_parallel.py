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

A row travels as its codes, then its scales, in bytes. A format whose values it keeps when it quantizes them again
(MXFP4 does) leaves the expert's product with the bits that it has on one GPU, if backward operands are made from the
forward's copy, too. Sums over a token's choices are in their order.

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
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp4dse.dse import ConfigError, Quantizer
from fp4dse.dse.rounding import Nearest
from fp4dse.kernels.autograd import Function
from fp4dse.kernels.quant.backend import backend
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.records import Stored, Use
from fp4dse.kernels.quant.operand.stored import restored, stored, why_not_stored

Swap = Callable[[Tensor, list[int], list[int]], Callable[[], Tensor]]
"""(rows uint8 [S, B], ordered by the rank that they go to; how many go to each rank; how many come from each) -> a
function that waits for the rows that come and returns them, ordered by the rank that they are from."""


class Formats(msgspec.Struct, frozen=True):
    """The quantizers that rows are stored by in each all-to-all; element `none` sends FP32."""

    x: Quantizer = Quantizer.named("mxfp4")
    results: Quantizer = Quantizer(element="bf16")
    g: Quantizer = Quantizer.named("fp8-1x128")
    gradients: Quantizer = Quantizer(element="bf16")

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
    shape     L, M, k, E/n, room
    """

    sends: Tensor
    to: list[int]
    places: Tensor
    received: list[int]
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
    sends = [(part - rank * own * choices + lane)[here] for part, here in zip(parts, mine, strict=True)]
    places = [torch.nonzero(source[rank].flatten() == other)[:, 0] for other in range(ranks)]
    shape = lanes, own, choices, positions // room // ranks, room
    return Plan(torch.cat(sends), [len(x) for x in sends], torch.cat(places), [len(x) for x in places], shape)


class Exchange:
    """The all-to-alls of one layer. sent: way -> bytes that went to other ranks so far."""

    def __init__(self, swap: Swap, rank: int, formats: Formats | None = None) -> None:
        self.swap, self.rank, self.formats = swap, rank, formats or Formats()
        self.formats.check()
        self.sent: dict[str, int] = {}

    def dispatch(self, x: Tensor, plan: Plan) -> Tensor:
        """This rank's tokens x [L, M, D] -> what its experts get, float32 [L, E/n, room, D], zeros in empty places."""
        return self.end(self.begin(x, plan))

    def combine(self, results: Tensor, plan: Plan) -> Tensor:
        """Results of this rank's experts [L, E/n, room, D] -> those of its tokens' choices, float32 [L, M, k, D], zeros
        for choices that were dropped."""
        return self.end(self.begin_combine(results, plan))

    def begin(self, x: Tensor, plan: Plan) -> Passage:
        """The first half of `dispatch`: the tokens are under way."""
        return self._begun(_Passage(self, plan, _TO_EXPERTS), x)

    def begin_combine(self, results: Tensor, plan: Plan) -> Passage:
        """The first half of `combine`."""
        return self._begun(_Passage(self, plan, _TO_TOKENS), results)

    def end(self, passage: Passage) -> Tensor:
        """The second half of either."""
        return _End.apply(*passage)

    @staticmethod
    def _begun(of: _Passage, x: Tensor) -> Passage:
        return _Begin.apply(x, of), of

    def to_experts(self, x: Tensor, plan: Plan, q: Quantizer, way: str) -> Callable[[], Tensor]:
        """x [L, M, D], or a row for each choice [L, M, k, D], on its way to the experts' places: float32 [L, E/n, room,
        D]."""
        lanes, tokens, choices, experts, room = plan.shape
        rows = x.unsqueeze(2).expand(-1, -1, choices, -1) if x.ndim == 3 else x
        rows = rows.reshape(lanes * tokens * choices, -1)[plan.sends]
        arrived = self._swapped(rows, plan.to, plan.received, q, way)

        def placed() -> Tensor:
            came = arrived()
            out = came.new_zeros(lanes * experts * room, came.shape[1])
            return out.index_copy_(0, plan.places, came).view(lanes, experts, room, -1)

        return placed

    def to_tokens(self, x: Tensor, plan: Plan, q: Quantizer, way: str) -> Callable[[], Tensor]:
        """Rows at the experts' places [L, E/n, room, D] on their way to the choices: float32 [L, M, k, D]."""
        lanes, tokens, choices, _, _ = plan.shape
        arrived = self._swapped(x.flatten(0, 2)[plan.places], plan.received, plan.to, q, way)

        def placed() -> Tensor:
            came = arrived()
            out = came.new_zeros(lanes * tokens * choices, came.shape[1])
            return out.index_copy_(0, plan.sends, came).view(lanes, tokens, choices, -1)

        return placed

    def _swapped(
        self, rows: Tensor, to: list[int], received: list[int], q: Quantizer, way: str
    ) -> Callable[[], Tensor]:
        message = packed_rows(rows, q)
        gone = sum(number for other, number in enumerate(to) if other != self.rank)
        self.sent[way] = self.sent.get(way, 0) + gone * message.shape[1]
        arrived = self.swap(message, to, received)
        return lambda: unpacked_rows(arrived(), rows.shape[1], q)


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


def why_not_sent(q: Quantizer) -> str | None:
    """The formats that are accepted instead of a quantizer, None if its rows can be sent: each is quantized by
    itself."""
    if q.element == "none" or q.is_plain:
        return None
    if q.rounding != Nearest() or q.outliers is not None:
        return "rounding to nearest, without outliers"
    over = q.canonical().factors_over
    if not (isinstance(q.block, int) or q.block == "row") or (q.tensor_scale is not None and over == "tensor"):
        return "scales of their own in every row, such as mxfp4, fp8-row or fp8-1x128"
    return why_not_stored(q.canonical())


def packed_rows(rows: Tensor, q: Quantizer) -> Tensor:
    """Rows [S, D] as bytes, uint8 [S, B]: codes, then scales, then factors in FP32."""
    if q.element == "none":
        return rows.to(torch.float32).contiguous().view(torch.uint8)
    if not len(rows):
        return torch.empty(0, row_bytes(rows.shape[1], q), dtype=torch.uint8, device=rows.device)
    if len(rows) == 1:  # whose factor would be as one of a tensor
        return packed_rows(F.pad(rows, (0, 0, 0, 1)), q)[:1]
    parts = (part for part in _stored(rows, q) if _is_of_rows(part))
    return torch.cat([part.contiguous().view(torch.uint8).view(len(rows), -1) for part in parts], dim=1)


def unpacked_rows(message: Tensor, width: int, q: Quantizer) -> Tensor:
    """The inverse: float32 [S, width]."""
    if q.element == "none":
        return message.contiguous().view(torch.float32)
    if not len(message):
        return torch.empty(0, width, device=message.device)
    example = _stored(torch.zeros(2, width, device=message.device), q)
    cut = iter(message.split([part.nbytes // 2 for part in example if _is_of_rows(part)], dim=1))
    parts = [
        _apart(next(cut)).view(of.dtype).view(1, len(message), *of.shape[2:]) if _is_of_rows(of) else of
        for of in example
    ]
    return restored(Stored(*parts), [q.canonical()]).decoded()[0, :, :width]


def _apart(part: Tensor) -> Tensor:
    """A part of rows in memory of its own, also of a single row: there FP32 begins at a multiple of four bytes."""
    return part.clone(memory_format=torch.contiguous_format)


def row_bytes(width: int, q: Quantizer) -> int:
    """Bytes of a row of so many numbers."""
    if q.element == "none":
        return 4 * width
    return sum(part.nbytes // 2 for part in _stored(torch.zeros(2, width), q) if _is_of_rows(part))


def _is_of_rows(part: Tensor) -> bool:
    """True for a part of what is stored that has a value of its own for each row; the factor of a tensor without a
    tensor scale is a constant."""
    return part.ndim > 1


def _stored(rows: Tensor, q: Quantizer) -> Stored:
    """Rows [S, D], S above 1, as a recipe stores an operand of one lane."""
    q, device = q.canonical(), rows.device
    slot = slot_of([q], 0, device, backend(str(device)))
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    use = Use(nothing[None], nothing, 0, training=False, length=rows.shape[1], keeping=True)
    padded = F.pad(rows.to(torch.float32), (0, -rows.shape[1] % slot.unit))
    operand = slot.quantize(padded[None], use)
    return operand.stored or stored(operand.terms[0], [q])
