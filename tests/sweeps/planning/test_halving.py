"""Rungs stand where halving has them, spare the baseline, and what they drop is neither lost nor taken for finished."""

import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.results import open_store
from fp4dse.sweeps import plan_sweep, run_search, run_sweep
from fp4dse.sweeps.planning.halving import Halving, replay
from fp4dse.tasks.job import Rung
from tests.sweeps.made import row

FAKE = str(Path(__file__).parents[1] / "fake_worker.py")
SPACE = Space("few", axes={"*.scale": ["e4m3", "ue5m3", "e5m2", "ue4m4"]})


def sweep(tmp_path, **more):
    asked = {"tasks": [("regression", "quickstart")], "seeds": [0, 1], "jobs": 1, "store": tmp_path / "store", **more}
    return run_sweep(SPACE, worker=(sys.executable, FAKE, "ok"), **asked)


def test_rungs_halve_towards_the_start():
    assert Halving(3, 0.5).rungs(800) == [Rung(100, 0.5), Rung(200, 0.5), Rung(400, 0.5)]
    assert Halving(1, 0.25).rungs(800) == [Rung(200, 0.25)]


@given(count=st.integers(1, 12), keep=st.floats(0.01, 0.99), steps=st.integers(1, 10_000))
def test_rungs_increase_and_lie_within_training(count, keep, steps):
    places = [rung.step for rung in Halving(count, keep).rungs(steps)]
    assert places == sorted(set(places))
    assert all(0 < place <= steps for place in places)


@pytest.mark.parametrize(("wrong", "said"), [((0, 0.5), "--rungs"), ((1, 0.0), "--keep"), ((1, 1.0), "--keep")])
def test_wrong_numbers_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Halving(*wrong)


def test_every_job_has_its_tasks_rungs_but_for_the_baselines(tmp_path):
    tasks = [("regression", "quickstart"), ("vision", "quickstart")]
    jobs = plan_sweep(SPACE, tasks=tasks, store=tmp_path / "none", halving=Halving(2, 0.5)).jobs
    for job in jobs:
        assert bool(job.rungs) != job.lanes[0].recipe.is_plain
    assert not any(job.rungs for job in plan_sweep(SPACE, tasks=tasks, store=tmp_path / "none").jobs)


def test_what_was_dropped_is_stored_and_counts_for_sweeps_with_rungs_alone(tmp_path):
    first = sweep(tmp_path, halving=Halving(1, 0.5))
    assert (first.done, first.pruned, first.left, first.exit_code) == (2 + 4, 4, 0, 0)
    runs = open_store(tmp_path / "store").runs(["status", "pruned_step"])
    assert Counter(runs["status"]) == {"done": 6, "pruned": 4}
    assert set(runs["pruned_step"].dropna()) == {5}
    assert sweep(tmp_path, halving=Halving(1, 0.5)).stored == 10
    without = sweep(tmp_path)
    assert (without.stored, without.done) == (6, 4)
    assert Counter(open_store(tmp_path / "store").runs(["status"])["status"]) == {"done": 10}
    assert sweep(tmp_path, halving=Halving(1, 0.5)).stored == 10


def test_a_finished_run_is_never_replaced_by_one_that_was_dropped_later(tmp_path):
    sweep(tmp_path)
    sweep(tmp_path, halving=Halving(1, 0.5), rerun=True)
    runs = open_store(tmp_path / "store").runs()
    assert Counter(runs["status"]) == {"done": 10}


# --- replay --------------------------------------------------------------------------------------------------------

STEPS = np.arange(1, 65)
RECIPES = list(SPACE.recipes())


def lane(recipe: Recipe, seed: int, final: float, early: float, status: str = "done") -> dict:
    """A lane whose curve is at `early` for the first part of training and at `final` then."""
    curve = {"curve_step": STEPS.tolist(), "curve_loss": np.where(STEPS <= 40, early, final).tolist()}
    if status == "diverged":
        return row(recipe, seed, None, steps=64, diverged_step=3, **curve)
    return row(recipe, seed, final, steps=64, **curve)


