"""Lanes leave a running population and trainings end at any moment, and no trajectory changes."""

import signal
import time
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.kernels import native
from fp4dse.kernels.quant.backend import _eager
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.engine import Population, Pruning, Stopped
from fp4dse.tasks.engine.loss_record import LossRecord
from fp4dse.tasks.engine.recent import BUFFERED_STEPS
from fp4dse.tasks.job import Rung
from tests.forked import Forked

STATEFUL = [
    ["nvfp4-sr", "nvfp4"],
    ["tetrajet-qema", "tetrajet"],  # moving averages
    ["ue5m3-graphcore"],  # held maxima
    ["quartet2"],
    ["wang-dge-occ"],
    ["averis"],
    ["metis"],
    ["pact"],  # a clip that is trained
    ["tetrajet2-outcontrol"],  # channels held from step to step
    ["luq"],
    ["sun-radix4"],
    ["hif4-ascend"],
]


def task_of(name="regression", steps=12):
    return msgspec.structs.replace(get_task(name, "smoke"), steps=steps)


def lanes_of(names=("nvfp4-sr", "nvfp4"), seeds=(0, 1, 2), lr=2e-3):
    return [Lane(Recipe.named(name), lr * (1 + seed / 4), seed) for name in names for seed in seeds]


def run(population, first, last):
    for step in range(first, last):
        population.train_step(step)


@pytest.mark.parametrize("names", STATEFUL, ids="+".join)
def test_lanes_that_stay_do_not_notice_that_others_leave(names):
    """Nor those that change places; one of them goes on alone."""
    task, lanes = task_of(), lanes_of(names)
    whole, fewer = (Population(task, lanes, "cpu") for _ in range(2))
    run(whole, 0, 9)
    stay = [1, len(lanes) - 1, 0]
    run(fewer, 0, 5)
    fewer.keep(stay, 5)
    assert fewer.lanes == [lanes[i] for i in stay]
    run(fewer, 5, 9)
    assert_equal_state(fewer, whole, stay, 9)
    fewer.keep([0], 9)
    for population in (fewer, whole):
        run(population, 9, task.steps)
    assert_equal_state(fewer, whole, stay[:1], task.steps)


def assert_equal_state(fewer, whole, stay, steps):
    expected = whole.state(steps)
    for name, value in fewer.state(steps).items():  # NaN: points of the curve that are still to come
        torch.testing.assert_close(value, expected[name][stay], rtol=0, atol=0, equal_nan=True, msg=name)


def test_a_population_has_a_lane():
    population = Population(task_of(), lanes_of(), "cpu")
    with pytest.raises(ValueError, match="positions: found none; accepted: one or more"):
        population.keep([], 0)


def test_a_population_holds_all_that_its_future_depends_on():
    """Written into a new one, which then has the same future."""
    task, lanes = task_of("vision"), lanes_of(["ue5m3-graphcore"])
    first, second = (Population(task, lanes, "cpu") for _ in range(2))
    run(first, 0, 5)
    second.load_state({name: value.clone() for name, value in first.state(5).items()}, 5)
    for population in (first, second):
        run(population, 5, task.steps)
    expected = first.state(task.steps)
    assert {name: len(value) for name, value in expected.items()} == dict.fromkeys(expected, len(lanes))
    for name, value in second.state(task.steps).items():
        assert torch.equal(value, expected[name]), name
    with pytest.raises(ValueError, match="optimizer: found"):
        second.load_state({name: value for name, value in expected.items() if "mean" not in name}, task.steps)


def best(losses, overheads, seeds, lrs, keep, recipes):
    order = sorted((i for i, loss in enumerate(losses) if loss is not None), key=losses.__getitem__)
    return [i in order[: max(1, round(keep * len(order)))] for i in range(len(losses))]


@pytest.mark.parametrize("name", ["regression", "vision"])
def test_rungs_drop_lanes_and_leave_the_others_their_results(name):
    task, lanes = task_of(name), lanes_of()
    lanes.insert(2, Lane(lanes[0].recipe, 1e30, 7))  # diverges
    plain = train(task, lanes).lanes
    pruned = train(task, lanes, pruning=Pruning([Rung(4, 0.5), Rung(8, 0.4)], best))
    statuses = [lane.status for lane in pruned.lanes]
    assert (statuses[2], statuses.count("done"), statuses.count("pruned")) == ("diverged", 1, 5)
    for there, here in zip(plain, pruned.lanes, strict=True):
        if here.status == "pruned":
            assert here.pruned_step in (4, 8)
            assert here.val_loss is not None
            assert here.curve_step[-1] <= here.pruned_step
            assert here.curve_loss == there.curve_loss[: len(here.curve_loss)]
        else:
            assert here == there


def test_lanes_are_ranked_by_what_belongs_to_them():
    task, lanes = task_of(), lanes_of(("nvfp4",))
    lanes.append(Lane(lanes[0].recipe, 1e30, 7))  # diverges
    seen = []

    def rank(*of_lanes):
        seen.append(of_lanes)
        return [True, False, True, True]

    pruning = Pruning([Rung(4, 0.7)], rank, overheads=[1, 2, 3, 4])
    statuses = [lane.status for lane in train(task, lanes, pruning=pruning).lanes]
    assert statuses == ["done", "pruned", "done", "diverged"]
    ((losses, *rest),) = seen
    curves = [lane.curve_loss for lane in train(msgspec.structs.replace(task, steps=4), lanes).lanes]
    assert losses[:3] == pytest.approx([sum(curve[2:4]) / 2 for curve in curves[:3]])
    assert losses[3] is None
    one = [lanes[0].recipe.config_id] * 4
    assert rest == [[1, 2, 3, 4], [0, 1, 2, 7], [lane.lr for lane in lanes], 0.7, one]


