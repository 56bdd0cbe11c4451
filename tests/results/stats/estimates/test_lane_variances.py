"""The variance of a lane of each recipe, and means that are held against it."""

import numpy as np
import pytest

from fp4dse.results.stats.estimates.mean_of_pairs import pooled_beside_lanes
from fp4dse.results.stats.estimates.spread import lane_variances, spread_over_seeds


def test_lanes_vary_as_the_errors_of_their_means_say_and_nothing_is_known_of_a_recipe_without_a_seed():
    y = np.random.default_rng(0).normal(0, np.geomspace(0.01, 0.1, 20)[:, None], (20, 4))
    y[3, 1] = np.nan
    spread = spread_over_seeds(y)
    variance, freedom = lane_variances(np.vstack([y, np.full(4, np.nan)]))
    assert variance[:-1] == pytest.approx(np.square(spread.error) * np.isfinite(y).sum(axis=1))
    assert freedom[:-1] == pytest.approx(spread.freedom)
    assert np.isnan([variance[-1], freedom[-1]]).all()
    assert np.isnan(lane_variances(y[:, :1])[0]).all()


def test_a_variance_that_is_held_against_an_estimate_has_fewer_degrees_of_freedom():
    rng, freedom = np.random.default_rng(1), np.full(400, 2.0)
    alone = np.geomspace(0.1, 10, 400)
    of = alone * rng.chisquare(2, 400) / 2
    known, many = pooled_beside_lanes(of, alone, freedom, np.full(400, np.inf))
    held, few = pooled_beside_lanes(of, alone, freedom, np.full(400, 10.0))
    assert held.tolist() == known.tolist() == pytest.approx(alone, rel=0.15)
    assert 1 / few == pytest.approx(1 / many + 0.1)
