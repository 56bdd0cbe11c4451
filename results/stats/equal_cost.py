"""Comparisons at equal cost: each recipe beside the best other one that needs as many bits, or as much time.

A scale format with blocks of 16 and another with blocks of 32 differ in storage, so the finer one should win. Beside
the best of its own class a recipe shows what it is worth for what it needs.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fp4dse.dse import ConfigError
from fp4dse.results.stats.equivalence import differences
from fp4dse.results.stats.margins import margin_of
from fp4dse.results.stats.paired import SETTING, by_seed, rows_at_best_lr, stacked
from fp4dse.results.stats.summary import check_overhead

TOLERANCE = 0.02


def matched(
    runs: pd.DataFrame, by: str = "bits_per_element", tolerance: float = TOLERANCE, margin: float | None = None
) -> pd.DataFrame:
    """Each quantizing recipe against the best other one whose `by` is equal up to a share of `tolerance`.

    One line per SETTING and recipe with a finite gap, by value and then gap. Columns: SETTING, by (name), value,
    config_id, label, gap, rivals (how many others match), rival (config_id of the one with the lowest gap, null if none
    matches), rival_label, rival_value, pairs, difference (mean log loss ratio, below 0 where the recipe beats its
    rival), low, high (95 %), p, p_same, margin, verdict, more_seeds (see `against`).

    The rival is the best of its class on the very seeds that are compared, which flatters it a little. ConfigError if
    `by` is no column of numbers, or tolerance is below 0.
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
        gaps, value, label, recipes = gaps[usable], value[usable], label[usable], recipes[usable]
        if not len(recipes):
            continue
        mean = np.nanmean(gaps, axis=1)
        rival, rivals = _rivals(value, mean, tolerance)
        apart = np.where((rivals > 0)[:, None], gaps - gaps[rival], np.nan)
        line = differences(apart, margin_of(part, margin).value).drop(columns="std")
        alone = rivals == 0
        line = line.assign(by=by, value=value, config_id=recipes, label=label, gap=mean, rivals=rivals)
        line = line.assign(rival=np.where(alone, None, recipes[rival]), rival_label=np.where(alone, None, label[rival]))
        line = line.assign(rival_value=np.where(alone, np.nan, value[rival]))
        parts.append(line.assign(**{name: part[name].iloc[0] for name in SETTING}))
    columns = [*SETTING, "by", "value", "config_id", "label", "gap", "rivals", "rival", "rival_label", "rival_value"]
    columns += ["pairs", "difference", "low", "high", "p", "p_same", "margin", "verdict", "more_seeds"]
    return stacked(parts, columns).sort_values([*SETTING, "value", "gap"], ignore_index=True)


def _rivals(value: np.ndarray, gap: np.ndarray, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    """Per recipe: where the lowest gap among the others within tolerance stands, and how many others there are."""
    order = np.argsort(value, kind="stable")
    v, g = value[order], gap[order]
    slack = tolerance * np.abs(v) + 1e-9 * np.abs(v).max()
    first, last = np.searchsorted(v, v - slack, "left"), np.searchsorted(v, v + slack, "right")
    best = np.arange(len(v))
    for i, (a, b) in enumerate(zip(first, last, strict=True)):
        if b - a > 1:
            window = g[a:b].copy()
            window[i - a] = np.inf
            best[i] = a + window.argmin()
    rival, rivals = np.empty_like(order), np.empty_like(order)
    rival[order], rivals[order] = order[best], last - first - 1
    return rival, rivals
