"""Tokens reach experts on other ranks packed, with the bits that one process has, and as few bytes as their formats."""

import os
import threading

import pytest
import torch

from fp4dse.dse import ConfigError, Quantizer, Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.kernels import LaneNumerics, QuantLinear
from fp4dse.kernels.experts import expert_products, group_layers
from fp4dse.tasks.bench import exchange
from fp4dse.tasks.bench.exchange import CPU, GPU, Layer, bench, spawn
from fp4dse.tasks.language.expert_parallel import (
    Exchange,
    Formats,
    make_plan,
    swap_over,
)
from fp4dse.tasks.language.experts import _GatherRows, dispatch
from tests.forked_workers import fork_ranks

LANES, TOKENS, WIDTH, EXPERTS, CHOICES, ROOM = 2, 32, 128, 4, 2, 16
PLAIN = Quantizer(element="none")
EXACT = Formats(results=PLAIN, g=PLAIN, gradients=PLAIN)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X, G = randn(LANES, TOKENS, WIDTH), randn(LANES, TOKENS, WIDTH, seed=1)


def routed(choices):
    """Shares [L, M, k] and chosen experts [L, M, k] of so many choices of a token."""
    scores = randn(LANES, TOKENS, EXPERTS, seed=3).add(torch.tensor([1.5, 0, 0, 0]))
    return torch.softmax(randn(LANES, TOKENS, choices, seed=2), -1), scores.topk(choices).indices


_, CHOSEN = routed(CHOICES)


class OfRank:
    """The experts of one rank: a product each, in the recipe of 2603.02731, and its part of the batch."""

    def __init__(self, rank, ranks, recipe="hopper-moe-fp4", choices=CHOICES):
        numerics = LaneNumerics([Recipe.named(recipe).canonical()] * LANES, [0, 1])
        first, count = rank * EXPERTS // ranks, EXPERTS // ranks
        place = Place("mlp", 0, 1, "up", True)
        weights = [randn(LANES, WIDTH, WIDTH, seed=10 + first + e) for e in range(count)]
        self.layers = [QuantLinear(w, None, numerics, e, place) for e, w in enumerate(weights)]
        group_layers(self.layers, first)
        self.rank, self.ranks, self.choices = rank, ranks, choices
        shares, self.of_all = routed(choices)
        own = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)
        self.x, self.g, self.shares = (of[:, own] for of in (X, G, shares))

    def run(self, swap, formats=EXACT):
        """Outputs, gradients of x and of each weight, and bytes sent."""
        _, _, choices_of, filled = dispatch(self.of_all, EXPERTS, ROOM)
        plan = make_plan(choices_of, TOKENS, self.choices, ROOM, (self.rank, self.ranks))
        exchange = Exchange(swap, self.rank, formats)
        x = self.x.clone().requires_grad_()
        here = filled.unflatten(1, (self.ranks, -1))[:, self.rank]
        results = expert_products(exchange.end(exchange.begin(x, plan)), self.layers, here)
        back = exchange.combine(results, plan)
        y = sum(back[:, :, n] * self.shares[:, :, n, None] for n in range(self.choices))
        y.backward(self.g)
        return y.detach(), x.grad, torch.stack([layer.weight.grad for layer in self.layers], 1), exchange.sent


def alone(recipe="hopper-moe-fp4", choices=CHOICES):
    """The same in one process, whose tokens go to experts as `Experts` sends them: FP32, never packed."""
    of, x = OfRank(0, 1, recipe, choices), X.clone().requires_grad_()
    positions, tokens_of, choices_of, filled = dispatch(of.of_all, EXPERTS, ROOM)
    sent = _GatherRows.apply(x, tokens_of, positions).view(LANES, EXPERTS, ROOM, WIDTH)
    made = expert_products(sent, of.layers, filled).flatten(1, 2)
    back = _GatherRows.apply(made, positions.flatten(1), choices_of[..., None]).unflatten(1, (TOKENS, choices))
    y = sum(back[:, :, n] * of.shares[:, :, n, None] for n in range(choices))
    y.backward(G)
    return y.detach(), x.grad, torch.stack([layer.weight.grad for layer in of.layers], 1)


