"""Intervals and p-values of means over seeds, row by row, and the words that numbers are put into.

With n paired values of mean m and standard deviation s the 95 % interval is m ± t(0.975, n-1) · s/√n below 30 seeds:
at n = 3 a percentile bootstrap covers 75 %, not 95 %. From 30 seeds on it is the expanded percentile bootstrap
(Hesterberg, arXiv 1411.5279): the percentiles Φ(±√(n/(n-1)) · t(0.975, n-1)) of resampled means, which need no normal
distribution and have the width of the t-interval where there is one, computed as of infinitely many resamples
(resampled.py), so that neither chance nor the order of the seeds is in them. p goes with the interval: it is below 0.05
where the interval leaves out zero.

Below 30 seeds, values that are all the same tell nothing of their spread: accuracies are counts of solved problems, and
two or three seeds tie by chance. The interval and p are NaN then, and not an interval without width and p = 0. Losses
are no counts: two recipes whose losses are equal to the bit on every seed are the same computation, and that is known
(`paired_interval`): their difference is 0, from 0 to 0, and p = 1. Numbers of which some tie by definition have NaN
with any number of seeds (`untied_interval`).

scipy is imported where it is used: `fp4dse status` and the start of a sweep need the words alone.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from fp4dse.results.stats.estimates.resampled import expanded_percentiles

CONFIDENCE = 0.95
BOOTSTRAP_FROM = 30
"""Seeds from which on intervals are resampled."""
TIED = 1e-9
"""Standard deviation, relative to the mean, up to which values count as equal."""


def mean_interval(values: ArrayLike) -> pd.DataFrame:
    """Per row of `values` [rows, seeds], NaN where there is none: mean, std, n, low, high, p.

    low, high: the 95 % interval of the mean, p: two-sided, of the mean against zero by the same rule; NaN with one
    value, and with fewer than 30 that are all the same up to rounding.
    """
    x = np.asarray(values, float)
    mean, std, n = _moments(x)
    known = np.where(_all_the_same(mean, std, n) & (n < BOOTSTRAP_FROM), np.nan, std)
    half = half_width(known, n)
    low, high, p = mean - half, mean + half, _p_value(mean, known, n)
    for size in np.unique(n[n >= BOOTSTRAP_FROM]):
        rows = np.flatnonzero(n == size)
        present = x[rows][np.isfinite(x[rows])].reshape(len(rows), size)
        low[rows], high[rows], p[rows] = expanded_percentiles(present, p[rows], CONFIDENCE).T
    return pd.DataFrame({"mean": mean, "std": std, "n": n, "low": low, "high": high, "p": p})


def untied_interval(values: ArrayLike) -> pd.DataFrame:
    """`mean_interval`, without an interval and p (NaN) where values are all the same, of however many seeds: of numbers
    that may tie by definition, such as the gradient's error of a trainer that does not quantize. They are no findings,
    and a p of theirs would count among those that an adjustment is for."""
    found = mean_interval(values)
    tied = _all_the_same(*(found[name].to_numpy() for name in ("mean", "std", "n")))
    found.loc[tied, ["low", "high", "p"]] = np.nan
    return found


def paired_interval(d: ArrayLike, shares: ArrayLike = False) -> pd.DataFrame:
    """`mean_interval` of paired differences d [rows, seeds], with 0 to 0 and p = 1 for `same_computation`. shares: of
    each row [rows] or of all, true where the two sides are of counts, which tie by chance."""
    found = mean_interval(d)
    found.loc[same_computation(d, shares), ["low", "high", "p"]] = [0.0, 0.0, 1.0]
    return found


def same_computation(d: ArrayLike, shares: ArrayLike = False) -> NDArray[np.bool_]:
    """Per row of paired differences [rows, seeds], NaN where there is none: true where they are exactly 0 on every
    seed, of two or more; of counts (`shares`, [rows] or one for all) with 30 seeds or more."""
    d = np.asarray(d, float)
    known = np.isfinite(d)
    n = known.sum(axis=1)
    equal = np.where(known, d == 0, True).all(axis=1)
    return np.asarray(equal & (n >= np.where(shares, BOOTSTRAP_FROM, 2)))


def _all_the_same(mean: NDArray[np.float64], std: NDArray[np.float64], n: NDArray[np.number]) -> NDArray[np.bool_]:
    """True for two values or more that differ by no more than rounding: 0.43 - 0.41 is not quite 0.53 - 0.51."""
    return np.asarray((n > 1) & (std <= TIED * np.maximum(np.abs(mean), TIED)))


def _moments(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Per row of `values` [rows, seeds]: mean, standard deviation and number of those that are finite."""
    x = np.where(np.isfinite(values), values, np.nan)
    n = np.isfinite(x).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(n > 0, np.nansum(x, axis=1) / n, np.nan)
        std = np.sqrt(np.where(n > 1, np.nansum((x - mean[:, None]) ** 2, axis=1) / (n - 1), np.nan))
    return mean, std, n


def p_value(d: ArrayLike, shares: ArrayLike = False) -> NDArray[np.float64]:
    """Per row of paired differences [rows, seeds], NaN where there is none: `p` of `paired_interval`."""
    return np.asarray(paired_interval(d, shares)["p"], float)


def known_error(error: ArrayLike, value: ArrayLike) -> NDArray[np.float64]:
    """Standard errors, NaN where there is none (0 up to rounding) of a value that is not 0: the seeds that it is from
    tie, which is not certainty. Of as many values."""
    error, value = np.asarray(error, float), np.asarray(value, float)
    return np.asarray(np.where((value != 0) & (error <= TIED * np.abs(value)), np.nan, error))


def half_width(std: NDArray[np.float64], n: NDArray[np.number]) -> NDArray[np.float64]:
    """Half of the 95 % t-interval of a mean; NaN where n < 2."""
    from scipy.special import stdtrit

    n = np.where(n > 1, n, np.nan)
    found: NDArray[np.float64] = stdtrit(n - 1, 0.5 + CONFIDENCE / 2) * std / np.sqrt(n)
    return found


def _p_value(mean: NDArray[np.float64], std: NDArray[np.float64], n: NDArray[np.number]) -> NDArray[np.float64]:
    """Two-sided p, by the t-test, of means with these standard deviations, of n values each."""
    from scipy.special import stdtr

    n = np.where(n > 1, n, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where((mean == 0) & (std == 0), 0.0, np.abs(mean) / (std / np.sqrt(n)))
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
