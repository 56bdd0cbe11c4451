"""The uncertainty of the front: every recipe's gap is drawn many times from the distribution that its seeds give.

With three seeds a recipe's own variance is next to unknown, so variances are pooled: each is shrunk towards a common
one by as many degrees of freedom as their spread allows (the moment estimator of Smyth 2004, as in limma):

    v = (d0 · s0² + d · s²) / (d0 + d)          drawn gap = mean gap + √(v/n) · t with d0 + d degrees of freedom

A seed that is hard for all recipes, or on which BF16 was lucky, moves all gaps alike. That part is estimated apart (per
seed, the median over recipes) and drawn once for all recipes: it moves the hypervolume and never the front.

Recipes whose gaps are equal on every seed trained to the same bits (a loss scale that changes nothing, say). They are
drawn once: of two that cost the same either both are on the front or none is, and the dearer one never is.

    p_front       share of draws in which the recipe is on the front
    hypervolume   area between the front and a fixed reference point; its interval is the reflected one, 2·h - h*,
                  because a front of noisy means is too good, and a front of noisier draws too good once more

With many recipes and few seeds the chance spreads over all that might be on the front; that is the finding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import digamma, polygamma

from fp4dse.dse import ConfigError
from fp4dse.results.stats.intervals import CONFIDENCE
from fp4dse.results.stats.paired import OVERHEAD, SETTING, by_seed, rows_at_best_lr
from fp4dse.results.stats.pareto import front, fronts, hypervolumes
from fp4dse.results.stats.summary import summarize

Parts = dict[tuple[str, ...], tuple[pd.Index, NDArray[np.float64]]]
"""Values of SETTING -> config_ids, and their gaps by seed."""

RESAMPLES = 1000
GAP_REFERENCE = math.log(2)
"""The hypervolume's corner: twice the loss of BF16."""
REFERENCES = {"points": 10.0, "bits_per_element": 16.0, "overhead": 1.0}
"""The corner's other coordinate: all techniques at once, the bits of BF16, the time of BF16."""
_CHUNK = 64


class Spread(NamedTuple):
    """Mean gaps of one setting and their errors, [recipes] each, and the error shared by all."""

    mean: NDArray[np.float64]
    error: NDArray[np.float64]
    """Standard error of the mean without the shared part; NaN if nothing is known."""
    freedom: NDArray[np.float64]
    """Degrees of freedom of `error`, inf for a normal distribution."""
    shared_error: float
    seeds: int


def front_chance(
    runs: pd.DataFrame, overhead: str = OVERHEAD, resamples: int = RESAMPLES, seed: int = 0
) -> pd.DataFrame:
    """The lines of `summarize` that compete (they quantize, have a finite gap and an overhead), with p_front.

    One more column, p_front: in which share of the draws the recipe is on the front; NaN where no recipe of the
    setting has two seeds. Order: SETTING, overhead, gap.
    """
    competing, parts = _competing(runs, overhead)
    competing["p_front"] = np.nan
    for lines, spread, draws in _drawn(competing, parts, resamples, seed):
        if np.isfinite(spread.error).all():
            hits = sum(fronts(lines[overhead], draw).sum(axis=0) for draw, _ in draws)
            competing.loc[lines.index, "p_front"] = hits / resamples
    return competing.sort_values([*SETTING, overhead, "gap", "label"]).reset_index(drop=True)


