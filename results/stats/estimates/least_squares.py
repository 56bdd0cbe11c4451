"""Weighted least squares over a table of recipes × seeds, with seeds as blocks and as replicates.

    y[r, s] = design[r] · β + seed[s] + error           each recipe weighs weight[r], whatever number of seeds it has

Seed effects come from differences within recipes alone, so that what the design does not explain of a recipe cannot
pass for an effect of the seeds that it happens to have. Then the recipes' means are fitted. `ridge` holds coefficients
near zero where the data say nothing about them.

Errors of estimates are those of the sandwich clustered by seed: influence[:, s] is how the lanes of seed s moved β, by
themselves and through the seed effects that they tell, and

    error²(c · β) = S/(S-1) · Σ_s (c · influence[:, s])²           S - 1 degrees of freedom

which equals the t-interval over per-seed estimates where no lane is lacking. Where some are, seeds count unequally: S
is the number of equal ones that would tell as much, (Σ q_s)² / Σ q_s² of the squared weights q_s that the lanes of a
seed have in c · β. Recipes of three seeds beside others of six differ from them by what three seeds say. With one seed
the clusters are the recipes (HC1), with the residual's degrees of freedom.

What columns T alone explain is the rise of the weighted sum of squares (with the ridge's part) if the model does
without them, Type III of a coding that sums to zero; no second fit is needed:

    rise(T) = β_T · (inverse[T, T])⁻¹ · β_T        inverse = (Xᵀ W X + ridge)⁻¹
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve

Array = NDArray[np.float64]
_ROUNDING = 1e-9
LEAST_FREEDOM = 0.5
"""Of an error that is told: below, all but one seed say next to nothing."""


class Fit(NamedTuple):
    """p coefficients, k replicates: the seeds, or the recipes where there is one seed."""

    coefficients: Array
    """[p]"""
    influence: Array
    """[p, k]"""
    freedom: float
    """Where no lane is lacking; else of a contrast at most."""
    by_seeds: bool
    centred: Array
    """[recipes], the mean of each over its seeds, seed effects taken out."""
    inverse: Array
    """[p, p]"""
    reach: Array
    """[p, recipes]: how much a recipe's mean moves each coefficient."""
    weight: float
    """Of all recipes."""
    lane: float
    """Variance of one lane within recipes and seeds; NaN with one seed."""
    patterns: NDArray[np.bool_]
    """[patterns, seeds]: which seeds a recipe may have."""
    pattern: NDArray[np.intp]
    """[recipes]: the row of `patterns`."""
    through: Array
    """[p, seeds]: how much each seed's effect, as it is estimated, is taken off each coefficient; 0 where no lane is
    lacking."""
    misfit: float
    """Variance between recipes that neither the design nor the luck of lanes explains; 0 with one seed, whose errors
    have it already, NaN where no recipe is left to tell."""
    misfit_freedom: float

    def estimate(self, contrasts: Array) -> tuple[Array, Array, Array]:
        """Values, standard errors and their degrees of freedom, of contrasts [m, p] of the coefficients; NaN errors
        without freedom."""
        freedom = np.full(len(contrasts), self.freedom)
        clusters = np.full(len(contrasts), float(self.influence.shape[1]))
        if self.by_seeds and not self.patterns.all():
            weights = self.seed_weights(contrasts)
            told = weights.sum(axis=1) > 0
            alike = np.square(weights.sum(axis=1)) / np.where(told, np.square(weights).sum(axis=1), 1.0)
            freedom = np.where(told, np.maximum(alike - 1, 0.0), freedom)
            clusters = freedom + 1
        with np.errstate(divide="ignore", invalid="ignore"):
            variance = clusters / freedom * np.square(contrasts @ self.influence).sum(axis=1)
            error = np.where(freedom >= LEAST_FREEDOM, np.sqrt(variance), np.nan)
        return contrasts @ self.coefficients, error, freedom

    def seed_weights(self, contrasts: Array) -> Array:
        """[m, seeds]: the sum of squares of the weights that the lanes of each seed have in contrasts [m, p]."""
        own, through = contrasts @ self.reach, contrasts @ self.through
        out = np.zeros(through.shape)
        for number, there in enumerate(self.patterns):
            mine, n = own[:, self.pattern == number], there.sum()
            beside = through[:, there].mean(axis=1, keepdims=True) - through[:, there]
            direct = mine.sum(axis=1, keepdims=True) / n
            alone = np.square(mine).sum(axis=1, keepdims=True) / n**2
            out[:, there] += alone + 2 * direct * beside + mine.shape[1] * np.square(beside)
        return out

    def variances(self, contrasts: Array, complete: Array) -> tuple[Array, Array, Array, Array]:
        """Of contrasts [m, p]: the variance over seeds, that of independent lanes, that from combinations that were not
        tried, and the degrees of freedom of the first. complete: [m], the sum of squares of the weights that all
        combinations would have."""
        weights = np.square(contrasts @ self.reach)  # [m, recipes]
        untried = np.maximum(weights.sum(axis=1) - complete, 0.0)
        rest = np.where(untried > 1e-6 * complete, self.misfit * untried, 0.0)
        _, error, freedom = self.estimate(contrasts)
        whole = self.patterns.all()
        alone = weights.sum(axis=1) / self.patterns.shape[1] if whole else self.seed_weights(contrasts).sum(axis=1)
        return np.square(error), self.lane * alone, rest, freedom

    def rise(self, columns: Array, slack: float = 1.0) -> float:
        """The increase of the sum of squares if some columns are left out.

        columns: [any, p], by orthonormal coordinates that the coefficients are of (row_space.py), or rows of ones and
        zeros. slack: the ridge, times the sum of weights, of directions of the columns that are no coordinate.
        """
        part = columns @ self.coefficients
        beside = np.eye(len(columns)) - columns @ columns.T
        beside[np.abs(beside) < _ROUNDING] = 0.0
        return float(part @ np.linalg.solve(columns @ self.inverse @ columns.T + beside / slack, part))


