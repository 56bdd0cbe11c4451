import math

import numpy as np
import pandas as pd
import pytest

from fp4dse.results import add_gap, effects, front_chance, learning_rates, noise_floor, summarize
from fp4dse.results.bench.answers import with_fresh_seeds
from fp4dse.results.bench.generated import generated
from fp4dse.results.bench.studies import SIZES, drawn
from fp4dse.results.stats.recipes.candidates import candidates
from fp4dse.results.stats.recipes.confirmed import confirmed
from fp4dse.results.stats.recipes.margins import BY_LAW
from fp4dse.results.stats.recipes.recommendation import verdicts

KNOBS = ("*.g.rounding", "wgrad.rotation")
SEEDS, FRESH = 3, 10


def study(seed: int = 0, **more) -> pd.DataFrame:
    """Six recipes that are nearly as good, screened with three seeds and confirmed with ten."""
    runs = generated(KNOBS, seeds=SEEDS + FRESH, seed=seed, **more)
    runs["overhead"] = 0.5 + 0.01 * runs["config_id"].str[-1].map(int)
    new = runs["seed"].ge(SEEDS)
    return runs.assign(stage=np.where(new, "confirm", None), seed=runs["seed"].mask(new, runs["seed"] - SEEDS + 1000))


@pytest.fixture(scope="module")
def found() -> pd.DataFrame:
    """What is said of the study that most tests change."""
    return confirmed(study())


def test_the_least_time_is_chosen_by_the_first_half_and_its_loss_is_that_of_the_other():
    runs, slope = study(), 0.4
    runs["overhead"] = 1.05 - runs["overhead"]  # the best is the dearest
    runs = runs.assign(margin=slope * math.log(1.02), margin_of=BY_LAW)
    found = confirmed(runs)
    best, chosen = (line_of(found, name) for name in ("best", "recommended"))
    first = found.dropna(subset="choice")
    by_time = first["choice"] + slope * np.log(first["overhead"])
    assert chosen["config_id"] == first["config_id"][by_time.idxmin()] != best["config_id"]
    assert chosen["ranked_by"] == "time"
    assert confirmed(study())["ranked_by"].dropna().unique() == ["loss"]
    for factor in (1.5, 20.0):  # even out of reach of any number of tokens
        later = changed(runs, runs["seed"].ge(1005) & ~runs["is_baseline"], factor)
        assert line_of(confirmed(later), "recommended")["config_id"] == chosen["config_id"]


def line_of(found: pd.DataFrame, name: str) -> pd.Series:
    [(_, line)] = found[found[name]].iterrows()
    return line


def changed(runs: pd.DataFrame, rows: pd.Series, factor: float) -> pd.DataFrame:
    return runs.assign(val_loss=runs["val_loss"].where(~rows, runs["val_loss"] * factor))


def test_one_half_of_the_fresh_seeds_chooses_and_the_other_alone_estimates(found):
    runs = study()
    best = line_of(found, "best")
    gaps = add_gap(runs).query("stage == 'confirm'").pivot(index="config_id", columns="seed", values="gap")
    assert best["config_id"] == gaps.iloc[1:, :5].mean(axis=1).idxmin() or best["config_id"] == "0" * 16
    assert best["choice"] == pytest.approx(gaps.loc[best["config_id"]].iloc[:5].mean())
    assert best["estimate"] == pytest.approx(gaps.loc[best["config_id"]].iloc[5:].mean())
    assert best["gap"] == pytest.approx(gaps.loc[best["config_id"]].mean())
    assert best["low"] < best["estimate"] < best["high"]
    assert (best["chosen_on"], best["estimated_on"], best["seeds"]) == (5, 5, 10)
    of_best = runs["config_id"].eq(best["config_id"])
    worse = confirmed(changed(runs, of_best & runs["seed"].ge(1005), 1.5))
    assert line_of(worse, "best")["config_id"] == best["config_id"]
    assert line_of(worse, "best")["estimate"] == pytest.approx(best["estimate"] + math.log(1.5))
    unlucky = confirmed(changed(runs, of_best & runs["seed"].between(1000, 1004), 1.5)).set_index("config_id")
    assert not unlucky.loc[best["config_id"], "best"]
    assert unlucky.loc[best["config_id"], "estimate"] == pytest.approx(best["estimate"])


def test_the_recommended_recipe_costs_no_more_than_the_best():
    found = confirmed(study(noise=0.001))
    assert line_of(found, "recommended")["overhead"] <= line_of(found, "best")["overhead"]
    assert found["verdict"].isna().sum() == 1  # its own


