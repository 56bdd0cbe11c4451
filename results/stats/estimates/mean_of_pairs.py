"""The mean difference over pairs of recipes that differ in one thing, each pair once, and how sure it is: its variance
over seeds, held against what independent lanes of its own recipes would give it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fp4dse.results.stats.estimates.spread import shrunken


def mean_of_pairs(
    d: NDArray[np.float64], lane: NDArray[np.float64], lane_freedom: NDArray[np.float64]
) -> dict[str, float]:
    """The mean of pairs (difference), its variance by the differences between seeds and that of independent lanes
    (alone), and the degrees of freedom of both (freedom, lane_freedom). d: [pairs, seeds], each pair with one seed or
    more, NaN where it has none; lane and lane_freedom: [pairs, 2], of both recipes, as of `lane_variances`.

    A pair weighs the same whatever its number of seeds. Each seed's part in the mean is its differences to the means of
    their pairs; the squares of these parts add up to the variance, up to the share that the pairs' means take from it,
    with (number of seeds - 1) degrees of freedom where all pairs have the same seeds."""
    whole, lanes = np.isfinite(d), lane.sum(axis=1)
    often = whole.sum(axis=1)
    share = whole / (often * len(d))[:, None]
    means = np.nansum(d, axis=1) / often
    parts = np.nansum(share * (d - means[:, None]), axis=0)
    of_means = lanes / often if lanes.sum() > 0 else 1 / often
    left = (of_means * (1 - 1 / often)).sum() / of_means.sum()
    return {
        "difference": means.mean(),
        "variance": np.square(parts).sum() / left if left > 0 else np.nan,
        "alone": (lanes / often).sum() / len(d) ** 2,
        "freedom": 1 / np.square(share.sum(axis=0)).sum() - 1,
        "lane_freedom": _freedom_of_sum(lane, lane_freedom),
    }


def _freedom_of_sum(variance: NDArray[np.float64], freedom: NDArray[np.float64]) -> float:
    """Degrees of freedom of a sum of variances (Satterthwaite 1946)."""
    known = variance > 0
    variance, freedom = variance[known], freedom[known]
    return float(variance.sum() ** 2 / (variance**2 / freedom).sum()) if len(variance) else np.nan


def pooled_beside_lanes(
    variance: NDArray[np.float64],
    alone: NDArray[np.float64],
    freedom: NDArray[np.float64],
    alone_freedom: NDArray[np.float64],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Variances over seeds of several means and their degrees of freedom, pooled as far as they are alike when each is
    held against `alone`, what independent lanes would give it. [n] each, NaN or 0 where nothing is known.

    alone_freedom: of `alone`. A variance that is pooled is a product of the two, whose relative variances, 2 over the
    degrees of freedom, add up."""
    usable = (alone > 0) & (freedom > 0) & np.isfinite(variance)
    if usable.sum() < 2:
        return variance, freedom
    variance, freedom = variance.copy(), freedom.copy()
    ratio, freedom[usable] = shrunken(variance[usable] / alone[usable], freedom[usable])
    variance[usable] = ratio * alone[usable]
    freedom[usable] = 1 / (1 / freedom[usable] + 1 / alone_freedom[usable])
    return variance, freedom
