"""Comparisons at equal cost: each recipe beside the best other one that needs as many bits, or as much time.

A scale format with blocks of 16 and another with blocks of 32 differ in storage, so the finer one should win. Beside
the best of its own class a recipe shows what it is worth for what it needs.

All comparisons of a setting hold at once, and know that a rival is the best of its class, and so a lucky one
(simultaneous.py): of studies in which no recipe is better than another, one in twenty tells any two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import ConfigError
from fp4dse.results.stats.estimates.simultaneous import table, versus
from fp4dse.results.stats.estimates.spread import spread_over_seeds
from fp4dse.results.stats.factors import VariedBySetting
from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import SETTING, by_seed, rows_at_best_lr, stacked
from fp4dse.results.stats.recipes.equivalence import differences, open_ties
from fp4dse.results.stats.recipes.front_chance import codes_of
from fp4dse.results.stats.recipes.margins import margin_of
from fp4dse.results.stats.recipes.overheads import check_overhead
from fp4dse.results.stats.recipes.together import drawn_truth, together

TOLERANCE = 0.02


class Window(NamedTuple):
    """The recipes, by row, that some recipes are compared with: `members`, and `own`, those for which they are."""

    members: NDArray[np.intp]
    own: NDArray[np.intp]


def matched(
    runs: pd.DataFrame,
    by: str = "bits_per_element",
    tolerance: float = TOLERANCE,
    margin: float | None = None,
    varied: VariedBySetting | None = None,
) -> pd.DataFrame:
    """Each quantizing recipe against the best other one whose `by` is equal up to a share of `tolerance`.

    One line per SETTING and recipe with a finite gap, by value and then gap. Columns: SETTING, by (name), value,
    config_id, label, gap, rivals (how many others match), rival (config_id of the one with the lowest gap, null if none
    matches), rival_label, rival_value, pairs, difference (mean log loss ratio, below 0 where the recipe beats its
    rival), low, high (95 %, of all recipes at once), p, p_same, margin, verdict, more_seeds (see `against`).

    The rival is the best of its class on the very seeds that are compared, which flatters it a little; the verdict
    knows. varied: of `varied_by`, if it is at hand. ConfigError if `by` is no column of numbers, or tolerance is
    below 0.
    """
    check_overhead(runs, by)
    if not tolerance >= 0:
        raise ConfigError("tolerance", tolerance, "a share of 0 or more, such as 0.02 for 2 %")
    rows = rows_at_best_lr(runs)
    rows = rows[rows["points"].gt(0)]
    parts = []
    for _, part in rows.groupby("setting", sort=False):
        recipes, gaps = by_seed(part, part["gap"])
        facts = part.groupby("config_id", sort=False)
        value = facts[by].mean().reindex(recipes).to_numpy(float, na_value=np.nan)
        label = facts["recipe_label"].first().reindex(recipes).to_numpy()
        diverged = facts["diverged"].any().reindex(recipes).to_numpy()
        usable = np.isfinite(gaps).any(axis=1) & np.isfinite(value) & ~diverged
        rising = np.flatnonzero(usable)[np.argsort(recipes[usable])]  # what is simulated does not depend on their order
        gaps, value, label, recipes = gaps[rising], value[rising], label[rising], recipes[rising]
        if not len(recipes):
            continue
        mean, windows = np.nanmean(gaps, axis=1), _windows(value, tolerance)
        rival, rivals = _rivals(windows, mean[None])[0], np.zeros(len(value), int)
        for window in windows:
            rivals[window.own] = len(window.members) - 1
        alone = rivals == 0
        line = _versus_rivals(
            gaps, rival, windows, codes_of(part, varied).reindex(recipes), margin_of(part, margin).value
        )
        line = open_ties(line) if are_shares(part).any() else line
        line = line.assign(by=by, value=value, config_id=recipes, label=label, gap=mean, rivals=rivals)
        line = line.assign(rival=np.where(alone, None, recipes[rival]), rival_label=np.where(alone, None, label[rival]))
        line = line.assign(rival_value=np.where(alone, np.nan, value[rival]))
        parts.append(line.assign(**{name: part[name].iloc[0] for name in SETTING}))
    columns = [*SETTING, "by", "value", "config_id", "label", "gap", "rivals", "rival", "rival_label", "rival_value"]
    columns += ["pairs", "difference", "low", "high", "p", "p_same", "margin", "verdict", "more_seeds"]
    return stacked(parts, columns).sort_values([*SETTING, "value", "gap"], ignore_index=True)


def _windows(value: NDArray[np.float64], tolerance: float) -> list[Window]:
    """The recipes of about the same value, for each value [recipes] that there is."""
    order = np.argsort(value, kind="stable")
    v = value[order]
    slack = tolerance * np.abs(v) + 1e-9 * np.abs(v).max()
    ends = np.stack([np.searchsorted(v, v - slack, "left"), np.searchsorted(v, v + slack, "right")], axis=1)
    distinct, which = np.unique(ends, axis=0, return_inverse=True)
    return [Window(order[a:b], order[which.ravel() == i]) for i, (a, b) in enumerate(distinct)]


def _rivals(windows: Sequence[Window], losses: NDArray[np.float64]) -> NDArray[np.intp]:
    """The row of the lowest loss among the others of each recipe's window; its own where it is alone. losses: [draws,
    recipes]; returns [draws, recipes]."""
    out = np.tile(np.arange(losses.shape[1]), (len(losses), 1))
    for members, own in windows:
        if len(members) > 1:
            inside, draws = losses[:, members], np.arange(len(losses))
            first = inside.argmin(axis=1)
            inside[draws, first] = np.inf
            lowest, next_ = (members[at][:, None] for at in (first, inside.argmin(axis=1)))
            out[:, own] = np.where(lowest == own, next_, lowest)
    return out


def _versus_rivals(
    gaps: NDArray[np.float64], rival: NDArray[np.intp], windows: Sequence[Window], codes: pd.DataFrame, margin: float
) -> pd.DataFrame:
    """`table` of simultaneous.py for each recipe and its rival; a recipe that is alone is told from nothing. gaps:
    [recipes, seeds]; codes: of the recipes' knobs."""
    alone = rival == np.arange(len(rival))
    out = differences(np.where(alone[:, None], np.nan, gaps - gaps[rival]), margin).drop(columns="std")
    out = out.assign(more_seeds=np.nan)
    if alone.all():
        return out
    of = together(codes.index, gaps)
    truth, values = drawn_truth(of.spread, of.values, codes.iloc[of.first])[:, of.which], of.values[of.which]
    lines = table(versus(values, rival, spread_over_seeds(values), truth, partial(_rivals, windows), ~alone), margin)
    return out.assign(**{name: np.where(alone, out[name], of) for name, of in lines.items()})
