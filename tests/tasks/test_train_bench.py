"""The training benchmark: its baseline does what it stands for, and what cannot be measured says why."""

import gc
import weakref
from functools import partial

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, SLOTS, ConfigError, Recipe
from fp4dse.kernels import dispatch, quantize
from fp4dse.tasks import get_task
from fp4dse.tasks.bench import baseline, compiled, on_cpu, on_gpu, peers, side_by_side, speed, step_time
from fp4dse.tasks.bench.in_time import WAYS, Found, Tried
from fp4dse.tasks.bench.recipes import APART, with_amax
from fp4dse.tasks.bench.row import Measure, Row, measured
from fp4dse.tasks.engine.lane_counts import lanes_of
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.task import with_steps


def test_the_baseline_quantizes_as_the_engine_does():
    x = torch.randn(64, 96)
    ours = quantize(x, Recipe.named("nvfp4").slot("fprop.x")).values
    theirs = baseline.nvfp4(x)
    differs = ours != theirs
    assert (ours - theirs).abs()[differs].sum() < 1e-5 * ours.abs().sum()


@pytest.mark.parametrize("name", ["regression", "vision"])
def test_the_baseline_trains_every_task(name):
    assert baseline.seconds_per_step(get_task(name, "smoke"), "cpu", steps=1, warm_up=1, rounds=1) > 0


def test_recipes_change_what_their_tensor_scales_follow_alone():
    recipe = Recipe.named("nvidia-nvfp4")
    held = with_amax(recipe, "held")
    assert all(held.slot(slot).tensor_scale.amax == "held" for slot in SLOTS)
    assert with_amax(held, "current") == recipe
    assert held.rotation("wgrad") == recipe.rotation("wgrad")


def test_a_task_that_is_not_there_is_skipped_with_the_reason():
    row = measured(Measure("what", "×", "≤ 2", lambda: get_task("poetry", "small").lr))
    assert row.value is None
    assert row.reached is None
    assert "found 'poetry'" in row.note


def test_the_row_of_the_attention_core_says_which_path_was_taken(monkeypatch):
    monkeypatch.setattr(on_gpu, "step_us", lambda *_: 1.0)
    rows = [measure.value() for measure in on_gpu.layers("cpu") if "a core in" in measure.what]
    assert len(rows) == 2
    assert all(value == 1.0 for value, _ in rows)
    assert all(
        note.startswith("attention_core: computed by torch (Triton kernels not taken on cpu") for _, note in rows
    )

    def refused(*_):
        dispatch._REFUSED["attention_core"] = "q: found none; accepted: some"
        return 1.0

    monkeypatch.setattr(on_gpu, "step_us", refused)
    (_, note), _ = (m.value() for m in on_gpu.layers("cpu") if "a core in" in m.what)
    assert note == "attention_core: computed by torch (q: found none; accepted: some)"
    dispatch.refusals()


def test_rows_come_as_they_are_measured_and_only_those_that_are_asked_for(monkeypatch):
    asked = []

    def measure(name):
        return Measure(name, "s", "", lambda: asked.append(name) or 1.0)

    monkeypatch.setattr(on_cpu, "mlps", lambda: [measure(name) for name in ("wide MLP", "decoder", "narrow MLP")])
    rows = speed.bench("cpu", ["mlp"])
    assert asked == []
    assert next(rows).what == "wide MLP"
    assert asked == ["wide MLP"]
    assert [row.what for row in rows] == ["narrow MLP"]
    with pytest.raises(ConfigError, match="--only: found 'poetry'; accepted: a part of one of wide MLP; decoder"):
        speed.bench("cpu", ["poetry"])


