"""`sweep --tune`: each recipe at the best of its own rates, chosen on seeds that are not reported."""

import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from fp4dse.dse import ConfigError, Recipe
from fp4dse.results import Store, open_store, summarize
from fp4dse.results.stats.learning_rates import learning_rates
from fp4dse.results.stats.stages import TUNE, of_stage, screened
from fp4dse.sweeps import run_sweep
from fp4dse.sweeps.stages.rate_search import FACTORS, SEEDS, rates_tried, run_tuned_sweep
from fp4dse.tasks import find_facts
from fp4dse.tasks.facts import rate_of

RECIPES = [Recipe.named("nvfp4"), Recipe.named("nvfp4-stable-spam")]
TASKS = [("regression", "smoke")]
PRESET = rate_of(find_facts(*TASKS[0]), RECIPES[0])
BEST, BEYOND = PRESET, 13 * PRESET
"""The rates of the lowest loss: under the task's own optimizer, and under Stable-SPAM, where FACTORS end at 4."""
FAKE = (sys.executable, str(Path(__file__).parents[1] / "fake_worker.py"))
LOWEST = {"jobs": 1, "worker": (*FAKE, f"lowest={BEST},{BEYOND}")}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Two recipes and their baselines, tuned and swept, with losses whose lowest is known."""
    store = str(tmp_path_factory.mktemp("tuned") / "store")
    return run_tuned_sweep(RECIPES, tasks=TASKS, seeds=[0, 1], store=store, **LOWEST), open_store(store)


def copied(swept, folder: Path) -> str:
    """A copy of the store."""
    return str(shutil.copytree(Path(swept[1].path).parent, folder / "copy") / "store")


def rows(store) -> pd.DataFrame:
    return store.runs(["recipe_name", "config_id", "lr", "seed", "stage", "lr_source", "val_loss", "status"])


def test_every_recipe_is_reported_at_the_rate_that_was_best_on_the_tuning_seeds(swept):
    result, store = swept
    assert (result.left, result.failed) == (0, 0)
    runs = rows(store)
    tuning, reported = of_stage(runs, TUNE), screened(runs)
    assert set(tuning["seed"]) == set(SEEDS)
    assert set(reported["seed"]) == {0, 1}
    assert set(reported["lr_source"]) == {"searched"}
    means = tuning.groupby(["config_id", "lr"])["val_loss"].mean()
    best = {config_id: of.droplevel(0).idxmin() for config_id, of in means.groupby("config_id")}
    assert dict(reported[["config_id", "lr"]].drop_duplicates().itertuples(index=False)) == best
    own, other = PRESET, 16 * PRESET  # of the powers of two the nearest
    named = {RECIPES[0]: own, RECIPES[0].baseline(): own, RECIPES[1]: other, RECIPES[1].baseline(): other}
    assert best == {recipe.config_id: rate for recipe, rate in named.items()}


def test_the_best_rate_lies_inside_what_was_tried(swept):
    _, store = swept
    for ranks in rates_tried(store, TASKS).values():
        best = min(ranks, key=ranks.get)
        assert len(ranks) >= len(FACTORS)
        assert min(ranks) < best < max(ranks)


def test_the_same_command_trains_nothing_again(swept):
    _, store = swept
    before = len(rows(store))
    again = run_tuned_sweep(RECIPES, tasks=TASKS, seeds=[0, 1], store=str(store.path), **LOWEST)
    assert (again.done, again.left) == (0, 0)
    assert len(rows(store)) == before


def test_statistics_are_of_the_reported_rows_alone(swept):
    _, store = swept
    summary = summarize(store.runs())
    assert set(summary["seeds"]) == {2}
    assert summary.loc[summary["name"].eq("nvfp4"), "gap"].notna().all()


def test_a_grid_of_ones_own_is_taken_as_it_is(tmp_path):
    store = str(tmp_path / "store")
    run_tuned_sweep(RECIPES[:1], tasks=TASKS, seeds=[0], lrs=[1e-3, 2e-3], store=store, **LOWEST)
    runs = rows(open_store(store))
    assert set(of_stage(runs, TUNE)["lr"]) == {1e-3, 2e-3}
    assert set(screened(runs)["lr"]) <= {1e-3, 2e-3}


def test_a_grid_of_ones_own_is_all_that_counts_in_a_store_that_was_tuned_before(swept, tmp_path):
    store = copied(swept, tmp_path)
    grid = [8 * PRESET, 16 * PRESET]
    run_tuned_sweep(RECIPES[:1], tasks=TASKS, seeds=[7], lrs=grid, store=store, **LOWEST)
    reported = screened(rows(open_store(store)))
    assert set(reported.loc[reported["seed"].eq(7), "lr"]) == {8 * PRESET}  # PRESET was better, and is none of these


def test_rates_are_chosen_on_seeds_that_are_not_reported_whatever_the_store_has(swept, tmp_path):
    store = copied(swept, tmp_path)
    with pytest.raises(ConfigError, match=r"--seeds: found 3000; accepted: seeds that no row .*`tune`"):
        run_tuned_sweep(RECIPES[:1], tasks=TASKS, seeds=SEEDS, store=store, **LOWEST)
    new = str(tmp_path / "screened" / "store")
    run_sweep(RECIPES[:1], tasks=TASKS, seeds=SEEDS, store=new, **LOWEST)
    run_tuned_sweep(RECIPES[:1], tasks=TASKS, seeds=[0], store=new, **LOWEST)
    assert set(of_stage(rows(open_store(new)), TUNE)["seed"]) == {3002, 3003}


def test_a_search_that_ended_at_an_edge_says_so(swept, tmp_path):
    assert not learning_rates(swept[1].runs())["at_edge"].any()
    store = str(tmp_path / "store")
    run_tuned_sweep(RECIPES[:1], tasks=TASKS, seeds=[0, 1], lrs=[8 * PRESET, 16 * PRESET], store=store, **LOWEST)
    found = learning_rates(open_store(store).runs())
    assert found["at_edge"].all()
    assert set(found["rates"]) == {1}


def test_losses_of_another_version_choose_no_rate(swept, monkeypatch):
    _, store = swept
    assert rates_tried(store, TASKS)
    runs = store.runs()
    monkeypatch.setattr(Store, "runs", lambda *_: runs.assign(rev_engine=runs["rev_engine"] - 1))
    assert not rates_tried(store, TASKS)


def test_a_budget_that_ends_while_rates_are_tuned_says_so(tmp_path):
    result = run_tuned_sweep(RECIPES, tasks=TASKS, seeds=[0], store=str(tmp_path / "store"), budget_s=1e-3)
    assert "while learning rates were tuned" in result.stopped
    assert result.left


def test_without_tuning_a_recipe_has_the_rate_of_its_class(tmp_path):
    store = str(tmp_path / "store")
    run_sweep(RECIPES[:1], tasks=TASKS, seeds=[0], store=store, **LOWEST)
    task = find_facts(*TASKS[0])
    assert set(rows(open_store(store))["lr"]) == {rate_of(task, RECIPES[0]), rate_of(task, Recipe.named("bf16"))}
