"""A layer of experts on several ranks (language/expert_parallel.py): its bits beside those of one device, bytes and
times of the four all-to-alls, memory, and a step in which a shared expert is computed while tokens are under way.

Ranks are processes of this machine: GPUs with NCCL, or gloo on a CPU. Each also computes the whole layer by itself and
compares its part, with FP32 where a format would round; times are of the formats by default. A time over a slower link
is bytes over its speed and nothing else. Every rank writes its rows to a file of its own as it measures them, and a row
is given out as soon as all ranks have it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from fp4dse.dse import ConfigError, Quantizer, Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.dse.quantizer import BF16
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.kernels.dispatch import by_device
from fp4dse.kernels.experts import expert_products, group_layers
from fp4dse.kernels.ops.messages import packed, placed
from fp4dse.kernels.ops.silu import silu
from fp4dse.tasks.engine.lane_counts import peak, reset_peak, wait_for
from fp4dse.tasks.language.expert_parallel import (
    Exchange,
    Formats,
    Plan,
    gathered,
    make_plan,
    swap_over,
    without_multicast,
)
from fp4dse.tasks.language.experts import dispatch
from fp4dse.tasks.threads import torch_threads

KINDS: tuple[Literal["up", "down"], ...] = ("up", "down")
RECIPE = "hopper-moe-fp4"
LINK = 50e9
"""Bytes a second of a link of 400 Gb/s."""
REPEATS = 10
WAIT = 0.2
"""Seconds until files of rows are looked at again."""
PLAIN = Quantizer(element="none")
EXACT = Formats(results=PLAIN, g=PLAIN, gradients=PLAIN)
"""Formats under which ranks have the bits of one device."""


class Sizes(NamedTuple):
    """Tokens of a rank, the stream's width and the inside's, experts of all ranks, and experts of a token."""

    tokens: int
    width: int
    inside: int
    experts: int
    choices: int = 2

    def room(self, ranks: int) -> int:
        """Positions of an expert: one and a half of its even share."""
        return -(-3 * self.tokens * ranks * self.choices // (2 * self.experts * 128)) * 128


GPU, CPU = Sizes(8192, 2048, 1408, 16), Sizes(32, 256, 384, 4)
"""No two numbers of either are the same: what takes one size for another fails with both."""


class Row(NamedTuple):
    """A figure: of rank 0, but for numbers of what is wrong, which are sums."""

    what: str
    value: float
    unit: str
    note: str = ""


class Layer:
    """The experts of one rank among `ranks`, and the shared one that every rank has. Weights follow from their numbers
    among all."""

    def __init__(self, sizes: Sizes, rank: int, ranks: int, device: str) -> None:
        self.sizes, self.place = sizes, (rank, ranks)
        count = sizes.experts // ranks
        first = rank * count
        numerics = LaneNumerics([Recipe.named(RECIPE)], [0], device)
        self.experts: dict[str, list[QuantLinear]] = {}
        self.shared: dict[str, QuantLinear] = {}
        places = {name: Place("mlp", 0, 1, name, True) for name in KINDS}
        for n, (name, place) in enumerate(places.items()):
            shape = (sizes.inside, sizes.width) if name == "up" else (sizes.width, sizes.inside)
            base = n * (sizes.experts + 1)
            self.experts[name] = [
                QuantLinear(normal(1, *shape, seed=base + first + e, device=device), None, numerics, base + e, place)
                for e in range(count)
            ]
            group_layers(self.experts[name], first)
            weight = normal(1, *shape, seed=base + sizes.experts, device=device)
            self.shared[name] = QuantLinear(weight, None, numerics, base + sizes.experts, place)

    def plan(self, chosen: Tensor) -> tuple[Plan, Tensor]:
        """The rank's plan, and how many positions of its experts are filled. chosen: of all ranks, [1, M, k]."""
        room, (rank, ranks) = self.sizes.room(self.place[1]), self.place
        _, _, choices_of, filled = dispatch(chosen, self.sizes.experts, room)
        plan = make_plan(choices_of, chosen.shape[1], self.sizes.choices, room, self.place)
        return plan, filled.unflatten(1, (ranks, -1))[:, rank]

    def __call__(self, x: Tensor, exchange: Exchange, plan: Plan, filled: Tensor, overlaps: bool) -> Tensor:
        """x [1, M, D] -> the sum of the token's experts and the shared one, float32."""
        passage = exchange.begin(x, plan)
        if overlaps:
            shared, sent = self.of_shared(x), exchange.end(passage)
        else:
            sent = exchange.end(passage)
            shared = self.of_shared(x)
        inside = silu(expert_products(sent, self.experts["up"], filled))
        back = exchange.combine(expert_products(inside, self.experts["down"], filled), plan)
        parts = back.unbind(2)
        whole: Tensor = sum(parts[1:], parts[0])
        return whole + shared

    def of_shared(self, x: Tensor) -> Tensor:
        """The part of the output that every token has."""
        y: Tensor = self.shared["down"](silu(self.shared["up"](x)))
        return y

    def weights(self) -> list[Tensor]:
        """Of the rank's experts."""
        return [layer.weight for layers in self.experts.values() for layer in layers]


