"""The bootstrap without chance is what resamples tend to."""

import numpy as np
import pytest
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from fp4dse.results.stats.estimates.resampled import LEAST, expanded_percentiles

RESAMPLES = 40_000


def by_resamples(rows, seed):
    """Per row [rows, n] its limits and p by the definition, and the standard error of the share beyond 0, over it."""
    n = rows.shape[1]
    means = rows @ np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), RESAMPLES).T / n
    widened = np.sqrt(n / (n - 1))
    tail = ndtr(widened * stdtrit(n - 1, 0.025))
    beyond = np.minimum((means <= 0).mean(axis=1), (means >= 0).mean(axis=1))
    p = 2 * stdtr(n - 1, np.minimum(ndtri(beyond) / widened, 0))
    return np.quantile(means, [tail, 1 - tail], axis=1).T, p, 1 / np.sqrt(beyond * RESAMPLES)


@pytest.mark.parametrize("n", [30, 100])
def test_it_is_what_many_resamples_tend_to(n):
    rng = np.random.default_rng(n)
    rows = [rng.normal(size=n), rng.gamma(0.5, 1.0, n) - 0.5, rng.standard_t(3, n), np.round(rng.normal(size=n))]
    unit = np.std(rows, axis=1, keepdims=True) / np.sqrt(n)
    rows = rows - np.mean(rows, axis=1, keepdims=True) + np.array([[2.0], [-2.3], [1.0], [2.5]]) * unit
    found = expanded_percentiles(rows, np.ones(4), 0.95)
    limits, p, error = by_resamples(rows, n)
    assert (np.abs(found[:, :2] - limits) / unit).max() < 0.08, "the standard error of such a limit is .015"
    assert (np.abs(found[:, 2] / p - 1) / error).max() < 4


def test_the_order_of_values_and_what_they_are_measured_in_do_not_matter():
    rng = np.random.default_rng(0)
    row = rng.gamma(0.5, 1.0, 32) - 0.2
    [plain, *others] = expanded_percentiles(np.stack([row, rng.permutation(row), 1e6 * row, -row]), np.ones(4), 0.95)
    assert others[0] == pytest.approx(plain)
    assert others[1] == pytest.approx([1e6, 1e6, 1] * plain)
    assert others[2] == pytest.approx([-plain[1], -plain[0], plain[2]])


def test_far_tails_are_left_to_the_t_test_and_equal_values_have_no_width():
    far = np.random.default_rng(1).normal(size=(2, 40)) + 3
    found = expanded_percentiles(np.concatenate([far, np.full((1, 40), 0.25)]), np.array([1e-12, 1.0, 0.3]), 0.95)
    assert found[0, 2] == 1e-12
    widened = np.sqrt(40 / 39)
    assert found[1, 2] == pytest.approx(2 * stdtr(39, ndtri(LEAST) / widened))
    assert found[2].tolist() == [0.25, 0.25, 0.3]


def test_one_outlier_is_within_the_grid():
    """The most that one value of n can lie off their mean, √(n − 1) standard deviations, drawn several times."""
    row = np.zeros(40)
    row[0] = 1.0
    low, high, p = expanded_percentiles(row[None], np.ones(1), 0.95)[0]
    drawn = np.random.default_rng(2).binomial(40, 1 / 40, RESAMPLES) / 40
    assert high == pytest.approx(np.quantile(drawn, 0.98), abs=0.002)
    assert abs(low) < 0.002
    assert p > 0.3
