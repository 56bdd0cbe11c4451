"""Recipes against references, all at once: errors that are pooled over recipes, and a limit that holds for all of them.

Seeds are pairs: what a seed adds to all recipes falls out of a difference, and what is left of the variance is each
recipe's own (spread.py), pooled over recipes as far as they are alike:

    error²(a - b) = (v_a + v_b) / n          interval: difference ± limit · error

The limit is the 95 % quantile of the largest |t| over all recipes, simulated: the luck of seeds is drawn anew, with
variances that are drawn too (variances.py), the references are chosen anew as they were (the lowest of all, or the best
other one of as many bits), and all differences are held against no difference. So it knows that the lowest of many is a
lucky one. That all recipes are equal is the case in which luck chooses most, and the one in which nothing may be told
from anything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from fp4dse.results.stats.estimates.intervals import CONFIDENCE, known_error
from fp4dse.results.stats.estimates.promised import NORMAL, Prospect, more_seeds
from fp4dse.results.stats.estimates.spread import Spread

Array = NDArray[np.float64]
DRAWS = 500
"""Of what losses may be after all."""
LIMIT_DRAWS = 1000
_CHUNK = 100


Choice = Callable[[Array], NDArray[np.intp]]
"""Losses [draws, recipes] -> the row of each recipe's reference [draws, recipes], chosen as it was in the study."""


def fixed(row: int) -> Choice:
    """One recipe that was not chosen by its losses."""
    return lambda losses: np.full(losses.shape, row)


def lowest(of: NDArray[np.bool_]) -> Choice:
    """The lowest of these recipes [recipes]."""
    return lambda losses: np.broadcast_to(np.where(of, losses, np.inf).argmin(axis=1)[:, None], losses.shape)


class Versus(NamedTuple):
    """Differences of recipes from their references, [recipes] each; a reference of itself has zeros."""

    difference: Array
    """Mean over the seeds that both have."""
    pairs: Array
    error: Array
    """Standard error, 0 where all seeds are equal to the bit, NaN where nothing is known of it: also where all seeds of
    all recipes tie."""
    freedom: Array
    limit: float
    expected: Array
    """The difference that the posterior expects, and how far it may be off."""
    uncertain: Array

    def taken(self, rows: NDArray[np.intp]) -> Versus:
        """The same for recipes at these rows."""
        arrays = {name: part[rows] for name, part in self._asdict().items() if name != "limit"}
        return self._replace(**arrays)


def versus(
    values: Array,
    reference: NDArray[np.intp],
    spread: Spread,
    truth: Array,
    choice: Choice,
    asked: NDArray[np.bool_] | None = None,
) -> Versus:
    """values: [recipes, seeds], log losses; reference: [recipes], the row of each one's; spread: of the values; truth:
    [draws, recipes], what they may be after all (shrinkage.py); choice: how references were chosen; asked: [recipes],
    those that the limit holds for, None for all."""
    d = values - values[reference]
    pairs = np.isfinite(d).sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.nansum(d, axis=1) / np.where(pairs > 0, pairs, np.nan)
        own = np.square(spread.error) * np.isfinite(values).sum(axis=1)  # of one seed
        other, freedom = own[reference], spread.freedom
        variance = own + other
        freedom = np.square(variance) / (np.square(own) / freedom + np.square(other) / freedom[reference])
    same = (np.nan_to_num(d) == 0).all(axis=1) & (pairs > 0)
    error = np.where(same, 0.0, known_error(np.sqrt(variance / np.maximum(pairs, 1)), difference))
    error[pairs < 2] = np.nan
    freedom = np.where(np.isfinite(freedom), freedom, 1e6)
    if not np.isfinite(spread.error).all():
        return Versus(difference, pairs, error, freedom, np.nan, difference, np.full(len(error), np.nan))
    apart = np.where(same, 0.0, truth - truth[:, reference])
    _, first, which = np.unique(values, axis=0, return_index=True, return_inverse=True)
    twin = np.where(same, first[which][reference], first[which])
    limit = _limit(spread, choice, twin, np.ones(len(error), bool) if asked is None else asked)
    return Versus(difference, pairs, error, freedom, limit, apart.mean(axis=0), apart.std(axis=0))