def bench(device: str = "cpu", ranks: int = 2, sizes: Sizes | None = None) -> Iterator[Row]:
    """The rows. ConfigError for more ranks than there are GPUs, and for sizes that cannot be shared out."""
    sizes = sizes or by_device(device, cpu=CPU, cuda=GPU)
    if by_device(device, cpu=False, cuda=True) and (most := torch.cuda.device_count()) < ranks:
        raise ConfigError("ranks", ranks, f"at most {most}, the number of GPUs")
    if sizes.experts % ranks:
        raise ConfigError("ranks", ranks, f"a divisor of {sizes.experts}, the number of experts")
    with tempfile.TemporaryDirectory() as folder:
        processes = spawn(_of_rank, (ranks, device, sizes, folder), ranks, join=False)
        try:
            given, running = 0, True
            while running:
                running = not processes.join(WAIT)  # or raises what a rank did
                found = [_written(Path(folder) / f"{rank}.jsonl")[given:] for rank in range(ranks)]
                for rows in zip(*found, strict=False):
                    yield _of_all(rows)
                    given += 1
        finally:
            for process in processes.processes:
                process.kill()
                process.join()


def _written(file: Path) -> list[Row]:
    """The rows that a rank has written whole."""
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [Row(*msgspec.json.decode(line)) for line in lines]


def _of_all(rows: tuple[Row, ...]) -> Row:
    first = rows[0]
    return first._replace(value=sum(row.value for row in rows)) if first.unit == "wrong" else first


def _of_rank(rank: int, ranks: int, device: str, sizes: Sizes, folder: str) -> None:
    """One of the processes: its rows go to a file, one by one."""
    without_multicast()
    device = by_device(device, cpu=device, cuda=f"cuda:{rank}")
    if by_device(device, cpu=False, cuda=True):
        torch.cuda.set_device(rank)
    where, backend = f"file://{folder}/store", by_device(device, cpu="gloo", cuda="nccl")
    own = by_device(device, cpu=None, cuda=torch.device(device))
    dist.init_process_group(backend, where, rank=rank, world_size=ranks, device_id=own)
    try:
        with torch_threads(1), open(Path(folder) / f"{rank}.jsonl", "ab", buffering=0) as file:
            file.writelines(msgspec.json.encode(tuple(row)) + b"\n" for row in _rows(rank, ranks, device, sizes))
    finally:
        dist.destroy_process_group()


def _rows(rank: int, ranks: int, device: str, sizes: Sizes) -> Iterator[Row]:
    shape = 1, sizes.tokens * ranks, sizes.width
    x, g = (normal(*shape, seed=1000 + n, device=device) * sizes.width**0.5 for n in range(2))
    score = normal(1, shape[1], sizes.experts, seed=1002, device=device)
    chosen = torch.topk(score, sizes.choices).indices
    here = slice(rank * sizes.tokens, (rank + 1) * sizes.tokens)
    layer = Layer(sizes, rank, ranks, device)
    own = gathered(chosen[:, here].contiguous())
    yield Row("choices of all ranks, gathered", int((own != chosen).sum()), "wrong")
    part = _Part(layer, x[:, here].clone(), g[:, here].clone(), *layer.plan(own))
    yield from _compared(part, x, g, chosen, device)
    del x, g  # the other ranks' are no part of this one's memory
    yield from _ways(part, device)
    weights = sum(weight.nbytes for weight in layer.weights())
    yield Row("weights of a rank's experts", weights / 2**20, "MiB", f"{ranks} ranks: {ranks * weights / 2**20:.4g}")
    for overlaps in (False, True):
        exchange = Exchange(swap_over(), rank)
        reset_peak(device)
        ms = _ms(partial(part.step, exchange, overlaps), device)
        what = "meanwhile" if overlaps else "afterwards"
        yield Row(f"step, shared expert {what}", ms, "ms")
        yield Row(f"peak memory of a step, shared expert {what}", peak(device) / 2**20, "MiB")


class _Part(NamedTuple):
    """A rank's layer, its tokens and gradients of outputs, and its plan."""

    layer: Layer
    x: Tensor
    g: Tensor
    plan: Plan
    filled: Tensor

    def step(self, exchange: Exchange, overlaps: bool) -> tuple[Tensor, ...]:
        """Outputs, gradients of tokens and of the experts' weights."""
        x = self.x.clone().requires_grad_()
        y = self.layer(x, exchange, self.plan, self.filled, overlaps)
        return y.detach(), *torch.autograd.grad(y, [x, *self.layer.weights()], self.g)


