"""Studies of known truth: what is drawn is what is scored."""

import numpy as np
import pandas as pd
import pytest

from fp4dse.results.bench import statistics
from fp4dse.results.bench.answers import with_fresh_seeds
from fp4dse.results.bench.scores import scores_of_front
from fp4dse.results.bench.statistics import bench, scored_in_batches, summed
from fp4dse.results.bench.studies import SIZES, WORLDS, Recorded, drawn, recorded
from fp4dse.results.report.technique_findings import standing
from fp4dse.results.stats.paired import add_gap, rows_at_best_lr
from fp4dse.results.stats.recipes.confirmed import confirmed
from fp4dse.results.stats.recipes.front_chance import front_chance
from fp4dse.results.stats.techniques.marginal import marginal


def study(world: str, seed: int = 0):
    return drawn(SIZES["48"], world, np.random.default_rng(seed))


@pytest.mark.parametrize("world", WORLDS)
def test_the_mean_of_many_seeds_is_the_truth(world):
    one = study(world)
    runs = add_gap(one.runs("a", more=300))
    lines = runs[~runs["is_baseline"] & np.isfinite(runs["gap"])].groupby("config_id")["gap"].mean()
    assert lines.to_numpy() == pytest.approx(one.gap[one.rows(lines.index.to_series())], abs=0.008)


def test_more_seeds_leave_the_first_as_they_are_and_costs_are_equal_up_to_the_last_bit():
    one = study("rough")
    runs, more = one.runs("a"), one.runs("a", more=2)
    assert more[more["seed"].lt(3)]["val_loss"].tolist() == pytest.approx(runs["val_loss"].tolist(), nan_ok=True)
    costs = runs.drop_duplicates("config_id")["overhead"].to_numpy()[:-1]
    assert len(np.unique(costs)) > len(np.unique(costs.round(9)))
    assert costs == pytest.approx(one.cost, abs=1e-12)


def test_a_world_of_ties_has_recipes_that_train_to_the_same_bits_and_one_of_holes_lacks_a_pair_of_levels():
    tied, holes = study("tied"), study("holes", 1)
    losses = tied.runs("a").pivot(index="config_id", columns="seed", values="val_loss").dropna()
    assert losses.duplicated().any()
    assert not ((holes.codes[:, 0] == 1) & (holes.codes[:, 1] == 1)).any()
    assert np.isnan(holes.everything).any()


def test_in_a_weak_world_no_two_levels_are_equally_good():
    one = study("weak")
    for axis in range(one.everything.ndim):
        means = np.nanmean(one.everything, axis=tuple(i for i in range(one.everything.ndim) if i != axis))
        assert (np.diff(np.sort(means)) > 0).all()
    assert np.ptp(one.gap) < 0.1


def test_recipes_that_tie_in_all_but_bits_share_one_place_on_the_front():
    one = study("additive")
    one.gap[:5], one.cost[:5] = 0.01, 0.4
    rows = np.arange(len(one.gap))
    one.lanes.same[1] = one.lanes.same[0]  # the first two are one recipe
    on_front = rows < 5
    assert one.places(rows, on_front)[:6] == pytest.approx([1 / 4] * 5 + [0])


def test_a_real_store_is_resampled_with_its_means_as_the_truth():
    real = study("rough").runs("real")
    [setting] = recorded(real)
    one = setting.resampled(3, np.random.default_rng(0))
    assert len(one.gap) == 48 - real[real["val_loss"].isna()]["config_id"].nunique()
    [scores] = scored_in_batches([one], 1)
    assert any(what == "interval of a recipe's gap covers" for what, _, _ in scores)


def test_lanes_of_a_resampled_recipe_are_normal_and_have_the_spread_of_its_seeds():
    # a recipe's own few deviations would be two-sided and of few sizes: a fourth moment of 1 to 1.7, and not 3
    rng = np.random.default_rng(3)
    one = study("additive")
    one.lanes.spread = np.where(np.arange(49) < 24, 0.01, 0.001)
    [setting] = recorded(one.runs("real"))
    lanes = setting.resampled(3, rng).lanes
    noise = np.stack([lanes.column(seed) for seed in range(2000)], axis=1)
    noise -= np.median(noise, axis=0)
    share = np.square(noise).mean(axis=1) ** 2 / np.mean(noise**4, axis=1)
    assert share == pytest.approx(np.full(49, 1 / 3), abs=0.06)
    assert np.square(noise[:24]).mean() > 20 * np.square(noise[24:-1]).mean()


