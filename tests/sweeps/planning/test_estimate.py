"""An estimate is arithmetic on what the store knows of this kind of device, or on a short training."""

import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Space
from fp4dse.results import open_store
from fp4dse.sweeps import plan_sweep, run_sweep
from fp4dse.sweeps.planning import estimate as module
from fp4dse.sweeps.planning.estimate import Pace, estimate
from fp4dse.sweeps.planning.setting import find_setting
from fp4dse.tasks import get_task
from tests.forked_workers import fork_processes

FAKE = str(Path(__file__).parents[1] / "fake_worker.py")
TASKS = [("regression", "quickstart")]
SPACE = Space("few", axes={"*.scale": ["e4m3", "ue5m3"], "*.block": [16, 32]})


def test_time_and_memory_follow_from_the_pace(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        module, "calibrate", lambda job, steps: asked.append(steps) or Pace(10.0, 2.0, 100.0, 5.0, "here")
    )
    plan = plan_sweep(SPACE, tasks=TASKS, seeds=[0, 1], store=tmp_path / "none", jobs=2)
    found = estimate(plan, find_setting(TASKS, jobs=2))
    lanes = [len(job.lanes) for job in plan.jobs]
    assert lanes == [2, 4, 4]
    assert found.worker_seconds == 3 * 10 + 2 * sum(lanes)
    assert found.seconds == found.worker_seconds / 2
    assert found.memory_bytes == 100 + 5 * 4
    assert asked == [find_setting(TASKS).tasks[0].steps]
    assert found.facts()["estimated_from"] == {"regression:quickstart": "here"}


def test_what_the_store_knows_is_taken_and_nothing_is_trained(tmp_path, monkeypatch):
    store = tmp_path / "store"
    run_sweep(SPACE, tasks=TASKS, seeds=[0], store=store, worker=(sys.executable, FAKE, "ok"))
    monkeypatch.setattr(module, "calibrate", lambda *_: pytest.fail("trained"))
    plan = plan_sweep(SPACE, tasks=TASKS, seeds=[0, 1], store=store, jobs=1)
    found = estimate(plan, find_setting(TASKS, jobs=1), store)
    runs = open_store(store).runs()
    rate = runs.groupby("signature")["lane_s"].median()
    expected = sum(0.01 + len(job.lanes) * rate[_signature(job)] for job in plan.jobs)
    assert found.seconds == pytest.approx(expected)
    assert "stored runs" in found.sources["regression:quickstart"]


def _signature(job) -> str:
    from fp4dse.results import recipe_columns

    return recipe_columns(job.lanes[0].recipe)["signature"]


def test_nothing_to_train_takes_no_time(tmp_path):
    store = tmp_path / "store"
    run_sweep(SPACE, tasks=TASKS, seeds=[0], store=store, worker=(sys.executable, FAKE, "ok"))
    found = estimate(plan_sweep(SPACE, tasks=TASKS, seeds=[0], store=store), find_setting(TASKS), store)
    assert (found.seconds, found.memory_bytes, found.sources) == (0, 0, {})


@pytest.mark.slow
def test_a_calibration_trains_briefly_in_a_process_of_its_own(tmp_path):
    plan = plan_sweep(SPACE, tasks=TASKS, store=tmp_path / "none", jobs=1)
    pace = module.calibrate(plan.jobs[-1], 240)
    assert pace.lane_s > 0
    assert 50 << 20 < pace.base_bytes < 8 << 30
    assert "6 lanes, 24 steps" in pace.source


def test_a_task_with_a_base_of_its_own_is_calibrated_without_training_it():
    """Times do not depend on what weights say, and a base takes minutes, in which an estimate would say nothing."""

    def trained(seeds, device):
        pytest.fail("trained a base")

    for name in ("rl", "finetune"):
        asked = get_task(name, "smoke")
        task = module.brief(msgspec.structs.replace(asked, pretrain=trained))
        made, drawn = task.pretrain([0, 1], "cpu"), asked.problem([0, 1]).init
        assert all(torch.equal(made[key], drawn[key]) for key in drawn)
        assert task.has_teacher == asked.has_teacher
    small = get_task("rl", "small")
    assert module.brief(small).problem([0]).val_x.shape[1] == module.SAMPLING_HELD_OUT
    assert small.problem([0]).val_x.shape[1] > module.SAMPLING_HELD_OUT
    plain = get_task("regression", "smoke")
    assert module.brief(plain).problem is plain.problem
    assert module.brief(plain).pretrain is None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_calibration_of_rollouts_trains_few_lanes_and_no_base(tmp_path, empty_cache, monkeypatch):
    fork_processes(monkeypatch, module)
    plan = plan_sweep(SPACE, tasks=[("rl", "smoke")], store=tmp_path / "none", jobs=1)
    pace = module.calibrate(plan.jobs[-1], 32)
    assert pace.lane_s > 0
    assert "2 lanes, 12 steps; not in it: the base" in pace.source
    assert not list(empty_cache.rglob("base-*"))


def test_an_estimate_says_before_it_trains(monkeypatch):
    monkeypatch.setattr(module, "calibrate", lambda *_: Pace(10.0, 2.0, 100.0, 5.0, "here"))
    said = []
    estimate(plan_sweep(SPACE, tasks=TASKS, seeds=[0], jobs=1), find_setting(TASKS, jobs=1), report=said.append)
    assert said == ["regression:quickstart: nothing is stored of it here; a few lanes are trained briefly"]


def killed(_job):
    """What a calibration is whose process the system ends for its memory."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.heavy
def test_a_calibration_that_the_system_ends_is_tried_with_fewer_lanes_and_then_named(tmp_path, monkeypatch):
    plan = plan_sweep(SPACE, tasks=TASKS, store=tmp_path / "none", jobs=1)
    tried = []
    begin = module._in_a_process
    monkeypatch.setattr(module, "_measure", killed)
    monkeypatch.setattr(module, "_in_a_process", lambda job: tried.append(len(job.lanes)) or begin(job))
    with pytest.raises(ConfigError, match=r"quickstart.*ended a process that trained 1 lane, as it does"):
        module.calibrate(plan.jobs[-1], 240)
    assert tried == [6, 3, 1]