def fit(design: Array, y: Array, weight: Array, ridge: Array) -> Fit:
    """Least squares. design: [recipes, p]; y: [recipes, seeds], NaN where lacking; weight: [recipes]; ridge: [p]."""
    present = np.isfinite(y)
    p, seeds = design.shape[1], y.shape[1]
    adjusted = np.where(present, y - seed_effects(y), 0.0)
    share = present / present.sum(axis=1, keepdims=True)  # [recipes, seeds]
    centred = (share * adjusted).sum(axis=1)
    factor = cho_factor(design.T @ (design * weight[:, None]) + np.diag(ridge * weight.sum()))
    coefficients = cho_solve(factor, design.T @ (weight * centred))
    inverse = cho_solve(factor, np.eye(p))
    reach = cho_solve(factor, design.T * weight)
    lanes = present.sum(axis=1).astype(float)
    facts = (centred, inverse, reach, float(weight.sum()))
    if seeds == 1:
        influence = reach * (centred - design @ coefficients)
        told = *_patterns(present), np.zeros((p, 1))
        return Fit(coefficients, influence, float(len(design) - p), False, *facts, np.nan, *told, 0.0, np.inf)
    residual = np.where(present, adjusted - centred[:, None], 0.0)
    within = np.square(residual).sum()
    freedom = max(float(lanes.sum() - len(design) - seeds + 1), 1.0)
    lane = float(within / freedom)
    left = len(design) - float((reach * design.T).sum())
    misfit = np.nan
    if left > 0.5:
        between = float(weight / weight.mean() @ np.square(centred - design @ coefficients)) / left
        misfit = max(between - lane * float(np.average(1 / lanes, weights=weight)), 0.0)
    through = (reach @ share) @ _seed_inverse(present)
    influence = reach @ (share * residual) + through @ (share.T @ residual)
    told = *_patterns(present), through
    return Fit(coefficients, influence, seeds - 1.0, True, *facts, lane, *told, misfit, max(left, 0.5))


def _patterns(present: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
    """The distinct rows of [recipes, seeds], and which one each recipe has."""
    patterns, which = np.unique(present, axis=0, return_inverse=True)
    return patterns, which.ravel()


def seed_effects(y: Array) -> Array:
    """[seeds]: what each seed adds to all recipes, zero on average, from differences within recipes. y: see `fit`."""
    present = np.isfinite(y)
    within = present / present.sum(axis=1, keepdims=True)
    values = np.where(present, y, 0.0)
    deviation = np.where(present, y - (values * within).sum(axis=1, keepdims=True), 0.0).sum(axis=0)
    return np.asarray(_seed_inverse(present) @ deviation)


def _seed_inverse(present: NDArray[np.bool_]) -> Array:
    """[seeds, seeds]: seed effects from the sums of deviations within recipes. present: [recipes, seeds]."""
    within = present / present.sum(axis=1, keepdims=True)
    normal = np.diag(present.sum(axis=0).astype(float)) - present.T.astype(float) @ within
    return np.asarray(np.linalg.pinv(normal, rcond=1e-10))


def sum_to_zero(levels: int) -> Array:
    """The coding [levels, levels - 1] whose columns sum to zero: coefficients are deviations from the plain mean."""
    return np.vstack([np.eye(levels - 1), -np.ones((1, levels - 1))])


def null_space(design: Array, weight: Array) -> Array:
    """[p, k]: directions of the coefficients that the rows say nothing about."""
    values, vectors = np.linalg.eigh(design.T @ (design * weight[:, None]) / weight.sum())
    return np.asarray(vectors[:, values < 1e-9 * max(values[-1], 1e-300)])


def undetermined(design: Array, weight: Array) -> NDArray[np.bool_]:
    """True for columns that the rows do not determine, because they are a mixture of others: bool [p]."""
    return np.asarray(np.abs(null_space(design, weight)).max(axis=1, initial=0.0) > 1e-6)