def test_the_best_is_held_against_recipes_that_may_be_named():
    # the lowest loss takes longer than BF16, so that nobody recommends it
    gap, cost = np.array([-0.2, 0.0, 0.1, 0.2, 0.3, 0.4]), np.array([1.2, 0.9, 0.8, 0.7, 0.6, 0.5])
    setting = Recorded(gap, cost, np.full(7, 0.001))
    [scores] = scored_in_batches([setting.resampled(3, np.random.default_rng(1))], 1)
    lowest = {what: total for what, total, _ in scores if what.endswith("lowest truth)")}
    assert list(lowest.values()) == pytest.approx([0.0, 0.0, 0.0])


def test_the_error_of_a_figure_is_that_of_a_mean_over_studies():
    [line] = summed("48 × 3", [[("of ten", hits, 10.0)] for hits in (9.0, 10.0, 8.0, 9.0)])
    assert (line["value"], line["drawn"]) == (0.9, 4)
    assert line["error"] == pytest.approx(np.sqrt(2) / 40, abs=1e-4)


@pytest.mark.parametrize("worlds", [("tied", "holes", "null"), pytest.param(WORLDS, marks=pytest.mark.slow)], ids=len)
def test_the_bench_has_a_line_for_each_target(worlds, monkeypatch):
    """Quickly of the worlds in which there is something that may be missing: a difference, a pair of levels, all."""
    monkeypatch.setattr(statistics, "WORLDS", worlds)
    lines = {line["what"]: line for line in bench(["48"], len(worlds))}
    assert lines["interval of a recipe's gap covers"]["value"] > 0.9
    assert lines["null studies with an effect told"]["target"] == "≤ 0.05"
    assert lines["interval of a question's effect covers"]["value"] > 0.85
    assert lines["questions with a null effect told"]["target"] == "≤ 0.05"


@pytest.fixture(scope="module")
def figures():
    """Of 21 studies of all worlds and 13 null ones more: the figures below, without what takes long."""
    rng = np.random.default_rng(1)
    studies = [drawn(SIZES["48"], WORLDS[i % len(WORLDS)], rng) for i in range(21)]
    nulls = [one for one in studies if one.world == "null"]
    nulls += [drawn(SIZES["48"], "null", rng) for _ in range(13)]
    runs = with_fresh_seeds(studies)
    chance, new = front_chance(rows_at_best_lr(runs)), confirmed(runs)
    scores = []
    for i, one in enumerate(studies):
        lines, best = (of[of["task"].eq(f"{i:06}")] for of in (chance, new[new["best"]]))
        scores.append([] if one.world == "null" else list(scores_of_front(one, lines)))
        bias = (best["estimate"].to_numpy() - one.gap[one.rows(best["config_id"])]).sum()
        scores[-1].append(("bias", 100 * bias, len(best)))
    alone = add_gap(pd.concat([one.runs(f"{i:06}") for i, one in enumerate(nulls)], ignore_index=True))
    pairs = marginal(alone)
    called = standing(pairs).isin(["helps", "harms"]).groupby(pairs["task"]).any()
    scores += [[("null", float(any_), 1)] for any_ in called]
    return {line["what"]: line for line in summed("48 × 3", scores)}


def test_the_confirmed_best_is_not_flattered(figures):
    """Nor by more than three errors of the simulation. An estimate from the seeds that chose is."""
    line = figures["bias"]
    assert line["drawn"] == 21
    assert abs(line["value"]) <= 3 * line["error"]
    assert line["error"] < 0.2


def test_no_more_null_studies_than_one_in_twenty_say_helps_or_harms(figures):
    line = figures["null"]
    assert line["drawn"] == 16
    assert line["value"] <= 0.05 + 3 * np.sqrt(0.05 * 0.95 / line["drawn"])


def test_a_recipe_is_on_the_true_front_as_often_as_p_front_says(figures):
    """In each tenth that enough studies have: up to .05 (docs/results.md) and three standard errors of a share of so
    many studies, or those of the simulation, where they are larger."""
    tenths = {int(what[10]): line for what, line in figures.items() if what.startswith("p_front")}
    tenths = {tenth: line for tenth, line in tenths.items() if line["drawn"] >= 6}
    assert {0, 1, 9} <= set(tenths)
    for tenth, line in tenths.items():
        p = tenth / 10 + 0.05
        error = max(line["error"], np.sqrt(p * (1 - p) / line["drawn"]))
        assert abs(line["value"]) <= 0.05 + 3 * error, line