@pytest.mark.parametrize("step", [12, 20])
def test_a_rung_lies_within_the_training(step):
    with pytest.raises(ConfigError, match=f"rungs: found {step}; accepted: steps between 1 and 11"):
        train(task_of(), lanes_of(), pruning=Pruning([Rung(step, 0.5)], best))


@pytest.mark.heavy
def test_a_population_of_the_dead_is_not_trained_to_the_end(monkeypatch):
    task = task_of(steps=BUFFERED_STEPS + 40)
    calm = lanes_of(("bf16",), seeds=(0,))
    wild = [Lane(calm[0].recipe, 1e30, seed) for seed in (1, 2)]
    taken = []
    one_step = Population.train_step
    monkeypatch.setattr(Population, "train_step", lambda p, step: (taken.append(len(p.lanes)), one_step(p, step)))
    assert [lane.status for lane in train(task, wild).lanes] == ["diverged"] * 2
    assert len(taken) == BUFFERED_STEPS
    taken.clear()
    mixed = train(task, [*wild, *calm]).lanes
    assert taken == [3] * BUFFERED_STEPS + [1] * 40
    assert mixed[2] == train(task, calm).lanes[0]


def test_what_is_recorded_does_not_depend_on_when_it_is_fetched():
    steps, ended = 700, torch.tensor([-1, 300])
    losses = torch.rand(steps, 2)
    losses[300:, 1] = torch.nan
    states = []
    for often in (BUFFERED_STEPS, 1, 37):
        record = LossRecord(steps, 2, "cpu")
        for step in range(steps):
            record.write(torch.tensor(step), losses[step])
            if (step + 1) % often == 0:
                record.fetch(step + 1, ended)
        record.fetch(steps, ended)
        states.append(record.state())
    for state in states:
        assert torch.equal(state["least"], torch.stack([losses[:, 0].min(), losses[:300, 1].min()]))
        assert all(torch.equal(v.nan_to_num(9), states[0][k].nan_to_num(9)) for k, v in state.items())
        assert state["last"][0].item() / 70 == pytest.approx(losses[-70:, 0].mean().item())  # a tenth
        assert torch.equal(state["curve"][0], losses[record.points, 0])


class After:
    """A reason to stop after so many questions."""

    def __init__(self, steps):
        self.left = steps

    def __call__(self):
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("names", [["nvfp4-sr", "nvfp4"], ["ue5m3-graphcore"], ["tetrajet-qema"]], ids="+".join)
def test_a_training_that_is_stopped_again_and_again_ends_the_same(names, tmp_path):
    task, lanes = task_of(), lanes_of(names, seeds=(0, 1))
    pruning = Pruning([Rung(6, 0.5)], best)
    expected = train(task, lanes, pruning=pruning).lanes
    file = tmp_path / "checkpoint.pt"
    for before, stopped_after in ((0, 4), (4, 9), (9, 11)):
        stop = After(stopped_after - before)
        with pytest.raises(Stopped, match=f"after {stopped_after} of 12"):
            train(task, lanes, pruning=pruning, checkpoint=file, should_stop=stop)
    assert train(task, lanes, pruning=pruning, checkpoint=file).lanes == expected
    assert [f.name for f in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_checkpoint_of_another_training_is_refused(tmp_path):
    task, lanes, file = task_of(), lanes_of(), tmp_path / "checkpoint.pt"
    with pytest.raises(Stopped):
        train(task, lanes, checkpoint=file, should_stop=After(3))
    with pytest.raises(ConfigError, match=r"lanes of the checkpoint .* \(or delete the file\)"):
        train(task, lanes[1:], checkpoint=file)
    with pytest.raises(ConfigError, match="task of the checkpoint"):
        train(task_of(steps=13), lanes, checkpoint=file)


def trained(checkpoint: Path | None) -> str:
    task = msgspec.structs.replace(get_task("regression", "smoke"), steps=150)
    lanes = [Lane(Recipe.named("ue5m3-graphcore"), 2e-3, seed) for seed in (0, 1, 2)]
    return repr(train(task, lanes, checkpoint=checkpoint, save_every_s=0.02).lanes)


@pytest.mark.heavy
@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd beside CUDA survives no fork")
def test_a_training_that_is_killed_ends_the_same(tmp_path):
    """By SIGKILL, wherever it stands."""
    file, out = tmp_path / "checkpoint.pt", tmp_path / "out.txt"

    expected = trained(None)
    for _ in range(2):
        before = file.stat().st_mtime_ns if file.exists() else 0
        with Forked(lambda: out.write_text(trained(file)) and 0) as process:
            while not (file.exists() and file.stat().st_mtime_ns > before):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        assert not out.exists()
    assert torch.load(file, weights_only=True)["state"]
    assert trained(file) == expected


@pytest.mark.parametrize("name", ["regression", "vision"])
def test_native_training_has_the_bits_of_the_reference(name, monkeypatch):
    task, lanes = task_of(name, 6), lanes_of()
    assert native.why_not_native() is None
    taken = train(task, lanes).lanes
    monkeypatch.setattr("fp4dse.kernels.lanes.backend", lambda device: _eager())
    monkeypatch.setattr(native, "takes", lambda x: False)
    assert train(task, lanes).lanes == taken
