"""Intervals and p-values of means over seeds, row by row, and the words that numbers are put into.

With n paired values of mean m and standard deviation s the 95 % interval is m ± t(0.975, n-1) · s/√n below 30 seeds:
at n = 3 a percentile bootstrap covers 75 %, not 95 %. From 30 seeds on it is the expanded percentile bootstrap
(Hesterberg, arXiv 1411.5279): the percentiles Φ(±√(n/(n-1)) · t(0.975, n-1)) of resampled means, which need no normal
distribution and have the width of the t-interval where there is one.

scipy is imported where it is used: `fp4dse status` and the start of a sweep need the words alone.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
BOOTSTRAP_FROM = 30
"""Seeds from which on intervals are resampled."""
RESAMPLES = 2000


def mean_interval(values: ArrayLike) -> pd.DataFrame:
    """Per row of `values` [rows, seeds], NaN where there is none: mean, std, n, low, high, p.

    low, high: the 95 % interval of the mean, NaN with one value. p: two-sided t-test against zero. All rows of equal n
    share their resamples.
    """
    x = np.asarray(values, float)
    mean, std, n = _moments(x)
    half = half_width(std, n)
    low, high = mean - half, mean + half
    for size in np.unique(n[n >= BOOTSTRAP_FROM]):
        rows = np.flatnonzero(n == size)
        present = x[rows][np.isfinite(x[rows])].reshape(len(rows), size)
        low[rows], high[rows] = bootstrap(present).T
    return pd.DataFrame({"mean": mean, "std": std, "n": n, "low": low, "high": high, "p": _p_value(mean, std, n)})


def _moments(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Per row of `values` [rows, seeds]: mean, standard deviation and number of those that are finite."""
    x = np.where(np.isfinite(values), values, np.nan)
    n = np.isfinite(x).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(n > 0, np.nansum(x, axis=1) / n, np.nan)
        std = np.sqrt(np.where(n > 1, np.nansum((x - mean[:, None]) ** 2, axis=1) / (n - 1), np.nan))
    return mean, std, n


def bootstrap(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Expanded percentile interval of the mean of each row. values: [rows, n], n > 1; returns [rows, 2]."""
    from scipy.special import ndtr, stdtrit

    n = values.shape[1]
    tail = ndtr(np.sqrt(n / (n - 1)) * stdtrit(n - 1, 0.5 - CONFIDENCE / 2))
    counts = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), RESAMPLES)  # how often each seed is drawn
    out = np.empty((len(values), 2))
    for start in range(0, len(values), 1024):
        means = values[start : start + 1024] @ counts.T / n  # [rows, resamples]
        out[start : start + 1024] = np.quantile(means, [tail, 1 - tail], axis=1).T
    return out


def p_value(values: ArrayLike) -> NDArray[np.float64]:
    """Per row of differences [rows, seeds], NaN where there is none: two-sided p of their mean against zero; 1 where
    all are zero, NaN where there are fewer than two."""
    return _p_value(*_moments(np.asarray(values, float)))


def half_width(std: NDArray[np.float64], n: NDArray[np.number]) -> NDArray[np.float64]:
    """Half of the 95 % t-interval of a mean; NaN where n < 2."""
    from scipy.special import stdtrit

    n = np.where(n > 1, n, np.nan)
    found: NDArray[np.float64] = stdtrit(n - 1, 0.5 + CONFIDENCE / 2) * std / np.sqrt(n)
    return found


def _p_value(mean: NDArray[np.float64], std: NDArray[np.float64], n: NDArray[np.number]) -> NDArray[np.float64]:
    """Two-sided p of means with these standard deviations, of n values each."""
    from scipy.special import stdtr

    n = np.where(n > 1, n, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0, 0.0, np.abs(mean) / (std / np.sqrt(n)))
    found: NDArray[np.float64] = 2 * stdtr(n - 1, -t)
    return found


def adjusted(p: ArrayLike) -> NDArray[np.float64]:
    """p-values for a false discovery rate (Benjamini and Hochberg 1995): of all that is below 0.05, one in twenty is
    chance. NaN stays."""
    p = np.asarray(p, float)
    out, known = np.full(p.shape, np.nan), np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(-p[known])]  # the largest first
    steps = np.clip(p[order], 0, 1) * len(order) / np.arange(len(order), 0, -1)
    out[order] = np.clip(np.minimum.accumulate(steps), 0, 1)
    return out


def holm(p: ArrayLike) -> NDArray[np.float64]:
    """p-values adjusted for their number (Holm 1979): what is below 0.05 is so with all of them in mind. NaN stays."""
    p = np.asarray(p, float)
    order = np.argsort(p)  # NaN last
    m = np.isfinite(p).sum()
    steps = np.where(np.arange(len(p)) < m, m - np.arange(len(p)), np.nan)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * steps), 1.0)
    return adjusted
