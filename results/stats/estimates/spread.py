"""The spread over seeds: how far the mean of a recipe's seeds may be from what it is over all seeds.

With three seeds a recipe's own variance is next to unknown, so variances are pooled: each is shrunk towards a common
one by as many degrees of freedom as their spread allows (the moment estimator of Smyth 2004, as in limma):

    v = (d0 · s0² + d · s²) / (d0 + d)          d0 + d degrees of freedom, at most those of all recipes together

Recipes that lose much also differ much from seed to seed, by a factor of twenty in one study (docs/log.md). So where
there are many recipes, each variance is held against what is usual among those of a similar gap (limma's trend).

A seed that is hard for all recipes, or on which BF16 was lucky, moves all gaps alike. That part is estimated apart (per
seed, the median over recipes).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import uniform_filter1d
from scipy.special import polygamma

from fp4dse.results.stats.estimates.variances import Variances, expected_log, inverse_trigamma, log_variances, variances

LEAST_NEIGHBOURS = 50
"""Recipes of similar gaps whose variances say what is usual."""


class Spread(NamedTuple):
    """Mean gaps of one setting and their errors, [recipes] each, and the error shared by all."""

    mean: NDArray[np.float64]
    error: NDArray[np.float64]
    """Standard error of the mean without the shared part; NaN if nothing is known."""
    freedom: NDArray[np.float64]
    """Degrees of freedom of `error`, inf for a normal distribution."""
    shared_error: float
    seeds: int
    variances: Variances
    """Of one seed: what it may be, where `error` has what it is taken to be."""


def spread_over_seeds(gaps: NDArray[np.float64]) -> Spread:
    """Means and errors of gaps [recipes, seeds], NaN where there is none; every recipe has one at least."""
    lanes = _lanes(gaps)
    n, many, variance, shared = lanes.seeds, lanes.seeds > 1, lanes.variance, lanes.shared
    drawn = variances(np.where(many, variance, 0.0), n - 1, lanes.usual)
    variance, freedom = _pooled(lanes)
    common = 0.0
    if len(shared) > 1 and many.sum() > 1:
        # what the median has from the recipes' own noise: about π/2 times this, but taking all of it off leaves the
        # interval too narrow where it was large by chance, and none of it too wide with few recipes
        of_median = 0.5 * variance[many].mean() / many.sum()
        common = math.sqrt(max(np.var(shared, ddof=1) - of_median, 0.0) / len(shared))
    return Spread(lanes.mean, np.sqrt(variance / n), freedom, common, gaps.shape[1], drawn)


def lane_variances(y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Variance of a lane of each recipe and its degrees of freedom, pooled as those of `spread_over_seeds`; both
    are NaN of a recipe without a seed, and all variances where no recipe has two. y: [recipes, seeds], NaN where there
    is none."""
    variance, freedom = np.full((2, len(y)), np.nan)
    some = np.isfinite(y).any(axis=1)
    if some.any():
        variance[some], freedom[some] = _pooled(_lanes(y[some]))
    return variance, freedom


class _Lanes(NamedTuple):
    """seeds, mean, variance of a lane without the part that is shared (NaN of fewer than two seeds), and what variance
    is usual, up to a factor: of each recipe. shared: of each seed."""

    seeds: NDArray[np.float64]
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    usual: NDArray[np.float64]
    shared: NDArray[np.float64]


def _lanes(gaps: NDArray[np.float64]) -> _Lanes:
    n = np.isfinite(gaps).sum(axis=1).astype(np.float64)
    mean = np.nansum(gaps, axis=1) / n
    deviation = gaps - mean[:, None]
    many = n > 1
    shared = np.zeros(gaps.shape[1])
    if many.sum() > 1:
        seen = np.isfinite(deviation[many]).any(axis=0)
        shared[seen] = np.nanmedian(deviation[many][:, seen], axis=0)
    own = deviation - np.where(np.isfinite(gaps), shared, 0)
    fewer = many.sum() / (many.sum() - 1) if many.sum() > 1 else 1.0  # the median took a share of each recipe's noise
    with np.errstate(invalid="ignore", divide="ignore"):
        own_mean = np.nansum(own, axis=1) / n
        variance = np.nansum((own - own_mean[:, None]) ** 2, axis=1) / (n - 1) * fewer
    variance = np.where(many, variance, np.nan)
    return _Lanes(n, mean, variance, _usual(variance, mean), shared)


def _pooled(of: _Lanes) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    variance, freedom = shrunken(of.variance / of.usual, of.seeds - 1)
    return variance * of.usual, freedom


def _usual(variance: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """The variance that is usual among recipes of a similar mean, up to a factor that all have; [recipes] each. Ones
    where there are too few recipes to tell."""
    known = np.flatnonzero(variance > 0)
    if len(known) < 4 * LEAST_NEIGHBOURS:
        return np.ones(len(mean))
    order = known[np.argsort(mean[known], kind="stable")]
    # at the ends neighbours count twice; the last of them, counted for all that lack, would say it for the best recipes
    near = uniform_filter1d(np.log(variance[order]), max(LEAST_NEIGHBOURS, len(known) // 10), mode="reflect")
    return np.asarray(np.exp(np.interp(mean, mean[order], near)))


def shrunken(
    variance: NDArray[np.float64], freedom: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Variances shrunk towards their common value, with their degrees of freedom (Smyth 2004). [n] each, as given.

    A variance that is NaN (freedom 0) becomes the common one; all NaN stay so. Zeros count as the smallest above.
    """
    d = np.asarray(freedom, float)
    known = np.isfinite(variance) & (d > 0)
    if not (variance[known] > 0).any():
        return variance, d
    if known.sum() == 1:
        return np.where(known, variance, variance[known]), np.where(known, d, d[known])
    log = log_variances(variance[known]) - expected_log(d[known] / 2)
    excess = log.var(ddof=1) - polygamma(1, d[known] / 2).mean()
    d0 = 2 * inverse_trigamma(excess) if excess > 0 else np.inf
    centre = math.exp(log.mean() + (float(expected_log(np.array(d0 / 2))) if np.isfinite(d0) else 0.0))
    most = d[known].sum()
    if not np.isfinite(d0):
        return np.full_like(d, centre), np.full_like(d, most)
    pooled = np.where(known, (d0 * centre + d * np.where(known, variance, 0)) / (d0 + d), centre)
    return pooled, np.minimum(np.where(known, d0 + d, d0), most)
