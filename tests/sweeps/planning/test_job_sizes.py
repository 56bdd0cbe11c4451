"""How many lanes a job has at most is measured where it is worth it, once, and said in words."""

import subprocess
import sys

import msgspec
import pytest

from fp4dse.dse import Recipe
from fp4dse.sweeps import plan_sweep, run_sweep
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.sweeps.planning import job_sizes
from fp4dse.sweeps.planning.plan import JOB_LANES
from fp4dse.sweeps.planning.setting import find_setting
from fp4dse.tasks.job import WORKER, Job, Lane

TASK = ("regression", "smoke")
RECIPES = [Recipe.named("nvfp4"), Recipe.named("nvfp4-sr")]
JOB = Job("regression", "smoke", [Lane(recipe.canonical(), 0.1, 0) for recipe in RECIPES])


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """What was measured; every sweep is long, and 24 lanes are the best."""
    asked = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(job_sizes, "measure", lambda job, variables, share: asked.append((job, variables, share)) or 24)
    monkeypatch.setitem(job_sizes.LONG, "cpu", 0)
    return asked


def plan(tmp_path, **more):
    return plan_sweep(RECIPES, tasks=[TASK], seeds=range(200), store=tmp_path / "none", jobs=2, **more)


def longest(planned) -> int:
    return max(len(job.lanes) for job in planned.jobs)


def test_a_long_sweep_measures_once_and_plans_by_it(tmp_path, measured):
    assert longest(plan(tmp_path)) > 24
    for _ in range(2):
        assert longest(plan(tmp_path, measure=True)) <= 24
    assert longest(plan(tmp_path)) <= 24
    [(job, variables, share)] = measured
    assert not job.lanes[0].recipe.is_plain
    assert (variables, share) == ({"CUDA_VISIBLE_DEVICES": ""}, 2)


def test_with_more_workers_on_the_device_it_is_another_question(tmp_path, measured):
    plan(tmp_path, measure=True)
    plan_sweep(RECIPES, tasks=[TASK], seeds=range(200), store=tmp_path / "none", jobs=3, measure=True)
    assert [share for *_, share in measured] == [2, 3]


def test_a_short_sweep_does_not_measure(tmp_path, measured, monkeypatch):
    monkeypatch.setitem(job_sizes.LONG, "cpu", 100_000)
    assert longest(plan(tmp_path, measure=True)) > 24
    assert not measured


def test_of_several_kinds_of_cards_the_smallest_number_counts(measured, monkeypatch):
    found = find_setting([TASK], jobs=3)
    cards = [{"CARD": "0"}, {"CARD": "1"}, {"CARD": "0"}]
    found.machine = Machine("cpu", 1, cards, ("A", "B", "A"))
    monkeypatch.setattr(job_sizes, "measure", lambda job, variables, share: {"0": 32, "1": 8}[variables["CARD"]])
    assert job_sizes.measure_sizes(found, found.plan(RECIPES, [0], None, set()))
    assert found.sizes == {TASK: 8}
    assert not job_sizes.measure_sizes(found, found.plan(RECIPES, [0], None, set()))


def test_the_plan_says_why(tmp_path, measured, monkeypatch):
    most = JOB_LANES["cpu"][1]
    assert plan(tmp_path).sizes == {
        "regression:smoke": f"at most {most}: the fastest is measured when the sweep starts"
    }
    assert plan(tmp_path, measure=True).facts()["lanes_per_job"] == {
        "regression:smoke": "at most 24: the fastest here, measured"
    }
    assert "others hand the workers out" in plan(tmp_path, executor="ray").sizes["regression:smoke"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr(job_sizes, "measure", lambda *_: job_sizes.TOO_LONG)
    said = f"at most {most}: the fastest could not be measured within 60 s"
    assert plan(tmp_path, measure=True).sizes["regression:smoke"] == said
    monkeypatch.setitem(job_sizes.LONG, "cpu", 100_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert "as short as this" in plan(tmp_path).sizes["regression:smoke"]


def test_a_sweep_tells_that_it_measures_and_fakes_are_not_measured(tmp_path, measured, monkeypatch):
    phases = []
    fake = (sys.executable, "-c", "raise SystemExit(1)")
    asked = {"tasks": [TASK], "seeds": [0], "jobs": 1, "backoff_s": 0.01}
    run_sweep(RECIPES, store=tmp_path / "fake", worker=fake, **asked)
    assert not measured
    tell = lambda state: phases.extend(job.phase for job in state.running)  # noqa: E731
    run_sweep(RECIPES, store=tmp_path / "real", worker=WORKER, budget_s=0.0, progress=tell, **asked)
    assert len(measured) == 1
    assert phases[0] == "measuring how many lanes are fastest"


def script(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_where_time_is_up_the_best_so_far_counts(monkeypatch):
    monkeypatch.setattr(job_sizes, "LIMIT_S", 1.5)
    monkeypatch.setattr(job_sizes, "COMMAND", script("import time; print(8); print(16, flush=True); time.sleep(60)"))
    assert job_sizes.measure(JOB, {}, 1) == 16
    monkeypatch.setattr(job_sizes, "LIMIT_S", 0.1)
    monkeypatch.setattr(job_sizes, "COMMAND", script("import time; time.sleep(60)"))
    assert job_sizes.measure(JOB, {}, 1) == job_sizes.TOO_LONG


def test_what_went_wrong_is_told_and_the_sweep_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(job_sizes.LONG, "cpu", 0)
    monkeypatch.setattr(job_sizes, "COMMAND", script("raise ValueError('no such layer')"))
    planned = plan(tmp_path, measure=True)
    assert longest(planned) > 24
    assert "could not be measured" in planned.sizes["regression:smoke"]
    assert "regression:smoke: ValueError: no such layer" in caplog.text


@pytest.mark.slow
def test_the_process_that_measures_answers_with_numbers_in_its_bounds():
    command = [*job_sizes.COMMAND, "2", "8", "1"]
    done = subprocess.run(command, input=msgspec.json.encode(JOB), capture_output=True, check=True)
    numbers = [int(line) for line in done.stdout.split()]
    assert set(numbers) <= {2, 4, 8}
    assert numbers == sorted(numbers)