@pytest.fixture
def held_back():
    """Python does not look for cycles by itself, as it need not while a population is built."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.heavy
@pytest.mark.usefixtures("held_back")
def test_populations_that_a_row_compares_are_there_one_after_the_other(monkeypatch):
    """Of those before it, each finds no weight left. A row of `language:10M` on a GPU of 80 GB had no room for two."""
    weights, found = [], []

    def population(task, lanes, device):
        found.append([of() is None for of in weights])
        built = Population(task, lanes, device)
        weights.extend(map(weakref.ref, built.model.parameters()))
        return built

    monkeypatch.setattr(step_time, "Population", population)
    monkeypatch.setattr(step_time, "WARM_UP", 1)
    monkeypatch.setattr(step_time, "LEAST_S", 1e-9)
    monkeypatch.setattr(on_gpu, "get_task", lambda name, _: get_task(name, "smoke"))
    row = next(row for row in on_gpu.decoders("cpu") if row.what.startswith("language:10M, nvidia-nvfp4 held"))
    assert row.value() > 0
    before, after = found
    assert not before
    assert after
    assert all(after)


@pytest.mark.usefixtures("held_back")
@pytest.mark.parametrize("fails", [False, True])
def test_a_row_gives_its_memory_back_before_the_next(monkeypatch, fails):
    """Whether or not it was measured."""
    weights = []

    def first():
        task = get_task("regression", "smoke")
        population = Population(with_steps(task, 2), lanes_of(task, [Recipe.named("bf16")], 1), "cpu")
        weights.extend(map(weakref.ref, population.model.parameters()))
        if fails:
            raise torch.OutOfMemoryError
        return 1.0

    def second():
        return float(sum(of() is not None for of in weights))

    monkeypatch.setattr(on_cpu, "mlps", lambda: [Measure(of.__name__, "s", "", of) for of in (first, second)])
    rows = list(speed.bench("cpu"))
    assert weights
    assert [row.value for row in rows] == [None if fails else 1.0, 0.0]


@pytest.mark.parametrize(("value", "reach", "reached"), [(1.0, "≤ 2", True), (3.0, "≤ 2", False), (3.0, "≥ 2", True)])
def test_rows_say_whether_they_reach_what_is_asked(value, reach, reached):
    assert Row("what", value, "×", reach).reached is reached


def test_the_compiled_peer_quantizes_as_the_engine_does_without_a_tensor_scale():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator) * torch.exp2(torch.randint(-4, 8, (64, 1), generator=generator))
    q = msgspec.structs.replace(QUANTIZERS["nvfp4"], tensor_scale=None)
    ours, theirs = quantize(x, q).values, compiled.nvfp4(x).float()
    assert (ours != theirs).float().mean() < 5e-3  # a quotient in place of a product, near a tie
    assert (ours - theirs).abs().sum() < 1e-3 * ours.abs().sum()


@pytest.mark.parametrize("name", ["regression", "language", "vision"])
def test_the_compiled_peer_has_the_model_of_the_task_and_learns(name):
    task = get_task(name, "smoke")
    peer = compiled.Peer(task, 2, "cpu", "nothing")
    population = Population(with_steps(task, 2), lanes_of(task, [Recipe.named("bf16")], 1), "cpu")
    problem, rows = task.problem([0]), torch.arange(task.batch)
    x, y = problem.train_x[:, rows], problem.train_y[:, rows]
    inputs, targets = task.prepare(x, y, population.draws) if task.prepare else (x, y)
    ours = task.loss(population.model(inputs), targets).mean()
    two = rows.expand(2, -1)
    theirs = peer.loss_of(peer.parameters, peer.x[two], peer.y[two]) / 2
    assert theirs.item() == pytest.approx(ours.item(), rel=0.02)
    losses = [peer.step().item() for _ in range(12)]
    assert sum(losses[-3:]) < sum(losses[:3])


def test_the_compiled_peer_names_the_tasks_that_it_has():
    with pytest.raises(ConfigError, match="found 'diffusion:smoke'"):
        compiled.Peer(get_task("diffusion", "smoke"), 2, "cpu", "all")


def test_a_peer_that_did_not_compile_in_time_costs_its_rows_alone_and_once(monkeypatch):
    asked = []

    def least_us(work, device):
        asked.append(work.args)
        slow = work.args[0][0] == "language"
        return Found((Tried("as it comes", None if slow else 640.0, 240.0, "not compiled in 240 s" if slow else ""),))

    monkeypatch.setattr(peers, "least_us", least_us)
    monkeypatch.setattr(peers, "step_us", lambda *_: 320.0)
    rows = {row.what: row for row in map(measured, peers.against_compiled("cuda"))}
    mlp = rows["regression:mlp, bf16, L = 64, against equal lanes by torch.compile"]
    assert mlp.value == 2.0
    assert mlp.note == "µs a lane and step: 10.0 compiled, 5.0 ours; all lanes as it comes 640 µs after 240 s"
    decoder = rows["language:350M+bf16, bf16, step over that of torch.compile in BF16"]
    assert decoder.value is None
    assert decoder.note == "skipped: torch.compile: as it comes: not compiled in 240 s"
    assert len(asked) == len(set(asked)) == 8, "rows of one peer share it, in time or not"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # torch's compiler in 2.11 has both
@pytest.mark.parametrize("quantized", ["nothing", "blocks"])
def test_the_compiled_peer_learns_in_a_graph(quantized):
    compile_ = partial(torch.compile, options=dict(WAYS[-1].options), dynamic=False)
    peer = compiled.Peer(get_task("regression", "smoke"), 4, "cuda", quantized, compile_)
    losses = [peer.step().item() for _ in range(60)]
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_the_rows_of_a_gpu_ask_for_these_bounds():
    reach = {row.what: row.reach for rows in speed.ON_GPU for row in rows("cuda")}
    compiled_too = {name: bound for name, bound in reach.items() if "torch.compile" in name}
    asked = {name: bound for name, bound in reach.items() if bound and name not in compiled_too}
    between = ", nvidia-nvfp4 held against bf16, L = "
    rows = {
        "MLP, bf16, L = 64": "≤ 7.5",
        "MLP, nvfp4 held, L = 64": "≤ 8.5",
        "MLP+bf16, bf16, L = 64": "≤ 7.5",
        "MLP+bf16, nvfp4 held, L = 64": "≤ 8.5",
        f"language:10M{between}16": "≤ 1.10",
        f"language:350M{between}1": "≤ 1.15",
        "language:350M+bf16, mxfp4 through FP8 units against bf16, L = 1": "≤ 1",
        "language:3M, ten populations of 4 lanes in ten workers against one of 36 in nvfp4, tokens a second": "≥ 0.7",
    }
    assert rows.items() <= asked.items()
    for what, bound in {
        "regression:mlp, nvfp4 held, L = 64, against equal lanes": "≥ 2",
        "vision:small, nvfp4 held, L = 64, against equal lanes": "≥ 1.5",
        "language:10M, nvfp4 held, L = 16, against equal lanes": "≥ 1.5",
        "language:350M+bf16, bf16, step over": "≤ 1",
        "language:350M+bf16, nvidia-nvfp4 held, step over": "≤ 1.15",
        "language:350M+bf16, nvfp4-sr-rht in all layers, step over": "≤ 1",
    }.items():
        assert [found for name, found in compiled_too.items() if name.startswith(what)] == [bound]


def test_the_row_of_fp8_units_times_them(monkeypatch):
    asked = []

    def step_us(task, recipe, *_):
        asked.append((task.preset, recipe.label()))
        return 2000.0 if recipe.gemm == "fp8-exact" else 1000.0

    monkeypatch.setattr(on_gpu, "step_us", step_us)
    (row,) = (row for row in on_gpu.decoders("cuda") if "FP8 units" in row.what)
    assert row.value() == (2.0, "ms a step: 2.0, bf16 1.0")
    assert {preset for preset, _ in asked} == {"350M+bf16"}


def test_recipes_that_train_apart_cannot_train_together():
    assert len({Recipe.named(name).signature() for name in APART}) == len(APART) == 10


@pytest.mark.slow
def test_populations_side_by_side_count_the_tokens_of_all():
    found = side_by_side.tokens_per_second(("language", "smoke"), ["nvfp4", "mxfp4"], 1, "cpu", least_s=0.05, warm_up=1)
    assert found > 0


@pytest.mark.slow
def test_a_population_that_fails_ends_those_beside_it():
    with pytest.raises(RuntimeError, match="found 'poetry'"):
        side_by_side.tokens_per_second(("language", "smoke"), ["nvfp4", "poetry"], 1, "cpu", least_s=0.05, warm_up=1)