def make(tmp_path, finals, earlies, statuses=None):
    store = open_store(tmp_path / "store", create=True)
    rows = [lane(Recipe.named("bf16"), seed, 1.0, 1.0) for seed in (0, 1)]
    for recipe, final, early, status in zip(RECIPES, finals, earlies, statuses or ["done"] * 4, strict=True):
        rows += [lane(recipe, seed, final + 0.01 * seed, early, status) for seed in (0, 1)]
    store.add(rows, "rows")
    return store


def test_curves_that_tell_the_truth_early_lose_nothing(tmp_path):
    (found,) = replay(make(tmp_path, [1.1, 1.2, 1.3, 1.4], [2.1, 2.2, 2.3, 2.4]), Halving(1, 0.5))
    assert (found.populations, found.recipes, found.lanes) == (1, 4, 8)
    assert found.saved == pytest.approx(0.25)  # half of the lanes for half of the steps
    assert (found.best_kept, found.front_kept, found.best_overall, found.regret) == (1, 1, True, 0)


def test_two_rungs_save_what_arithmetic_says(tmp_path):
    (found,) = replay(make(tmp_path, [1.1, 1.2, 1.3, 1.4], [2.1, 2.2, 2.3, 2.4]), Halving(2, 0.5))
    assert found.saved == pytest.approx(1 - (4 * 16 + 2 * 16 + 1 * 32) / (4 * 64))


def test_curves_that_cross_late_lose_the_best_and_say_by_how_much(tmp_path):
    (found,) = replay(make(tmp_path, [1.1, 1.2, 1.3, 1.4], [2.4, 2.3, 2.2, 2.1]), Halving(1, 0.5))
    assert (found.best_kept, found.front_kept, found.best_overall) == (0, 0, False)
    assert found.regret == pytest.approx(np.mean(np.log([1.3 / 1.1, 1.31 / 1.11])))


def test_recipes_are_compared_with_those_that_they_were_trained_with(tmp_path):
    """Two jobs of one signature, as a large population or two batches of a search leave them."""
    store = open_store(tmp_path / "store", create=True)
    store.add([lane(Recipe.named("bf16"), 0, 1.0, 1.0)], "baseline")
    for day, members in ((1, (0, 3)), (2, (1, 2))):
        rows = [lane(RECIPES[i], 0, 1.1 + 0.1 * i, 2.1 + 0.1 * i) for i in members]
        store.add([{**of, "created_at": datetime(2026, 1, day, tzinfo=UTC)} for of in rows], f"job {day}")
    (found,) = replay(store, Halving(1, 0.5))
    assert (found.populations, found.recipes, found.saved) == (2, 4, pytest.approx(0.25))
    assert (found.best_kept, found.best_overall) == (1, True)


def test_what_a_search_trained_can_be_replayed(tmp_path):
    asked = {
        "sampler": "random",
        "trials": 4,
        "batch": 4,
        "tasks": [("regression", "quickstart")],
        "seeds": [0, 1],
        "jobs": 1,
    }
    run_search(SPACE, store=tmp_path / "store", worker=(sys.executable, FAKE, "ok"), **asked)
    (found,) = replay(open_store(tmp_path / "store"), Halving(1, 0.5))
    assert found.lanes == 8


def test_a_recipe_that_diverged_before_the_rung_does_not_go_on(tmp_path):
    statuses = ["diverged", "done", "done", "done"]
    (found,) = replay(make(tmp_path, [1.1, 1.2, 1.3, 1.4], [2.1, 2.2, 2.3, 2.4], statuses), Halving(1, 0.5))
    assert found.saved == pytest.approx(1 - (4 + 2) / 8)
    assert found.best_overall


def test_lanes_that_tuned_rates_or_judged_candidates_are_not_replayed(tmp_path):
    sweep(tmp_path)
    [before] = replay(open_store(tmp_path / "store"), Halving())
    sweep(tmp_path, seeds=[3000, 3001], stage="tune")
    [after] = replay(open_store(tmp_path / "store"), Halving())
    assert repr(after) == repr(before)  # a regret of NaN is not equal to itself


def test_a_store_without_a_population_of_several_recipes_cannot_be_replayed(tmp_path):
    store = open_store(tmp_path / "store", create=True)
    store.add([lane(Recipe.named("bf16"), 0, 1.0, 1.0), lane(RECIPES[0], 0, 1.0, 1.0)], "rows")
    with pytest.raises(ConfigError, match="--replay"):
        replay(store, Halving())