def _limit(spread: Spread, choice: Choice, twin: NDArray[np.intp], asked: NDArray[np.bool_]) -> float:
    """The 95 % quantile of the largest |t|, as a multiple of the error. twin: [recipes], a row of the same bits.

    A variance may be larger than it looks, and the recipes whose are so are those that chance puts first. How alike
    variances are is drawn, too (variances.py): it decides how far the largest of many lies out.
    """
    rng = np.random.default_rng(1)
    largest, square = [], np.square(spread.error)
    for _ in range(0, LIMIT_DRAWS, _CHUNK):
        variance = spread.variances.draw(_CHUNK, rng) / (spread.variances.freedom + 1)
        luck = (rng.standard_normal(variance.shape) * np.sqrt(variance))[:, twin]
        where = choice(luck)
        apart = np.abs(luck - np.take_along_axis(luck, where, axis=1))
        with np.errstate(invalid="ignore", divide="ignore"):
            t = apart / np.sqrt(square + square[where])
        largest.append(np.nan_to_num(t[:, asked]).max(axis=1, initial=0.0))
    return float(np.quantile(np.concatenate(largest), CONFIDENCE))


def table(found: Versus, margin: float) -> pd.DataFrame:
    """pairs, difference, low, high, p, p_same, verdict, more_seeds of `against`, for all recipes. p and p_same are of
    each alone; verdicts hold for all at once, `same` among them: its interval lies within the margin."""
    difference, error, freedom = found.difference, found.error, found.freedom
    half = _limits(found) * error
    with np.errstate(divide="ignore", invalid="ignore"):
        p = np.where(error == 0, 1.0, 2 * stdtr(freedom, -np.abs(difference) / error))
        room = margin - np.abs(difference)
        p_same = np.where(error == 0, np.where(room > 0, 0.0, 1.0), stdtr(freedom, -room / error))
    out = pd.DataFrame({"pairs": found.pairs, "difference": difference, "low": difference - half})
    out = out.assign(high=difference + half, p=np.where(np.isnan(error), np.nan, p))
    out["p_same"] = np.where(np.isnan(error), np.nan, p_same)
    within = out["low"].gt(-margin) & out["high"].lt(margin)
    out["verdict"] = np.select([within, out["low"].gt(0), out["high"].lt(0)], ["same", "higher", "lower"], "open")
    open_ = out["verdict"].eq("open").to_numpy() & np.isfinite(error)
    out["more_seeds"] = np.nan
    out.loc[open_, "more_seeds"] = _more_seeds(found, open_, margin)
    return out


def _more_seeds(found: Versus, which: NDArray[np.bool_], margin: float) -> Array:
    """`more_seeds` of promised.py for these recipes, [recipes]: what a difference may be is the posterior's, and the
    limit stays what it is."""
    pairs, error, freedom = found.pairs[which], found.error[which], found.freedom[which]
    truth = found.expected[which][:, None] + found.uncertain[which][:, None] * NORMAL
    one = error * np.sqrt(pairs)  # standard deviation of one pair
    one = one * np.sqrt(1 + 1 / np.maximum(freedom, 4))  # it may be larger than it looks
    limit = _limits(found)[which]

    def limits(n: Array) -> tuple[Array, Array]:
        half = (limit * one)[:, None, None] / np.sqrt(n)
        return half, margin - half

    return more_seeds(Prospect(pairs, found.difference[which], truth, one[:, None]), limits)


def _limits(found: Versus) -> Array:
    """[recipes]: how many errors an interval reaches on either side."""
    return np.asarray(np.maximum(found.limit, stdtrit(found.freedom, 0.5 + CONFIDENCE / 2)))
