"""How many lanes fit and how many are fastest: a model from two peaks, and a search that stops where nothing is won."""

import re
import subprocess
import sys

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.sweeps.planning import estimate
from fp4dse.tasks import get_task, train, worker
from fp4dse.tasks.engine import Population, evaluation, lane_counts
from fp4dse.tasks.engine.lane_counts import Memory, lanes_of, memory_of, plan_lanes, search_lanes
from fp4dse.tasks.job import Job

TASK, RECIPES = get_task("regression", "smoke"), [Recipe.named("bf16")]


def test_lanes_fit_into_the_planned_share_of_the_memory():
    model = Memory(fixed=1000, per_lane=100)
    assert model.lanes(2000 / lane_counts.SHARE) == 10
    assert model.lanes(1150 / lane_counts.SHARE) == 1
    assert model.lanes(1050 / lane_counts.SHARE) == 0


def test_the_model_follows_from_two_peaks(monkeypatch):
    monkeypatch.setattr(lane_counts, "peak_bytes", lambda task, recipes, device, lanes: 500 + 70 * lanes)
    assert memory_of(TASK, RECIPES, "cpu") == Memory(500, 70)
    assert plan_lanes(TASK, RECIPES, "cpu", memory=1200 / lane_counts.SHARE) == 10


@pytest.mark.parametrize(("room", "fit"), [(3, 3), (1, 1), (0.9, 0)])
def test_where_a_few_lanes_are_too_many_one_tells_how_many_fit(monkeypatch, room, fit):
    """A device that holds `room` lanes of 1000 bytes."""

    def peak(task, recipes, device, lanes):
        if lanes > room:
            raise torch.OutOfMemoryError
        return 1000 * lanes

    monkeypatch.setattr(lane_counts, "peak_bytes", peak)
    assert plan_lanes(TASK, RECIPES, "cpu", memory=1000 * room / lane_counts.SHARE) == fit


def test_what_does_not_grow_does_not_hide_what_does(monkeypatch):
    monkeypatch.setattr(lane_counts, "peak_bytes", lambda task, recipes, device, lanes: max(5000, 100 + 150 * lanes))
    assert memory_of(TASK, RECIPES, "cpu").per_lane == pytest.approx(150, rel=0.4)


PEAKS = """
from fp4dse.dse import Recipe
from fp4dse.tasks import get_task
from fp4dse.tasks.engine.lane_counts import peak_bytes

print([peak_bytes(get_task("regression", "smoke"), [Recipe.named("bf16")], "cpu", lanes) for lanes in (2, 400)])
"""


@pytest.mark.heavy
def test_the_peak_of_a_real_population_grows_with_its_lanes():
    """In a process of its own: memory that was freed before would be taken first."""
    found = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True).stdout
    few, many = map(int, re.findall(r"\d+", found))
    assert many > few


def test_the_search_stops_where_nothing_is_won(monkeypatch):
    asked = []

    def rate(task, recipes, device, lanes):
        asked.append(lanes)
        return {8: 100.0, 16: 190.0, 32: 300.0, 64: 301.0}[lanes]

    monkeypatch.setattr(lane_counts, "lanes_per_second", rate)
    monkeypatch.setattr(lane_counts, "peak_bytes", lambda task, recipes, device, lanes: 10 * lanes)
    assert list(search_lanes(TASK, RECIPES, "cpu", None, 512, 8))[-1] == 32
    assert asked == [8, 16, 32, 64]


def test_the_search_ends_with_the_memory(monkeypatch):
    monkeypatch.setattr(lane_counts, "lanes_per_second", lambda task, recipes, device, lanes: float(lanes))
    monkeypatch.setattr(lane_counts, "peak_bytes", lambda task, recipes, device, lanes: 10 * lanes)
    assert list(search_lanes(TASK, RECIPES, "cpu", 350, 512, 8))[-1] == 16


def test_measured_lanes_have_few_seeds_and_every_recipe():
    recipes = [Recipe.named(name) for name in ("nvfp4", "nvfp4-sr")]
    lanes = lanes_of(TASK, recipes, 10)
    assert len(set(lanes)) == 10
    assert {lane.seed for lane in lanes} == {0, 1, 2, 3}
    assert {lane.recipe for lane in lanes} == set(recipes)


@pytest.fixture
def small_card(monkeypatch):
    """A GPU of 16 GiB, of which a job has taken 14."""
    monkeypatch.setattr(lane_counts, "total_memory", lambda device: 16 << 30)
    monkeypatch.setattr(lane_counts, "free_memory", lambda device: 1 << 30)
    monkeypatch.setattr(lane_counts, "_reserved", lambda device, now=False: 14 << 30)
    monkeypatch.setattr(lane_counts, "_name", lambda device: "a small card")


