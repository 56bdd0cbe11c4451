"""Fits of many data sets at once are those of scipy, one after the other."""

import numpy as np
import pytest
from scipy.optimize import least_squares

from fp4dse.results.stats.estimates.curve_fits import best_of_starts, fitted

X = np.linspace(0.2, 3, 9)


def decay(parameters):
    a, b, c = parameters.T[:, :, None]
    fall = np.exp(-b * X)
    value = a * fall + c
    return value, np.stack([fall, -a * X * fall, np.ones_like(fall)], axis=2)


def test_each_data_set_is_fitted_as_scipy_does_it():
    rng = np.random.default_rng(0)
    truth = np.column_stack([rng.uniform(1, 3, 40), rng.uniform(0.3, 2, 40), rng.uniform(-1, 1, 40)])
    target = decay(truth)[0] + rng.normal(0, 0.02, (40, len(X)))
    weight = rng.uniform(0.5, 2, len(X))
    found, error = fitted(decay, np.tile([1.0, 1.0, 0.0], (40, 1)), target, weight)
    for i in range(40):
        one = least_squares(lambda p, i=i: (decay(p[None])[0][0] - target[i]) * weight, [1.0, 1.0, 0.0])
        assert error[i] == pytest.approx(2 * one.cost, rel=1e-6)
        assert found[i] == pytest.approx(one.x, rel=1e-3, abs=1e-3)


def test_the_best_of_several_starts_is_taken():
    target = decay(np.array([[2.0, 1.0, 0.5]]))[0][0]
    starts = np.array([[-50.0, 30.0, 0.0], [1.0, 0.5, 0.0]])
    assert best_of_starts(decay, starts, target, np.ones(len(X))) == pytest.approx([2.0, 1.0, 0.5], rel=1e-6)