def _compared(part: _Part, x: Tensor, g: Tensor, chosen: Tensor, device: str) -> Iterator[Row]:
    """The number of what differs from one device's: x, g, chosen are of all ranks."""
    (rank, ranks), sizes = part.layer.place, part.layer.sizes
    whole = Layer(sizes, 0, 1, device)
    # room for as many tokens as ranks have together
    _, _, choices_of, filled = dispatch(chosen, sizes.experts, sizes.room(ranks))
    plan = make_plan(choices_of, chosen.shape[1], sizes.choices, sizes.room(ranks), (0, 1))
    alone = _Part(whole, x, g, plan, filled).step(Exchange(_stays, 0, EXACT), overlaps=False)
    here, count = slice(rank * sizes.tokens, (rank + 1) * sizes.tokens), sizes.experts // ranks
    mine = [n for n in range(2 * sizes.experts) if n % sizes.experts // count == rank]
    wanted = [alone[0][:, here]], [alone[1][:, here]], [alone[2 + n] for n in mine]
    for overlaps in (False, True):
        y, dx, *dw = part.step(Exchange(swap_over(), rank, EXACT), overlaps)
        names = "outputs", "gradients of tokens", "gradients of weights"
        for name, found, right in zip(names, ([y], [dx], dw), wanted, strict=True):
            order = "meanwhile" if overlaps else "afterwards"
            wrong = sum(int((a != b).sum()) for a, b in zip(found, right, strict=True))
            count_of_all = ranks * sum(b.numel() for b in right)
            yield Row(f"{name}, shared expert {order}", wrong, "wrong", f"of {count_of_all:,}")


class _Way(NamedTuple):
    """An all-to-all. The rows of x [N, D] that are sent and how many to each rank; how many come from each, and of each
    place which of them it gets. each: as in `messages.packed`."""

    q: Quantizer
    x: Tensor
    chosen: Tensor
    to: list[int]
    received: list[int]
    source: Tensor
    each: int = 1


def _ways(part: _Part, device: str) -> Iterator[Row]:
    """Each all-to-all: bytes to other ranks, its time and that of a slower link, that of packing the rows that are
    chosen and of unpacking them to their places."""
    rank, _ = part.layer.place
    exchange = Exchange(swap_over(), rank)
    part.step(exchange, overlaps=False)
    width, plan, formats = part.layer.sizes.width, part.plan, exchange.formats
    x, of_choices, of_places = (
        normal(count, width, seed=5, device=device) for count in (part.x.shape[1], len(plan.returned), len(plan.came))
    )
    to_experts, to_tokens = (plan.to, plan.received, plan.came), (plan.received, plan.to, plan.returned)
    ways = {
        "forward dispatch": _Way(formats.x, x, plan.sends, *to_experts, each=part.layer.sizes.choices),
        "forward combine": _Way(formats.results, of_places, plan.places, *to_tokens),
        "backward dispatch": _Way(formats.g, of_choices, plan.sends, *to_experts),
        "backward combine": _Way(formats.gradients, of_places, plan.places, *to_tokens),
    }
    for name, way in ways.items():
        away = 2 * width * sum(n for other, n in enumerate(way.to) if other != rank)
        sent = exchange.sent[name]
        slower = f"{1e3 * sent / LINK:.3g} ms at {LINK / 1e9:.0f} GB/s, BF16 {1e3 * away / LINK:.3g}"
        note = f"{sent / away:.4f} of BF16's; {slower}" if away else "there is one rank"
        yield Row(f"{name}: bytes to other ranks", sent, "bytes", note)
        messages = {q.label(): packed(way.x, way.chosen, q, way.each) for q in (way.q, BF16)}
        for label, sending in messages.items():
            swapping = _swapping(sending, way.to, way.received)
            yield Row(f"{name}: all-to-all of {label}", _ms(swapping, device), "ms")
        pack = partial(packed, way.x, way.chosen, way.q, way.each)
        message = messages[way.q.label()]
        yield _timed(f"{name}: packing", pack, min(len(way.x), len(way.chosen)) * 4 * width + message.nbytes, device)
        came = _swapping(message, way.to, way.received)()
        place = partial(placed, came, way.source, width, way.q)
        yield _timed(f"{name}: unpacking", place, came.nbytes + len(way.source) * 4 * width, device)


def _timed(what: str, call: Callable[[], object], nbytes: int, device: str) -> Row:
    """The time of a call that reads and writes so many bytes at least."""
    ms = _ms(call, device)
    return Row(what, ms, "ms", f"{nbytes / 1e6:.4g} MB, {nbytes / ms / 1e6:.4g} GB/s")


def _swapping(message: Tensor, to: list[int], received: list[int]) -> Callable[[], Tensor]:
    swap = swap_over()
    return lambda: swap(message, to, received)()


def _stays(rows: Tensor, _to: list[int], _received: list[int]) -> Callable[[], Tensor]:
    return lambda: rows


def _ms(call: Callable[[], object], device: str) -> float:
    """Mean milliseconds of a call that all ranks make together."""
    for _ in range(2):
        call()
    dist.barrier()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(REPEATS):
        call()
    wait_for(device)
    return (time.perf_counter() - start) / REPEATS * 1e3


def normal(*shape: int, seed: int, device: str) -> Tensor:
    """float32 numbers, those of a seed, with a standard deviation of the last size ** -0.5."""
    g = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=g, device=device).mul_(float(shape[-1]) ** -0.5)