def test_what_does_not_fit_says_what_would_help(small_card):
    task = msgspec.structs.replace(TASK, batch=32)
    taken = "more than the 16.0 GiB of a small card (taken: 14.0 GiB by this job, 1.0 GiB by others)"
    said = lane_counts.why_not_fit(task, lanes_of(task, RECIPES, 64), "cuda")
    assert said == f"out of memory: 64 lanes of regression:smoke want {taken}"
    parts = "training.accumulate = 2 or more (batches in parts of 16)"
    said = lane_counts.why_not_fit(task, lanes_of(task, RECIPES, 1), "cuda")
    wants = f"out of memory: one lane of regression:smoke wants {taken}; what would help:"
    assert said == f"{wants} --task regression:smoke+bf16, {parts}, a device with more memory"
    inside = msgspec.structs.replace(task, preset="smoke+swiglu8", swiglu8=True)
    said = lane_counts.why_not_fit(inside, lanes_of(task, RECIPES, 1), "cuda")
    assert "--task regression:smoke+bf16+swiglu8," in said
    narrow = msgspec.structs.replace(task, dtype="bfloat16", batch=33)
    assert lane_counts.why_not_fit(narrow, lanes_of(task, RECIPES, 1), "cuda") == f"{wants} a device with more memory"


def test_a_card_is_a_jobs_own_unless_others_have_a_tenth_of_it(small_card, monkeypatch):
    assert lane_counts.is_alone_on("cuda")
    monkeypatch.setattr(lane_counts, "_reserved", lambda device, now=False: 12 << 30)
    assert not lane_counts.is_alone_on("cuda")
    assert not lane_counts.is_alone_on("cpu")


@pytest.mark.parametrize(("count", "alone", "code"), [(2, True, 17), (1, True, 20), (1, False, 17)])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("all gone"), RuntimeError("can't allocate memory: all gone")])
def test_a_worker_tells_what_will_never_fit(monkeypatch, tmp_path, capsys, count, alone, code, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(worker, "train", fail)
    monkeypatch.setattr(worker, "is_alone_on", lambda device: alone)
    monkeypatch.setattr(worker, "environment", lambda *_: {})
    job = Job("regression", "smoke", lanes_of(TASK, RECIPES, count), threads=torch.get_num_threads())
    assert worker.run(job, tmp_path / "out.json") == code
    *_, first, last = capsys.readouterr().err.splitlines()
    assert "all gone" in first
    assert last.startswith(f"out of memory: {'one lane' if count == 1 else '2 lanes'} of regression:smoke want")


@pytest.mark.parametrize(("device", "alone", "code"), [("cuda", True, 17), ("cuda", False, 21), ("cpu", False, 17)])
def test_a_worker_tells_what_found_no_room_beside_others(monkeypatch, device, alone, code):
    monkeypatch.setattr(worker, "why_not_fit", lambda *_: "")
    monkeypatch.setattr(worker, "is_alone_on", lambda device: alone)
    job = Job("regression", "smoke", lanes_of(TASK, RECIPES, 2), device=device)
    assert worker._without_memory(TASK, job, MemoryError()) == code


def test_what_might_not_fit_is_evaluated_before_the_training(monkeypatch):
    """A pass that runs out of memory ends the training after its first steps; one that does not changes nothing."""
    monkeypatch.setattr(evaluation, "is_tight", lambda population: False)
    lanes = lanes_of(TASK, [Recipe.named("nvfp4-sr")], 2)
    expected = train(TASK, lanes).lanes
    monkeypatch.setattr(evaluation, "is_tight", lambda population: True)
    assert train(TASK, lanes).lanes == expected

    def gone(population, start):
        raise torch.OutOfMemoryError

    done: list[int] = []
    train_step = Population.train_step
    monkeypatch.setattr(evaluation, "_pass", gone)
    monkeypatch.setattr(Population, "train_step", lambda self, step: done.append(step) or train_step(self, step))
    with pytest.raises(torch.OutOfMemoryError):
        train(TASK, lanes)
    assert done == [0, 1, 2, 3]


def test_an_estimate_halves_its_lanes_and_refuses_what_fits_nowhere(monkeypatch):
    tried = []

    def measured(job):
        tried.append(len(job.lanes))
        return [(1.0, 1.0, 100)] * 3 if len(job.lanes) <= fits else "out of memory: it is large"

    monkeypatch.setattr(estimate, "_in_a_process", measured)
    job = Job("regression", "smoke", lanes_of(TASK, RECIPES, 5))
    fits = 2
    assert "of 2 lanes" in estimate.calibrate(job, 100).source
    fits = 0
    with pytest.raises(ConfigError, match=r"--task: found .*; accepted: what fits \(out of memory: it is large\)"):
        estimate.calibrate(job, 100)
    assert tried == [5, 2, 5, 2, 1]
