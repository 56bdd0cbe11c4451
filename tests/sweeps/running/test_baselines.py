"""A kind of device that brings back recipes gets the BF16 lanes that it lacks, each once, and no others."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from fp4dse.dse import Recipe
from fp4dse.dse.optimizer import StableSPAM
from fp4dse.dse.training import Training
from fp4dse.results import open_store
from fp4dse.sweeps.executors import Outcome, Pace
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.sweeps.jobs.rows import lane_id, result_rows
from fp4dse.sweeps.planning.setting import Setting, find_setting
from fp4dse.sweeps.running.baselines import Baselines
from fp4dse.sweeps.running.scheduler import Verdict
from fp4dse.tasks.job import Job, JobResult, Lane, LaneResult

TASK = ("regression", "smoke")
BF16, NVFP4 = (Recipe.named(name).canonical() for name in ("bf16", "nvfp4"))


@pytest.fixture
def setting() -> Setting:
    """Workers are handed out by others."""
    found = find_setting([TASK])
    found.machine = Machine("cpu", 1, [{}, {}])
    return found


def job(recipe: Recipe, *seeds: int) -> Job:
    return Job(*TASK, [Lane(recipe, 0.1, seed) for seed in seeds])


def result(of: Job, kind: str) -> JobResult:
    lanes = [LaneResult("done", None, 1.0, 1.0, 1.0, {}, [1], [1.0]) for _ in of.lanes]
    return JobResult(lanes, 1.0, 0.0, "none", "none", [], 0, {"device_class": kind})


def came_back(of: Job, kind: str) -> Verdict:
    return Verdict(Outcome(of, Path("x"), "done", Pace(0, 0, 0), result(of, kind)), "store")


def gave_up(of: Job) -> Verdict:
    return Verdict(Outcome(of, Path("x"), "failed", Pace(0, 0, 0)), "give up")


def seeds(jobs: list[Job]) -> list[tuple[str, list[int]]]:
    assert all(lane.recipe == BF16 for job in jobs for lane in job.lanes)
    return [(job.only_on["device_class"], [lane.seed for lane in job.lanes]) for job in jobs]


def test_a_kind_without_baselines_gets_them_once(setting):
    baselines = Baselines(setting, set())
    baselines.note(came_back(job(BF16, 0, 1), "A"))
    baselines.note(came_back(job(NVFP4, 0, 1), "A"))
    assert baselines.missing() == []
    baselines.note(came_back(job(NVFP4, 0, 1), "B"))
    assert seeds(baselines.missing()) == [("B", [0, 1])]
    baselines.note(came_back(job(NVFP4, 0, 1, 2), "B"))
    assert seeds(baselines.missing()) == [("B", [2])]
    assert baselines.missing() == []


def test_a_recipe_with_another_optimizer_wants_bf16_with_it(setting, tmp_path):
    training = Training(optimizer=StableSPAM())
    spam, matched = (replace(recipe, training=training) for recipe in (NVFP4, BF16))
    store = open_store(tmp_path / "store", create=True)
    for of in (job(spam, 0), job(BF16, 0)):
        store.add(result_rows(of, result(of, "A"), setting.contexts[TASK]), of.lanes[0].recipe.config_id)
    baselines = Baselines(setting, store.done())
    baselines.note_stored(store)  # an earlier driver's
    baselines.note(came_back(job(spam, 1), "A"))
    [found] = baselines.missing()
    assert {(lane.recipe, lane.seed) for lane in found.lanes} == {(matched, 0), (matched, 1)}
    baselines.note(came_back(found, "A"))
    assert [{(lane.recipe, lane.seed) for lane in of.lanes} for of in baselines.missing()] == [{(BF16, 1)}]


def test_a_baseline_that_is_on_its_way_is_awaited(setting):
    baselines = Baselines(setting, set())
    planned = job(BF16, 0)
    baselines.expect([planned])
    baselines.note(came_back(job(NVFP4, 0), "B"))
    assert baselines.missing() == []
    baselines.note(came_back(planned, "B"))
    assert baselines.missing() == []
    baselines.note(came_back(job(NVFP4, 0), "A"))
    assert seeds(baselines.missing()) == [("A", [0])]


def test_a_baseline_that_was_given_up_is_not_awaited(setting):
    baselines = Baselines(setting, set())
    baselines.expect([job(BF16, 0)])
    baselines.note(came_back(job(NVFP4, 0), "B"))
    baselines.note(gave_up(job(BF16, 0)))
    assert seeds(baselines.missing()) == [("B", [0])]


def test_a_stored_baseline_of_the_same_kind_is_enough(setting):
    context = {**setting.contexts[TASK], "device_class": "B"}
    baselines = Baselines(setting, {lane_id(Lane(BF16, 0.1, 0), context)})
    baselines.note(came_back(job(NVFP4, 0, 1), "B"))
    assert seeds(baselines.missing()) == [("B", [1])]


def test_what_a_driver_that_was_killed_did_not_get_to_is_made_up_for(setting, tmp_path):
    store = open_store(tmp_path / "store", create=True)
    for of, kind in ((job(BF16, 0, 1), "A"), (job(NVFP4, 0), "A"), (job(NVFP4, 1), "B")):
        store.add(result_rows(of, result(of, kind), setting.contexts[TASK]), f"{kind}-{of.lanes[0].seed}")
    baselines = Baselines(setting, store.done())
    baselines.note_stored(store)
    assert seeds(baselines.missing()) == [("B", [1])]
    setting.machine.kinds = ("A", "A")  # a machine of our own has them in its plan
    baselines = Baselines(setting, store.done())
    baselines.note_stored(store)
    assert baselines.missing() == []