def hypervolume(
    runs: pd.DataFrame,
    overhead: str = OVERHEAD,
    reference: tuple[float, float] | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> pd.DataFrame:
    """The area that the front dominates, per SETTING: the quality of the trade-off in one number.

    Columns: SETTING, axis (name of the overhead), reference_overhead, reference_gap, hypervolume, low, high (95 %, NaN
    where no recipe has two seeds), recipes (that compete), on_front (how many). reference: (overhead, gap); default
    REFERENCES, and twice the loss of BF16. ConfigError if an axis has no default.
    """
    if reference is None:
        if overhead not in REFERENCES:
            raise ConfigError("overhead", overhead, f"{', '.join(REFERENCES)}, or state the reference point")
        reference = (REFERENCES[overhead], GAP_REFERENCE)
    competing, parts = _competing(runs, overhead)
    out = []
    for lines, spread, draws in _drawn(competing, parts, resamples, seed):
        area = float(hypervolumes(lines[overhead], spread.mean[None], reference)[0])
        low = high = math.nan
        if np.isfinite(spread.error).all():
            drawn = [hypervolumes(lines[overhead], draw + shared[:, None], reference) for draw, shared in draws]
            tails = np.quantile(np.concatenate(drawn), [0.5 + CONFIDENCE / 2, 0.5 - CONFIDENCE / 2])
            low, high = np.clip(2 * area - tails, 0, None)
        facts = {name: lines[name].iloc[0] for name in SETTING}
        facts |= {"axis": overhead, "reference_overhead": reference[0], "reference_gap": reference[1]}
        counts = {"recipes": len(lines), "on_front": int(front(lines[overhead], lines["gap"]).sum())}
        out.append({**facts, "hypervolume": area, "low": low, "high": high, **counts})
    columns = [*SETTING, "axis", "reference_overhead", "reference_gap", "hypervolume", "low", "high", "recipes"]
    return pd.DataFrame(out, columns=[*columns, "on_front"])


def spread_over_seeds(gaps: NDArray[np.float64]) -> Spread:
    """Means and errors of gaps [recipes, seeds], NaN where there is none; every recipe has one at least."""
    n = np.isfinite(gaps).sum(axis=1)
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
    variance, freedom = shrunken(np.where(many, variance, np.nan), n - 1)
    common = 0.0
    if len(shared) > 1 and many.sum() > 1:
        # what the median has from the recipes' own noise: about π/2 times this, but taking all of it off leaves the
        # interval too narrow where it was large by chance, and none of it too wide with few recipes
        of_median = 0.5 * variance[many].mean() / many.sum()
        common = math.sqrt(max(np.var(shared, ddof=1) - of_median, 0.0) / len(shared))
    return Spread(mean, np.sqrt(variance / n), freedom, common, gaps.shape[1])


def shrunken(
    variance: NDArray[np.float64], freedom: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Variances shrunk towards their common value, with their degrees of freedom (Smyth 2004). [n] each, as given.

    A variance that is NaN (freedom 0) becomes the common one; all NaN stay so. Zeros count as the smallest above.
    """
    d = np.asarray(freedom, float)
    known = np.isfinite(variance) & (d > 0)
    if not known.any() or not (positive := variance[known & (variance > 0)]).size:
        return variance, d
    if known.sum() == 1:
        return np.where(known, variance, variance[known]), np.where(known, d, d[known])
    log = np.log(np.maximum(variance[known], positive.min())) - digamma(d[known] / 2) + np.log(d[known] / 2)
    excess = log.var(ddof=1) - polygamma(1, d[known] / 2).mean()
    d0 = 2 * _inverse_trigamma(excess) if excess > 0 else np.inf
    centre = math.exp(log.mean() + (digamma(d0 / 2) - np.log(d0 / 2) if np.isfinite(d0) else 0.0))
    if not np.isfinite(d0):
        return np.full_like(d, centre), np.full_like(d, np.inf)
    pooled = np.where(known, (d0 * centre + d * np.where(known, variance, 0)) / (d0 + d), centre)
    return pooled, np.where(known, d0 + d, d0)


def _inverse_trigamma(value: float) -> float:
    """x with trigamma(x) = value, by Newton's method on 1/trigamma, which is nearly straight (Smyth 2004)."""
    x = 0.5 + 1 / value
    for _ in range(50):
        tri = polygamma(1, x)
        step = tri * (1 - tri / value) / polygamma(2, x)
        x += step
        if abs(step) < 1e-10 * x:
            break
    return float(x)


def _competing(runs: pd.DataFrame, overhead: str) -> tuple[pd.DataFrame, Parts]:
    """The lines of the summary that may be on a front, and per setting the recipes with their gaps by seed."""
    rows = rows_at_best_lr(runs)
    lines = summarize(rows, overhead)
    lines = lines[lines["points"].gt(0) & np.isfinite(lines["gap"].astype(float)) & lines[overhead].notna()].copy()
    parts = {keys: by_seed(part, part["gap"]) for keys, part in rows.groupby(list(SETTING), sort=False)}
    return lines, parts


def _drawn(
    competing: pd.DataFrame, parts: Parts, resamples: int, seed: int
) -> Iterator[tuple[pd.DataFrame, Spread, Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]]]:
    """Per setting: its lines, their spread, and the draws: gaps [chunk, recipes] and the shared part [chunk]."""
    for keys, lines in competing.groupby(list(SETTING), sort=False):
        recipes, gaps = parts[keys]
        distinct, which = np.unique(gaps[recipes.get_indexer(lines["config_id"])], axis=0, return_inverse=True)
        spread = spread_over_seeds(distinct)
        draws = _draws(spread, resamples, np.random.default_rng(seed))
        everyone = spread._replace(mean=spread.mean[which], error=spread.error[which], freedom=spread.freedom[which])
        yield lines, everyone, ((draw[:, which], shared) for draw, shared in draws)


def _draws(
    spread: Spread, resamples: int, rng: np.random.Generator
) -> Iterator[tuple[NDArray[np.float64], NDArray[np.float64]]]:
    for start in range(0, resamples, _CHUNK):
        count = min(_CHUNK, resamples - start)
        noise = rng.standard_normal((count, len(spread.mean)))
        finite = np.isfinite(spread.freedom) & (spread.freedom > 0)
        if finite.any():
            d = spread.freedom[finite]
            noise[:, finite] *= np.sqrt(d / (2 * rng.standard_gamma(d / 2, (count, len(d)))))
        shared = rng.standard_t(spread.seeds - 1, count) if spread.seeds > 1 else np.zeros(count)
        yield spread.mean + spread.error * noise, spread.shared_error * shared
