import numpy as np
import pytest
from scipy.stats import spearmanr

from fp4dse.results.stats.estimates.rankings import FEWEST, signs, spearman, spearman_interval


def test_spearman_of_many_is_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 6, (20, 9)), rng.normal(size=(20, 9))
    for mine, x, y in zip(spearman(a, b), a, b, strict=True):
        assert mine == pytest.approx(spearmanr(x, y).statistic)
    assert np.isnan(spearman([1, 1, 1], [1, 2, 3]))


def test_only_pairs_that_are_apart_count_and_a_tie_is_no_agreement():
    assert [int(n) for n in signs([0.0, 0.1, 0.3], [5.0, 4.0, 7.0], 0.2)] == [2, 2]
    assert [int(n) for n in signs([0.0, 0.1, 0.3], [5.0, 4.0, 4.0], 0.2)] == [2, 0]
    told, alike = signs([0.0, 0.2], [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], 0.2)
    assert told.tolist() == [1, 1, 1]
    assert alike.tolist() == [1, 0, 0]


def test_intervals_of_spearmans_hold_the_correlation_of_all_items_in_19_of_20_studies():
    """Of normal variables it is 6/π · arcsin(ρ/2). 400 studies: their share is known to .011."""
    rng = np.random.default_rng(1)
    for items, rho in ((10, 0.5), (20, 0.0), (20, 0.9)):
        x, noise = rng.normal(size=(2, 400, items))
        y = rho * x + np.sqrt(1 - rho**2) * noise
        ends = np.array([spearman_interval(a, b, 400) for a, b in zip(x, y, strict=True)])
        held = np.mean((ends[:, 0] <= (true := 6 / np.pi * np.arcsin(rho / 2))) & (true <= ends[:, 1]))
        assert 0.92 <= held <= 1.0, (items, rho, held)


def test_too_few_items_and_items_that_are_all_equal_have_no_interval():
    rng = np.random.default_rng(2)
    assert np.isnan(spearman_interval(*rng.normal(size=(2, FEWEST - 1)))).all()
    assert np.isfinite(spearman_interval(*rng.normal(size=(2, FEWEST)))).all()
    assert np.isnan(spearman_interval(np.ones(20), rng.normal(size=20))).all()
    assert spearman_interval(np.arange(9), 2 * np.arange(9)) == (1.0, 1.0)
