"""Agreement of two rankings: signs of the pairs that one of them tells apart, and Spearman's rank correlation.

The interval of a correlation is the percentile bootstrap over the items that are ranked: what other items of their kind
might have said. The noise that these were measured with is in it, since it is in them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fp4dse.results.stats.estimates.intervals import CONFIDENCE

Array = NDArray[np.float64]
FEWEST = 8
"""Items with an interval: of six at a correlation of .9 it holds the true one in .90 of studies, of eight in .97."""
RESAMPLES = 4000


def signs(truth: ArrayLike, proxy: ArrayLike, apart: float) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Numbers of pairs of S values that differ by `apart` or more in truth, and of those that the proxy orders alike.

    truth, proxy: [..., S]; returns [...] each.
    """
    a, b = np.broadcast_arrays(np.asarray(truth, float), np.asarray(proxy, float))
    first, second = np.triu_indices(a.shape[-1], 1)
    true = a[..., first] - a[..., second]
    said = b[..., first] - b[..., second]
    told = np.abs(true) >= apart * (1 - 1e-9)
    return told.sum(axis=-1), (told & (true * said > 0)).sum(axis=-1)


def spearman(a: ArrayLike, b: ArrayLike) -> Array:
    """Spearman's correlation along the last axis, [...]; NaN where all values of one are equal. scipy's for many at
    once."""
    from scipy.stats import rankdata  # more than a second, which other statistics do without

    x, y = np.broadcast_arrays(np.asarray(a, float), np.asarray(b, float))
    x, y = rankdata(x, axis=-1), rankdata(y, axis=-1)
    x, y = x - x.mean(axis=-1, keepdims=True), y - y.mean(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: Array = (x * y).sum(axis=-1) / np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))
    return found


def spearman_interval(a: ArrayLike, b: ArrayLike, resamples: int = RESAMPLES, seed: int = 0) -> tuple[float, float]:
    """The 95 % interval of `spearman` of S items, a and b [S]; NaN with fewer than FEWEST, and where all values of one
    are equal. Resamples with all values of one equal are left out."""
    x, y = np.asarray(a, float), np.asarray(b, float)
    if len(x) < FEWEST or not np.isfinite(spearman(x, y)):
        return np.nan, np.nan
    chosen = np.random.default_rng(seed).integers(0, len(x), (resamples, len(x)))
    low, high = np.nanquantile(spearman(x[chosen], y[chosen]), [0.5 - CONFIDENCE / 2, 0.5 + CONFIDENCE / 2])
    return float(low), float(high)
