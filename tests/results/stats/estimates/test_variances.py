"""Draws of variances: what they have in common is found, and that it is uncertain is not forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import polygamma

from fp4dse.results.stats.estimates.spread import spread_over_seeds
from fp4dse.results.stats.estimates.variances import PRIOR_FREEDOM, inverse_trigamma, variances

SEEDS = 3


def sampled(count: int, width: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """True variances, whose logs have a standard deviation of `width`, and those of SEEDS seeds."""
    freedom = 2 * inverse_trigamma(max(width, 0.01) ** 2)
    truth = freedom / rng.chisquare(freedom, count)
    return truth, truth * rng.chisquare(SEEDS - 1, count) / (SEEDS - 1)


@pytest.mark.parametrize("width", [0.4, 0.8, 2.0])
def test_draws_cover_the_truth(width: float) -> None:
    # 40 studies of 50: the share of true variances below the drawn median, 5 % and 95 % quantile
    rng = np.random.default_rng(1)
    below = []
    for _ in range(40):
        truth, own = sampled(50, width, rng)
        drawn = variances(own, np.full(50, SEEDS - 1.0)).draw(400, rng)
        below.append((truth < np.quantile(drawn, [0.05, 0.5, 0.95], axis=0)).mean(axis=1))
    low, middle, high = np.mean(below, axis=0)
    assert low == pytest.approx(0.05, abs=0.05)
    assert high == pytest.approx(0.95, abs=0.04)
    assert middle == pytest.approx(0.5, abs=0.08)


def test_few_recipes_leave_open_whether_they_are_alike_and_many_do_not() -> None:
    rng = np.random.default_rng(2)
    spans = {}
    for count in (12, 3000):
        found = variances(sampled(count, 0.0, rng)[1], np.full(count, SEEDS - 1.0))
        spans[count] = float(found.chances @ (1 / PRIOR_FREEDOM))
    assert spans[12] > 10 * spans[3000]


def test_the_posterior_of_differing_variances_is_where_they_are() -> None:
    found = variances(sampled(3000, 0.8, np.random.default_rng(3))[1], np.full(3000, SEEDS - 1.0))
    freedom = PRIOR_FREEDOM[found.chances.argmax()]
    assert polygamma(1, freedom / 2) == pytest.approx(0.64, rel=0.25)


def test_where_nothing_is_known_nothing_is_drawn() -> None:
    rng = np.random.default_rng(4)
    for own, freedom, said in (([0.0, 0.0], [2, 2], [0, 0]), ([3.0, np.nan], [2, 0], [3, 3])):
        drawn = variances(np.array(own), np.array(freedom, float)).draw(3, rng)
        assert np.array_equal(drawn, np.tile(said, (3, 1)))
    assert np.isfinite(variances(np.array([0.0, 1.0, 2.0]), np.full(3, 2.0)).draw(5, rng)).all()


def test_trigamma_is_inverted() -> None:
    for x in (0.3, 2.0, 400.0):
        assert inverse_trigamma(float(polygamma(1, x))) == pytest.approx(x, rel=1e-6)


def test_a_recipe_with_one_seed_may_have_any_variance_that_others_have() -> None:
    gaps = np.random.default_rng(5).standard_normal((40, SEEDS))
    gaps[0, 1:] = np.nan
    drawn = spread_over_seeds(gaps).variances.draw(4000, np.random.default_rng(6))
    assert np.median(drawn[:, 0]) == pytest.approx(np.median(drawn), rel=0.2)


def test_a_variance_that_goes_with_the_gap_is_pooled_with_its_neighbours() -> None:
    # two groups whose standard deviations differ by twenty: each is told from within its own
    rng = np.random.default_rng(7)
    means = np.sort(np.concatenate([rng.uniform(0, 0.02, 200), rng.uniform(0.4, 0.7, 200)]))
    true = np.where(means < 0.1, 0.001, 0.02)
    found = spread_over_seeds(means[:, None] + true[:, None] * rng.standard_normal((400, SEEDS)))
    away = np.abs(np.arange(400) - 199.5) > 30
    ratio = found.error[away] * np.sqrt(SEEDS) / true[away]
    assert np.quantile(ratio, [0.1, 0.9]) == pytest.approx([0.85, 1.15], abs=0.2)
    assert np.median(found.freedom) > 8


@pytest.mark.parametrize("end", [0, -1])
def test_the_variances_of_the_best_recipes_do_not_hang_on_the_luck_of_the_very_best(end: int) -> None:
    rng = np.random.default_rng(8)
    means = np.sort(rng.uniform(0, 0.1, 2000))
    gaps = means[:, None] + 0.001 * rng.standard_normal((2000, SEEDS))
    first = np.argsort(gaps.mean(axis=1))[end]
    gaps[first] = gaps[first].mean() + 1e-3 * (gaps[first] - gaps[first].mean())  # its seeds are close by chance
    found = spread_over_seeds(gaps)
    order = np.argsort(found.mean)
    near = order[1:51] if end == 0 else order[-51:-1]
    assert np.median(found.error[near]) * np.sqrt(SEEDS) == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize("width", [0.4, 2.0])
def test_draws_of_a_difference_cover_its_variance(width: float) -> None:
    # 40 studies of 50, the differences of 25 pairs each; all that is known of a pair is its own three differences and
    # what is usual
    rng = np.random.default_rng(6)
    below = []
    for _ in range(40):
        truth, own = sampled(50, width, rng)
        found = variances(own, np.full(50, SEEDS - 1.0))
        for i in range(0, 50, 2):
            variance = truth[i : i + 2].sum()
            seen = variance * rng.chisquare(SEEDS - 1) / (SEEDS - 1)
            drawn = found.draw_of_difference([i, i + 1], seen, SEEDS - 1, 400, rng)
            below.append(variance < np.quantile(drawn, [0.05, 0.5, 0.95]))
    low, middle, high = np.mean(below, axis=0)
    assert low == pytest.approx(0.05, abs=0.05)
    assert high == pytest.approx(0.95, abs=0.05)
    assert middle == pytest.approx(0.5, abs=0.12)  # of two lanes as unlike as these, the one sets the sum


def test_a_difference_of_which_nothing_else_is_known_has_the_variance_of_its_own_pairs() -> None:
    drawn = variances(np.zeros(2), np.zeros(2)).draw_of_difference([0, 1], 4.0, 5, 20_000, np.random.default_rng(7))
    assert (1 / drawn).mean() == pytest.approx(1 / 4.0, rel=0.03)  # σ² = 4 · 5/χ²(5)
