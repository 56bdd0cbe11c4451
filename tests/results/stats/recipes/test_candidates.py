import numpy as np
import pandas as pd
import pytest

from fp4dse.results.bench.generated import generated
from fp4dse.results.bench.studies import SIZES, WORLDS, drawn
from fp4dse.results.stats.recipes.candidates import REACH, candidates, errors_behind
from fp4dse.results.stats.recipes.pareto import front

KNOBS = ("*.g.rounding", "wgrad.rotation", "*.scale")


def test_the_distance_is_to_the_recipe_that_beats_one_most_for_no_more():
    rng = np.random.default_rng(0)
    cost, mean, error = rng.integers(0, 5, 40).astype(float), rng.normal(size=40), 0.1 + rng.random(40)
    expected = [
        max((mean[i] - mean[j]) / np.hypot(error[i], error[j]) if cost[j] <= cost[i] else 0.0 for j in range(40))
        for i in range(40)
    ]
    assert errors_behind(cost, mean, error) == pytest.approx(np.maximum(expected, 0.0))
    assert (errors_behind(cost, mean, error) == 0).tolist() == front(cost, mean).tolist()


def test_recipes_without_luck_are_behind_without_end():
    assert errors_behind(np.zeros(2), np.array([0.1, 0.2]), np.zeros(2)).tolist() == [0.0, np.inf]


def test_what_is_worse_by_far_is_no_candidate_and_what_costs_less_is_one():
    runs = generated(KNOBS, truth=lambda codes: 0.1 + 0.3 * codes[KNOBS[0]])
    cheap = runs["config_id"].eq("0" * 15 + "9")  # of the worse half
    runs["overhead"] = np.where(cheap, 0.4, 0.5)
    found = candidates(runs)
    assert {"recipe 9"} < set(found["label"]) <= {f"recipe {i}" for i in range(10)}
    assert found["behind"].iloc[0] == 0
    assert found["behind"].is_monotonic_increasing
    assert found["behind"].max() <= REACH


def test_recipes_of_the_same_bits_are_one_candidate_the_cheapest():
    runs = generated(("*.g.rounding",), seeds=3)
    one = runs[runs["recipe_label"].eq("recipe 0")].assign(overhead=0.5)
    twin = one.assign(config_id="twin", recipe_label="a twin")
    cheaper = one.assign(config_id="cheaper", recipe_label="cheaper", overhead=0.4)
    other_rate = one.assign(config_id="other", recipe_label="other rate", lr=2e-3)
    everything = pd.concat([runs[runs["is_baseline"]], one, twin, other_rate], ignore_index=True)
    assert candidates(everything)["label"].tolist() == ["a twin", "other rate"]  # of equal cost the first by its label
    found = candidates(pd.concat([everything, cheaper], ignore_index=True)).set_index("label")
    assert found["same_bits"].to_dict() == {"cheaper": 2, "other rate": 0}


def test_nobody_is_a_candidate_where_no_recipe_has_two_seeds():
    assert candidates(generated(KNOBS, seeds=1)).empty


def test_the_true_front_is_among_the_candidates():
    kept = of = 0
    studies = [drawn(SIZES["48"], WORLDS[i % 5], np.random.default_rng([7, i])) for i in range(20)]
    every = pd.concat([study.runs(f"{i:03}") for i, study in enumerate(studies)], ignore_index=True)
    for (task, runs), (_, lines) in zip(every.groupby("task"), candidates(every).groupby("task"), strict=True):
        study = studies[int(task)]
        finished = runs.groupby("config_id")["val_loss"].count().eq(3)
        places = study.rows(pd.Series(sorted(set(finished.index[finished]) - {f"{10**9:016x}"})))
        best = places[front(study.cost[places], study.gap[places])]
        points = set(zip(study.cost[best], study.gap[best], strict=True))
        near = study.rows(lines["config_id"])
        kept += len(points & set(zip(study.cost[near], study.gap[near], strict=True)))
        of += len(points)
    assert kept >= 0.98 * of