def test_all_other_statistics_are_those_of_screened_rows():
    runs = study()
    alone = runs[runs["stage"].isna()].drop(columns="stage")
    for function in (summarize, front_chance, noise_floor, learning_rates, effects):
        pd.testing.assert_frame_equal(function(runs), function(alone))
    with_new, [screened] = verdicts(runs)[0], verdicts(alone)
    assert with_new.confirmed is not None
    assert repr(with_new._replace(confirmed=None)) == repr(screened)


def test_candidates_are_listed_before_anything_is_confirmed():
    runs = study()
    found = confirmed(runs[runs["stage"].isna()])
    assert set(found["config_id"]) == set(candidates(runs)["config_id"])
    assert found["gap"].isna().all()
    assert not found["best"].any()
    [verdict] = verdicts(runs[runs["stage"].isna()])
    assert verdict.confirmed is None


def test_a_candidate_that_diverges_on_a_fresh_seed_is_not_the_best(found):
    runs = study()
    best = line_of(found, "best")["config_id"]
    blown = runs["config_id"].eq(best) & runs["seed"].eq(1009)
    lines = confirmed(runs.assign(status=runs["status"].mask(blown, "diverged"), val_loss=runs["val_loss"].mask(blown)))
    line = lines.set_index("config_id").loc[best]
    assert (line["best"], line["gap"], line["diverged"]) == (False, math.inf, 1)
    [verdict] = verdicts(runs.assign(status=runs["status"].mask(blown, "diverged")))
    assert any("1 candidate diverged" in text for text in verdict.confirmed.warnings())


def test_a_candidate_that_lacks_fresh_seeds_waits_and_the_verdict_says_so(found):
    runs = study()
    best = line_of(found, "best")["config_id"]
    [verdict] = verdicts(runs[~(runs["config_id"].eq(best) & runs["seed"].eq(1003))])
    assert verdict.confirmed.config_id != best
    assert (verdict.confirmed.finished, verdict.confirmed.missing) == (5, 1)
    assert any("not trained on all fresh seeds" in text for text in verdict.confirmed.warnings())


def test_fresh_rows_at_another_rate_than_the_screened_ones_chose_do_not_count(found):
    runs = study()
    more = confirmed(pd.concat([runs, changed(runs[runs["seed"].ge(1000)], runs["seed"].ge(0), 0.5).assign(lr=3e-3)]))
    assert more["gap"].tolist() == found["gap"].tolist() or more["seeds"].eq(10).all()
    assert more["lr"].eq(1e-3).all()


def test_bf16_chooses_its_rate_among_screened_rows_alone():
    runs = study()
    better = runs[runs["is_baseline"] & runs["stage"].isna()]
    better = better.assign(lr=3e-3, val_loss=better["val_loss"] * 0.9)
    new = runs["is_baseline"] & runs["stage"].notna()
    runs = pd.concat([runs.assign(lr=runs["lr"].mask(new, 3e-3)), better], ignore_index=True)
    gapped = add_gap(runs)
    screened = gapped[gapped["stage"].isna() & gapped["is_baseline"] & gapped["lr"].eq(3e-3)]
    assert screened["gap"].abs().max() == 0
    assert gapped.loc[gapped["stage"].notna(), "gap"].notna().all()


@pytest.mark.heavy
def test_the_lowest_of_screened_means_is_too_good_and_the_confirmed_best_is_not():
    luck, left = [], []
    studies = [drawn(SIZES["48"], "null", np.random.default_rng([3, i])) for i in range(12)]
    for task, lines in confirmed(with_fresh_seeds(studies)).groupby("task"):
        truth = studies[int(task)].gap[studies[int(task)].rows(lines["config_id"])]
        lowest = int(np.argmin(lines["screened"]))
        luck.append(lines["screened"].iloc[lowest] - truth[lowest])
        best = lines["best"].to_numpy(bool)
        left += list(lines["estimate"].to_numpy()[best] - truth[best])
    assert np.mean(luck) < -3 * np.std(luck) / math.sqrt(len(luck))
    assert abs(np.mean(left)) < 3 * np.std(left) / math.sqrt(len(left))


def test_a_confirmed_recipe_with_the_losses_of_bf16_is_the_same_as_bf16():
    runs = study()
    base = runs[runs["is_baseline"]].set_index("seed")["val_loss"]
    same = runs["seed"].map(base)
    found = confirmed(runs.assign(val_loss=same))
    assert found[["gap", "gap_low", "gap_high", "estimate", "low", "high"]].eq(0).all(axis=None)
    [verdict] = verdicts(runs.assign(val_loss=same))
    assert verdict.bf16 == "same"
    assert confirmed(runs.assign(val_loss=same, gap_unit="points"))["low"].isna().all()
