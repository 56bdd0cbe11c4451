"""The candidates of a study: recipes that may be on the true front, as far as their seeds tell.

A recipe is a candidate unless one that costs no more is better by more than REACH standard errors of their difference:

    gap - gap'  >  3 · √(e² + e'²)          e: standard errors of means, pooled over recipes (spread.py)

With equal errors that is 3·√2 of them. BF16 can be better in that way, too, where a recipe takes as long. Recipes with
equal losses on all seeds at one learning rate trained to the same bits and would do so on others: they are one
candidate, the cheapest of them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.estimates.spread import Spread, spread_over_seeds
from fp4dse.results.stats.paired import OVERHEAD, SETTING, bf16_cost, rows_at_best_lr, stacked
from fp4dse.results.stats.recipes.front_chance import competing_recipes, costs_of
from fp4dse.results.stats.recipes.summary import summarize

Array = NDArray[np.float64]
REACH = 3.0


def candidates(runs: pd.DataFrame, overhead: str = OVERHEAD) -> pd.DataFrame:
    """The recipes to confirm, one line per SETTING and recipe, the nearest to the front first.

    Columns: SETTING, config_id, label, lr, overhead, gap, gap_low, gap_high, pairs (as of `summarize`), behind
    (standard errors behind the recipe that beats it most for no more overhead, 0 on the front; where overheads have a
    band, in the scenario that is kindest to it), same_bits (other
    recipes that trained to the same bits). No lines for a setting where no recipe has two seeds.
    """
    rows = rows_at_best_lr(runs)
    lines, parts = competing_recipes(rows, summarize(rows, overhead), overhead)
    columns = [*SETTING, "config_id", "label", "lr", overhead, "gap", "gap_low", "gap_high", "pairs"]
    columns += ["behind", "same_bits"]
    found = []
    for keys, here in lines.groupby(list(SETTING), sort=False):
        here = here.sort_values([overhead, "gap", "label"])  # the first of equal ones is the cheapest
        recipes, gaps = parts[keys]
        gaps = gaps[recipes.get_indexer(here["config_id"])]
        bits = np.column_stack([gaps, here["lr"].to_numpy(float)])
        _, first, copies = np.unique(bits, axis=0, return_index=True, return_counts=True)
        spread = spread_over_seeds(gaps[first])
        if not np.isfinite(spread.error).all():
            continue
        distinct = here.iloc[first].assign(same_bits=copies - 1)
        prices = (distinct[name].to_numpy(float) for name in costs_of(overhead))
        bf16 = bf16_cost(here, overhead)
        behind = [
            np.maximum(errors_behind(price, spread.mean, spread.error), _behind_bf16(price, spread, bf16))
            for price in prices
            if np.isfinite(price).all()
        ]
        distinct["behind"] = np.min(behind, axis=0)
        near = distinct[distinct["behind"].le(REACH)]
        found.append(near.sort_values(["behind", "gap", "label"]))
    return stacked(found, columns)


def _behind_bf16(cost: Array, spread: Spread, bf16: float | None) -> Array:
    """By how many standard errors recipes that cost as much as BF16 are worse, [recipes]; 0 for others."""
    if bf16 is None:
        return np.zeros(len(cost))
    error = np.sqrt(np.square(spread.error) + spread.shared_error**2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((cost >= bf16) & (spread.mean > 0), spread.mean / error, 0.0)


def errors_behind(cost: Array, mean: Array, error: Array) -> Array:
    """By how many standard errors of their difference some recipe of no higher cost is better, the most of all; 0 where
    none is. cost, mean (of gaps), error: [recipes]."""
    out = np.zeros(len(cost))
    order = np.argsort(cost, kind="stable")
    cost, mean, variance = cost[order], mean[order], np.square(error[order])
    for place, end in enumerate(np.searchsorted(cost, cost, side="right")):
        better = mean[place] - mean[:end]
        with np.errstate(divide="ignore", invalid="ignore"):
            ahead = better / np.sqrt(variance[place] + variance[:end])
        out[order[place]] = np.max(ahead, where=better > 0, initial=0.0)
    return out