def on_threads(ranks, formats=EXACT, **more):
    """The same on so many ranks, each a thread."""
    box, meet, found = {}, threading.Barrier(ranks, timeout=60), [None] * ranks

    def swap_of(rank):
        def swap(rows, to, received):
            for other, part in enumerate(rows.split(to)):
                box[rank, other] = part
            meet.wait()
            came = [box[other, rank] for other in range(ranks)]
            meet.wait()
            assert [len(part) for part in came] == received
            whole = torch.cat(came)
            return lambda: whole

        return swap

    def work(rank):
        found[rank] = OfRank(rank, ranks, **more).run(swap_of(rank), formats)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def joined(found):
    """Outputs and gradients of all ranks, and bytes that they sent, way by way."""
    ways = found[0][3]
    return [torch.cat([of[i] for of in found], 1) for i in range(3)], {
        way: sum(of[3][way] for of in found) for way in ways
    }


@pytest.mark.parametrize("choices", [2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_has_the_bits_of_one_and_drops_what_one_drops(ranks, choices):
    """Of three choices it matters in which order their gradients are added; of two it does not."""
    one = alone(choices=choices)
    together, _ = joined(on_threads(ranks, choices=choices))
    assert all(map(torch.equal, together, one))
    _, chosen = routed(choices)
    _, _, choices_of, _ = dispatch(chosen, EXPERTS, ROOM)
    assert (choices_of < choices * TOKENS).sum() < chosen.numel()


def test_experts_draw_the_same_wherever_they_are():
    """Random bits and signs are those of the expert's number among all ranks'."""
    together, _ = joined(on_threads(2, Formats(*[PLAIN] * 4), recipe="nvfp4-sr-rht"))
    assert all(map(torch.equal, together, alone("nvfp4-sr-rht")))


def test_four_all_to_alls_are_counted_apart_and_dispatches_are_small():
    formats, plain = Formats(), Formats(*[Quantizer(element="bf16")] * 4)
    (y, *_), sent = joined(on_threads(2, formats))
    (_, *_), bf16 = joined(on_threads(2, plain))
    share = {way: sent[way] / bf16[way] for way in bf16}
    assert share == {
        "forward dispatch": 4.25 / 16,
        "forward combine": 1.0,
        "backward combine": 1.0,
        "backward dispatch": 8.25 / 16,
    }
    _, _, choices_of, _ = dispatch(CHOSEN, EXPERTS, ROOM)
    source, places = choices_of // CHOICES // (TOKENS // 2), torch.arange(EXPERTS * ROOM) // (EXPERTS * ROOM // 2)
    away = int(((choices_of < CHOICES * TOKENS) & (source != places)).sum())
    assert set(bf16.values()) == {away * WIDTH * 2}
    assert (y - alone()[0]).norm() < 0.01 * y.norm()  # results are rounded to BF16


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-sr", "nvfp4-2d", "fp8"])
def test_a_format_whose_rows_are_not_their_own_is_refused(name):
    q = Quantizer.named("nvfp4") if name == "nvfp4-sr" else Quantizer.named(name)
    with pytest.raises(ConfigError, match=r"formats\.g: found .*accepted: scales of their own in every row"):
        Exchange(lambda *_: None, 0, Formats(g=q))


def test_stochastic_rows_are_refused():
    q = Recipe.named("nvfp4-sr").dgrad.g
    with pytest.raises(ConfigError, match="rounding to nearest"):
        Exchange(lambda *_: None, 0, Formats(g=q))


@pytest.mark.parametrize(("tokens", "ranks", "said"), [(33, 2, "tokens"), (30, 3, "experts")])
def test_what_cannot_be_shared_out_is_refused(tokens, ranks, said):
    choices_of = torch.zeros(1, EXPERTS * ROOM, dtype=torch.int64)
    with pytest.raises(ConfigError, match=f"{said}: found"):
        make_plan(choices_of, tokens, CHOICES, ROOM, (0, ranks))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_processes_have_the_bits_of_one(device, monkeypatch):
    """By gloo and by NCCL, whether or not another expert is computed while tokens are under way."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    fork_ranks(monkeypatch, exchange)
    rows = {row.what: row for row in bench(device, 2, CPU)}
    wrong = [row.value for row in rows.values() if row.unit == "wrong"]
    assert wrong == [0] * 7
    notes = {way: rows[f"{way}: bytes to other ranks"].note for way in ("forward dispatch", "backward dispatch")}
    assert [note.split()[0] for note in notes.values()] == ["0.2656", "0.5156"]
    link = notes["forward dispatch"].split()
    assert 0 < float(link[3]) < float(link[-1])  # milliseconds of this format and of BF16, not rounded to 0
    packing = rows["forward dispatch: packing"].note.split()
    least = (CPU.tokens * 4 + CPU.tokens * CPU.choices * (1 / 2 + 1 / 32)) * CPU.width  # with all choices sent
    assert float(packing[0]) == pytest.approx(least / 1e6, rel=0.1)
    assert float(rows["weights of a rank's experts"].note.split()[-1]) > 0


@pytest.mark.parametrize("sizes", [CPU, GPU], ids=["cpu", "gpu"])
def test_no_two_sizes_of_the_bench_are_the_same(sizes):
    """So that what takes one for another fails on a CPU, too."""
    numbers = [*sizes, sizes.room(2), 2 * sizes.tokens]
    assert len({*numbers}) == len(numbers)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_one_process_has_all_rows_and_sends_nothing(monkeypatch):
    fork_ranks(monkeypatch, exchange)
    rows = {row.what: row for row in bench("cpu", 1, CPU)}
    assert [row.value for row in rows.values() if row.unit == "wrong"] == [0] * 7
    assert {row.value for row in rows.values() if row.unit == "bytes"} == {0}
    assert "peak memory of a step, shared expert meanwhile" in rows


def test_rows_of_the_bench_come_while_others_are_measured_and_no_process_is_left_behind(monkeypatch):
    started = []

    def spawned(*arguments, **more):
        started.append(spawn(*arguments, **more))
        return started[0]

    monkeypatch.setattr(exchange, "spawn", spawned)
    rows = bench("cpu", 1, CPU)
    assert next(rows).what == "choices of all ranks, gathered"
    [process] = started[0].processes
    assert process.is_alive()  # it has all else to measure
    rows.close()
    assert not process.is_alive()


class Begun(Exception):
    """Raised in place of a group's beginning."""


@pytest.mark.parametrize(("device", "own"), [("cpu", None), ("cuda", torch.device("cuda:1"))])
def test_a_group_of_gpus_is_told_which_is_the_ranks_own(monkeypatch, tmp_path, device, own):
    """Else torch guesses it at the first barrier, and warns that it does."""
    given = {}

    def begin(*_, **more):
        given.update(more)
        raise Begun

    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(exchange.dist, "init_process_group", begin)
    with pytest.raises(Begun):
        exchange._of_rank(1, 2, device, CPU, str(tmp_path))
    assert given["device_id"] == own


def test_multicast_is_off_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "of the user")
    swap_over()
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_shared_expert_is_computed_while_tokens_and_their_gradients_are_under_way(overlaps):
    """By the order of calls, as an asynchronous all-to-all would have it."""
    calls = []

    def swap(rows, to, received):
        calls.append("start")

        def arrived():
            calls.append("wait")
            return rows

        return arrived

    layer = Layer(CPU, 0, 1, "cpu")
    of_shared = layer.of_shared
    layer.of_shared = lambda x: (calls.append("shared expert"), of_shared(x))[1]
    layer.shared["up"].weight.register_hook(lambda g: calls.append("shared expert"))  # the last of its backward pass
    x = randn(1, CPU.tokens, CPU.width).requires_grad_()
    plan, filled = layer.plan(randn(1, CPU.tokens, CPU.experts).topk(CPU.choices).indices)
    y = layer(x, Exchange(swap, 0), plan, filled, overlaps)
    order = ["start", "shared expert", "wait"] if overlaps else ["start", "wait", "shared expert"]
    assert calls == [*order, "start", "wait"]
    calls.clear()
    y.sum().backward()
    assert calls[:2] == ["start", "wait"]  # of the combine
    assert overlaps == (calls[2:] == ["start", "shared expert", "wait"])
    assert sorted(calls) == ["shared expert", "start", "start", "wait", "wait"]


def test_experts_that_cannot_be_shared_out_are_refused():
    with pytest.raises(ConfigError, match="ranks: found 3; accepted: a divisor of 4"):
        next(bench("cpu", 3, CPU))
