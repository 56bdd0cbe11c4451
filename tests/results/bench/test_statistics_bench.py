"""Studies of known truth: what is drawn is what is scored."""

import numpy as np
import pytest

from fp4dse.results.bench.statistics import bench, scored_in_batches, summed
from fp4dse.results.bench.studies import SIZES, WORLDS, drawn, resampled
from fp4dse.results.stats.paired import add_gap


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
    [one] = resampled(real, 3, np.random.default_rng(0))
    assert len(one.gap) == 48 - real[real["val_loss"].isna()]["config_id"].nunique()
    [scores] = scored_in_batches([one], 1)
    assert any(what == "interval of a recipe's gap covers" for what, _, _ in scores)


def test_the_error_of_a_figure_is_that_of_a_mean_over_studies():
    [line] = summed("48 × 3", [[("of ten", hits, 10.0)] for hits in (9.0, 10.0, 8.0, 9.0)])
    assert (line["value"], line["drawn"]) == (0.9, 4)
    assert line["error"] == pytest.approx(np.sqrt(2) / 40, abs=1e-4)


def test_the_bench_has_a_line_for_each_target():
    lines = {line["what"]: line for line in bench(["48"], len(WORLDS))}
    assert lines["interval of a recipe's gap covers"]["value"] > 0.9
    assert lines["null studies with an effect told"]["target"] == "≤ 0.05"
