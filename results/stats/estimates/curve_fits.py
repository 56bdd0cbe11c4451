"""Nonlinear least squares for many data sets at once, which scipy fits one after the other: Levenberg–Marquardt.

A bootstrap fits the same curve to a thousand resamples. Each step solves all of their normal equations together;
tests compare single fits with scipy.optimize.least_squares.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

Curve = Callable[[Array], tuple[Array, Array]]
"""Parameters [R, K] -> values [R, P] and their derivatives [R, P, K]."""

STEPS = 100
LONGEST = 1.0
"""Of a step in any parameter: the curves here have logarithms as parameters."""
SMALL_GAIN = 1e-12


def fitted(curve: Curve, start: Array, target: Array, weight: Array) -> tuple[Array, Array]:
    """Parameters [R, K] of the least weighted squares, and these [R]. target: [R, P]; weight: [P]; start: [R, K]."""
    parameters = np.array(start, float)
    damping = np.full(len(parameters), 1e-3)
    values, slopes = curve(parameters)
    error = _squares(values, target, weight)
    for _ in range(STEPS):
        weighted = slopes * weight[:, None]
        normal = np.swapaxes(weighted, 1, 2) @ weighted
        downhill = (np.swapaxes(weighted, 1, 2) @ ((target - values) * weight)[..., None])[..., 0]
        scale = np.einsum("rkk->rk", normal)
        scale = damping[:, None] * scale + 1e-12 * (scale.max(axis=1, keepdims=True) + 1e-300)
        step = np.linalg.solve(normal + scale[:, :, None] * np.eye(normal.shape[1]), downhill[..., None])[..., 0]
        tried = parameters + np.clip(step, -LONGEST, LONGEST)
        new_values, new_slopes = curve(tried)
        new_error = _squares(new_values, target, weight)
        better = new_error < error
        gain = np.where(better, error - new_error, 0)
        parameters = np.where(better[:, None], tried, parameters)
        values = np.where(better[:, None], new_values, values)
        slopes = np.where(better[:, None, None], new_slopes, slopes)
        damping = np.clip(np.where(better, damping / 5, damping * 5), 1e-12, 1e12)
        done = (gain <= SMALL_GAIN * error) & (better | (damping > 1e8))
        error = np.where(better, new_error, error)
        if done.all():
            break
    return parameters, error


def best_of_starts(curve: Curve, starts: Array, target: Array, weight: Array) -> Array:
    """The parameters [K] of one data set, target [P], from the best of several starts [S, K]."""
    parameters, error = fitted(curve, starts, np.broadcast_to(target, (len(starts), len(target))), weight)
    best: Array = parameters[int(np.nanargmin(error))]
    return best


def _squares(values: Array, target: Array, weight: Array) -> Array:
    error = np.square((values - target) * weight).sum(axis=1)
    return np.where(np.isfinite(error), error, np.inf)
