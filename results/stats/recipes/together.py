"""The recipes of a setting taken together: what each may be over all seeds by the seeds of all, and what a pair may be.

Three pairs know next to nothing of how much the two differ and of how much a pair deviates, and of recipes that are
much alike the flat prior of two alone expects differences that are too large. The other recipes of a setting know how
far recipes lie apart, which of their knobs they owe it to (where BF16, which has none, is not among them), and how much
lanes deviate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.estimates.least_squares import seed_effects
from fp4dse.results.stats.estimates.promised import Prospect, pair_alone
from fp4dse.results.stats.estimates.shrinkage import LEAST_RECIPES, posterior, unmoved
from fp4dse.results.stats.estimates.simultaneous import DRAWS
from fp4dse.results.stats.estimates.spread import Spread, spread_over_seeds
from fp4dse.results.stats.levels import are_shares, levels
from fp4dse.results.stats.paired import by_seed
from fp4dse.results.stats.recipes.front_chance import codes_of, from_zero

PROSPECTS = 400
"""Of what a pair may be, that `more_seeds` goes through."""


class Together(NamedTuple):
    """The recipes of a setting that finished a seed; those of the same losses on every seed are one."""

    known: NDArray[np.intp]
    """[known]: their rows among all, in the order of their config_ids: what is drawn depends on no order of rows."""
    first: NDArray[np.intp]
    """[distinct]: where among the known each has its first."""
    which: NDArray[np.intp]
    """[known]: which of the distinct ones each is."""
    values: NDArray[np.float64]
    """[distinct, seeds]: log losses without what all have of a seed."""
    spread: Spread
    """Of the distinct ones."""

    def row_of(self, row: int) -> int:
        """The place among the distinct ones of the known recipe at this row among all."""
        return int(self.which[np.flatnonzero(self.known == row)[0]])


def together(recipes: pd.Index, log: NDArray[np.float64]) -> Together:
    """recipes: config_ids; log: losses [recipes, seeds], NaN where there is none; some recipe has one."""
    known = np.flatnonzero(np.isfinite(log).any(axis=1))
    known = known[np.argsort(recipes[known].to_numpy(str))]
    values = log[known] - seed_effects(log[known])
    distinct, first, which = np.unique(values, axis=0, return_index=True, return_inverse=True)
    return Together(known, first, which.ravel(), distinct, spread_over_seeds(distinct))


def drawn_truth(spread: Spread, distinct: NDArray[np.float64], codes: pd.DataFrame) -> NDArray[np.float64]:
    """Draws [draws, recipes] of the true log losses of distinct recipes, from their posterior. distinct: [recipes,
    seeds], which `spread` is of; codes: of their knobs, NaN where these are not known."""
    factors = [] if codes.isna().any(axis=None) else from_zero(codes)
    return posterior(spread, distinct, factors).draw(DRAWS, np.random.default_rng(0))


def drawn_beside(spread: Spread, distinct: NDArray[np.float64], codes: pd.DataFrame) -> NDArray[np.float64]:
    """`drawn_truth` where some recipes have no knobs, as BF16, whose codes are NaN. These have what their own seeds
    say, and the others are drawn without them: that they lie far apart from BF16 says nothing of how far from one
    another, and to leave their knobs out for its sake promises seeds for pairs that differ in nothing."""
    knobs = codes.notna().all(axis=1).to_numpy()
    if knobs.all() or not knobs.any():
        return drawn_truth(spread, distinct, codes)
    rng, of = np.random.default_rng(0), distinct[knobs]
    drawn = unmoved(spread).draw(DRAWS, rng)
    drawn[:, knobs] = posterior(spread_over_seeds(of), of, from_zero(codes[knobs])).draw(DRAWS, rng)
    return drawn


def pair_among(part: pd.DataFrame, a: str, b: str, pairs: int, mean: float, std: float) -> Prospect:
    """The prospect of two recipes of a setting, whose pairs have this mean and standard deviation. part: rows of
    all its recipes, with `points`. Where fewer than five have losses of their own, BF16 among them if it is one of the
    two, these alone say it."""
    part = part[part["points"].gt(0) | part["config_id"].isin([a, b])]
    recipes, log = by_seed(part, pd.Series(levels(part["loss"], are_shares(part)), part.index))
    of = together(recipes, log)
    if len(of.values) < LEAST_RECIPES:
        return pair_alone(pairs, mean, std)
    two = [of.row_of(recipes.get_loc(name)) for name in (a, b)]
    rng = np.random.default_rng(0)
    square = of.spread.variances.draw_of_difference(two, std**2, pairs - 1, PROSPECTS, rng)
    draws = drawn_truth(of.spread, of.values, codes_of(part).reindex(recipes[of.known[of.first]]))
    truth = draws[rng.integers(0, len(draws), PROSPECTS)][:, two]
    apart = (truth[:, 0] - truth[:, 1])[None]
    return Prospect(np.array([pairs]), np.array([mean]), apart, np.sqrt(square)[None])
