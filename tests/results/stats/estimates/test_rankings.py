import numpy as np
import pytest
from scipy.stats import spearmanr

from fp4dse.results.stats.estimates.rankings import signs, spearman


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
