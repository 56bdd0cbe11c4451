"""The hierarchical model and the limits that hold for all recipes at once, on gaps whose truth is known."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import kstest

from fp4dse.results import against, front_chance
from fp4dse.results.bench.generated import generated
from fp4dse.results.stats.estimates.shrinkage import posterior
from fp4dse.results.stats.estimates.simultaneous import fixed, lowest, table, versus
from fp4dse.results.stats.estimates.spread import spread_over_seeds
from fp4dse.results.stats.recipes.pareto import equal_costs, front, fronts


def drawn(truth: np.ndarray, seed: int, seeds: int = 3):
    gaps = truth[:, None] + 0.01 * np.random.default_rng(seed).normal(size=(len(truth), seeds))
    return gaps, spread_over_seeds(gaps)


def test_the_lowest_of_equal_recipes_is_expected_where_all_are():
    bias = []
    for seed in range(40):
        gaps, spread = drawn(np.full(60, 0.2), seed)
        found = posterior(spread, gaps, []).draw(200, np.random.default_rng(0)).mean(axis=0)
        bias.append([found.min() - 0.2, spread.mean.min() - 0.2])
    shrunk, raw = np.mean(bias, axis=0)
    assert raw < -0.01
    assert abs(shrunk) < abs(raw) / 3


def test_a_recipe_far_from_the_model_stays_where_it_is():
    truth = np.where(np.arange(60) == 7, 0.1, 0.2)
    gaps, spread = drawn(truth, 0)
    draws = posterior(spread, gaps, [np.arange(60) % 3]).draw(400, np.random.default_rng(0))
    assert draws[:, 7].mean() == pytest.approx(spread.mean[7], abs=0.004)
    assert draws.mean(axis=0)[8:] == pytest.approx(0.2, abs=0.01)


def test_the_truth_is_anywhere_among_draws_as_often_as_elsewhere():
    """Simulation-based calibration (Talts et al. 2018): ranks of the truth among draws are uniform."""
    rng, ranks = np.random.default_rng(3), []
    for _ in range(8):
        codes = [np.arange(120) % 3, np.arange(120) // 60]
        truth = 0.2 + rng.normal(0, 0.02, 3)[codes[0]] + rng.normal(0, 0.01, 120)
        noise = 0.01 * np.exp(0.4 * rng.normal(size=120))
        gaps = truth[:, None] + noise[:, None] * rng.normal(size=(120, 3))
        draws = posterior(spread_over_seeds(gaps), gaps, codes).draw(500, rng)
        ranks.append((draws < truth).mean(axis=0))
    assert kstest(np.concatenate(ranks), "uniform").statistic < 0.07
    assert np.std(ranks) * np.sqrt(12) == pytest.approx(1, abs=0.1)  # draws may be a tenth too close together


def test_a_factor_that_does_nothing_is_often_drawn_as_nothing():
    gaps, spread = drawn(0.2 + 0.1 * (np.arange(64) % 2), 0, seeds=5)
    draws = posterior(spread, gaps, [np.arange(64) % 2, np.arange(64) // 32]).draw(200, np.random.default_rng(0))
    assert np.mean(draws[:, 0] == draws[:, 32]) > 0.3


def test_recipes_without_own_parts_are_often_drawn_without_and_those_that_have_them_never():
    rng, codes = np.random.default_rng(0), [np.arange(64) % 2, np.arange(64) // 32, np.arange(64) // 8 % 4]
    shares = []
    for own in (0.0, 0.02):
        truth = 0.2 + 0.05 * codes[0] + 0.02 * codes[2] + own * rng.normal(size=64)
        gaps, spread = drawn(truth, 0)
        draws = posterior(spread, gaps, codes).draw(320, np.random.default_rng(0)).reshape(-1, 4, 2, 4, 2)
        left = np.diff(np.diff(draws, axis=1), axis=4)  # what no sum of effects has
        shares.append(np.mean(np.abs(left).max(axis=(1, 2, 3, 4)) < 1e-9))
    assert shares[0] > 0.5  # 0 where many tiny own parts are as likely as none
    assert shares[1] == 0


def test_where_every_technique_does_a_little_recipes_are_on_the_front_as_often_as_their_draws_say():
    """No effect is 0, and most are below the noise of a mean: not seen to be large is not nothing."""
    rng, chances, truths = np.random.default_rng(0), [], []
    codes = np.stack(np.unravel_index(np.arange(48), (3, 2, 2, 2, 2)))
    for _ in range(40):
        truth, cost = (sum((size * rng.normal(size=3))[code] for code in codes) for size in (0.005, 0.1))
        gaps = truth[:, None] + 0.01 * rng.normal(size=(48, 3))
        draws = posterior(spread_over_seeds(gaps), gaps, [*codes]).draw(160, np.random.default_rng(0))
        chances.append(fronts(cost, draws).mean(axis=0))
        truths.append(front(cost, truth))
    chance, true = np.concatenate(chances), np.concatenate(truths)
    assert chance.sum() == pytest.approx(true.sum(), rel=0.2)  # 0.69 of it with a prior that leans towards nothing
    open_ = (chance > 0.1) & (chance < 0.5)
    assert true[open_].mean() == pytest.approx(chance[open_].mean(), abs=0.15)


def test_no_recipe_is_told_from_the_luckiest_of_its_equals():
    wrong = 0
    for seed in range(60):
        gaps, spread = drawn(np.full(40, 0.2), seed)
        place = int(spread.mean.argmin())
        truth = posterior(spread, gaps, []).draw(500, np.random.default_rng(0))
        found = versus(gaps, np.full(40, place), spread, truth, lowest(np.ones(40, bool)))
        wrong += (np.abs(found.difference) > found.limit * found.error).any()
    assert wrong <= 8  # 5 % of 60, and three standard errors


def test_of_twenty_studies_one_at_most_calls_a_recipe_the_same_that_is_beyond_the_margin():
    """The first of 24 recipes is the best, and the others are 1.02 margins from it: the worst case."""
    wrong, margin = 0, 0.005
    for seed in range(60):
        rng = np.random.default_rng(seed)
        gaps = 0.1 + 1.02 * margin * (np.arange(24) > 0)[:, None] + rng.normal(0, 0.0025, (24, 4))
        spread = spread_over_seeds(gaps)
        found = versus(gaps, np.zeros(24, int), spread, np.tile(gaps.mean(axis=1), (2, 1)), fixed(0))
        lines = table(found, margin)[1:]
        wrong += lines["verdict"].eq("same").any()
        assert lines["p_same"].lt(0.05)[lines["verdict"].eq("same")].all()
    assert wrong <= 8  # 5 % of 60, and three standard errors


def test_same_is_reached_with_few_seeds_and_twins_are_the_same():
    runs = generated(("*.g.rounding", "wgrad.rotation", "*.scale"), noise=0.0005, seeds=3)
    found = against(runs)
    assert found[found["label"].ne("bf16")]["verdict"].eq("same").all()
    twin = runs[runs["recipe_label"].eq("recipe 0")].assign(config_id="twin", recipe_label="twin")
    lines = against(pd.concat([runs, twin], ignore_index=True), "0" * 16).set_index("label")
    assert lines.loc["twin", ["difference", "low", "high"]].tolist() == [0, 0, 0]


def test_costs_that_differ_in_their_last_bit_are_one_cost():
    cost = np.array([0.1 + 0.2, 0.3, 0.5, np.nan, np.inf])
    assert equal_costs(cost)[:3].tolist() == [0.3, 0.3, 0.5]
    assert front(cost, [1.0, 1.0, 0.5, 0.1, 0.1]).tolist() == [True, True, True, False, False]


def test_what_is_expected_lies_between_the_recipe_and_the_rest():
    lines = front_chance(generated(("*.g.rounding", "wgrad.rotation", "*.scale"), noise=0.05, seeds=3))
    assert np.ptp(lines["expected"]) < np.ptp(lines["gap"])
    assert (lines["expected_low"] < lines["expected"]).all()
    assert (lines["expected"] < lines["expected_high"]).all()


def test_factors_that_are_a_mixture_of_others_are_drawn_from():
    """Directions of which the data say nothing move no recipe, whatever their neighbours weigh."""
    rng = np.random.default_rng(1)
    level = rng.integers(0, 19, 400)
    twins = [level, (level + 5) % 19, level // 4, rng.integers(0, 4, 400)]
    truth = 0.2 + np.where(level == 3, 5.0, 0.01 * level) + 1e-3 * rng.normal(size=400)
    gaps = truth[:, None] + 1e-4 * rng.normal(size=(400, 1)) + 1e-5 * rng.normal(size=(400, 3))
    found = posterior(spread_over_seeds(gaps), gaps, twins)
    assert found.draw(50, rng).mean(axis=0) == pytest.approx(gaps.mean(axis=1), abs=1e-3)
