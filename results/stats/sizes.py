"""One task at several presets as points of a scaling law: (parameters, tokens), BF16's loss and the paired gaps there.

A point is one SETTING: gaps are paired within it, and only fits look across points. Presets of different context or
batch are points of one law as far as the reader takes them for such; filter the rows where they should not be.

Uncertainty over seeds is a parametric bootstrap: a thousand draws of what all seeds together would say. A draw of
BF16's mean log loss follows Student's t of its own seeds; one of a gap has the error and the degrees of freedom of
spread.py, which pools the variances of recipes at a preset: two seeds of ten recipes tell more than two of one.
Resampling three seeds instead gives means that never leave their range, and covers three quarters. What is fitted to
the draws has its limits at their percentiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.intervals import CONFIDENCE
from fp4dse.results.stats.paired import SETTING, by_seed, log_or_nan, rows_at_best_lr
from fp4dse.results.stats.spread import Spread, spread_over_seeds

Array = NDArray[np.float64]

GROUP = tuple(name for name in SETTING if name not in ("preset", "device_class", "software_class"))
"""Columns that the points of one law share."""

SIZES_READ = ["parameters", "tokens", "fprop_x_element", "fprop_w_element"]
SIZES_READ += ["dgrad_g_element", "dgrad_w_element", "wgrad_g_element", "wgrad_x_element"]
"""The columns of runs that this reads beside those of `summarize`."""

RESAMPLES = 1000
PLAIN = ("none", "bf16")


class Recipes(NamedTuple):
    """The recipes of a group that have gaps, in the order of `Sizes.gap`."""

    config_id: list[str]
    label: list[str]
    forward: NDArray[np.bool_]
    """Quantizes its forward pass."""
    backward: NDArray[np.bool_]
    seeds: NDArray[np.intp]
    """Pairs with BF16 [recipes, points], 0 where there is no gap."""


class Sizes(NamedTuple):
    """The points of one group, smallest first; the first of R + 1 draws is what was measured."""

    group: tuple[Any, ...]
    presets: list[str]
    parameters: Array
    """[P]"""
    tokens: Array
    """[P]"""
    seeds: NDArray[np.intp]
    """Of BF16 [P]."""
    loss: Array
    """BF16's geometric mean loss [R + 1, P]."""
    entropy: Array | None
    """The least possible loss [P], where the task knows it (metric `excess`)."""
    recipes: Recipes
    gap: Array
    """Mean paired gap [recipes, R + 1, P], NaN where there is none."""
    noise: Array
    """Standard deviation of a paired gap [P], pooled over recipes, without what all recipes of a seed share; NaN where
    none has two seeds."""

    def at(self, points: NDArray[np.bool_]) -> Sizes:
        """The same of some points."""
        return Sizes(
            self.group,
            [name for name, kept in zip(self.presets, points, strict=True) if kept],
            self.parameters[points],
            self.tokens[points],
            self.seeds[points],
            self.loss[:, points],
            None if self.entropy is None else self.entropy[points],
            self.recipes._replace(seeds=self.recipes.seeds[:, points]),
            self.gap[:, :, points],
            self.noise[points],
        )


def sizes(runs: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[Sizes]:
    """The points of each group of runs whose rows say parameters and tokens, and have a baseline. runs: SIZES_READ and
    what `summarize` reads. A recipe is left out at points where one of its seeds diverged or was pruned."""
    if runs.empty or not {"parameters", "tokens"} <= set(runs):
        return
    rows = rows_at_best_lr(runs)
    rows = rows[rows["parameters"].gt(0) & rows["tokens"].gt(0)]
    for group, part in rows.groupby(list(GROUP), sort=False):
        points = [_Point(point, resamples, seed) for _, point in part.groupby("setting")]
        points = sorted(
            (point for point in points if len(point.seeds)), key=lambda point: (point.parameters, point.tokens)
        )
        if points:
            yield _joined(group, points, part)


class _Point:
    """One setting: its seeds, and gaps as a matrix [recipes, seeds]."""

    def __init__(self, rows: pd.DataFrame, resamples: int, seed: int) -> None:
        base = rows[rows["is_baseline"].astype(bool) & rows["loss"].notna()].sort_values("seed")
        self.preset = str(rows["preset"].iloc[0])
        self.parameters, self.tokens = float(rows["parameters"].iloc[0]), float(rows["tokens"].iloc[0])
        self.seeds = base["seed"].to_numpy()
        if not len(self.seeds):
            return
        rng = np.random.default_rng([seed, int(self.parameters), int(self.tokens)])
        logs = log_or_nan(base["loss"])
        error = logs.std(ddof=1) / np.sqrt(len(logs)) if len(logs) > 1 else 0.0
        self.loss = np.exp(logs.mean() + error * np.append(0, rng.standard_t(max(len(logs) - 1, 1), resamples)))
        known = base["metric_name"].eq("excess").all()
        self.entropy = float((base["loss"] - base["val_metric"].astype(float)).mean()) if known else np.nan
        finite = ~np.isinf(rows["gap"].astype(float)).groupby(rows["config_id"]).transform("any")
        tried = rows[~rows["is_baseline"].astype(bool) & finite & rows["gap"].notna()]
        self.ids, self.gaps = by_seed(tried, tried["gap"])
        self.known, self.noise, self.gap = False, np.nan, np.zeros((0, resamples + 1))
        if len(self.ids):
            spread = spread_over_seeds(self.gaps)
            self.known = bool(np.isfinite(spread.error).all())
            self.gap = spread.mean[:, None] + np.concatenate(
                [np.zeros((len(self.ids), 1)), self.noise_of(spread, rng, resamples)], axis=1
            )
            self.noise = float(np.sqrt(np.mean(spread.error**2 * np.isfinite(self.gaps).sum(axis=1))))

    def noise_of(self, spread: Spread, rng: np.random.Generator, resamples: int) -> Array:
        """Deviations of the mean gaps, [recipes, R]: their own, and that which all share; 0 where nothing is known."""
        if not self.known:
            return np.zeros((len(self.ids), resamples))
        freedom = np.minimum(spread.freedom, 1e6)[:, None]
        own = spread.error[:, None] * rng.standard_t(freedom, (len(self.ids), resamples))
        found: Array = own + spread.shared_error * rng.standard_t(max(spread.seeds - 1, 1), resamples)
        return found


def _joined(group: tuple[Any, ...], points: list[_Point], part: pd.DataFrame) -> Sizes:
    ids = list(dict.fromkeys(name for point in points for name in point.ids))
    gap = np.full((len(ids), points[0].loss.size, len(points)), np.nan)
    seeds = np.zeros((len(ids), len(points)), np.intp)
    for i, point in enumerate(points):
        places = [ids.index(name) for name in point.ids]
        gap[places, :, i] = point.gap
        seeds[places, i] = np.isfinite(point.gaps).sum(axis=1)
    first = part.drop_duplicates("config_id").set_index("config_id").reindex(ids)
    entropy = np.array([point.entropy for point in points])
    return Sizes(
        group,
        [point.preset for point in points],
        np.array([point.parameters for point in points]),
        np.array([point.tokens for point in points]),
        np.array([len(point.seeds) for point in points]),
        np.stack([point.loss for point in points], axis=1),
        entropy if np.isfinite(entropy).all() else None,
        Recipes(ids, first["recipe_label"].tolist(), _quantizes(first, "fprop"), _backward(first), seeds),
        gap,
        np.array([point.noise for point in points]),
    )


def _quantizes(recipes: pd.DataFrame, stage: str) -> NDArray[np.bool_]:
    elements = recipes[[name for name in SIZES_READ if name.startswith(stage) and name in recipes]]
    found: NDArray[np.bool_] = (~elements.isin(PLAIN)).any(axis=1).to_numpy(bool)
    return found


def _backward(recipes: pd.DataFrame) -> NDArray[np.bool_]:
    return _quantizes(recipes, "dgrad") | _quantizes(recipes, "wgrad")


def limits(draws: Array, seeds: NDArray[np.intp]) -> tuple[float, float]:
    """The 95 % limits of what draws [R] estimate, maybe infinite; NaN where BF16 had one seed. seeds: of BF16, [P]."""
    if (seeds < 2).any() or np.isnan(draws).any():
        return np.nan, np.nan
    tail = 0.5 - CONFIDENCE / 2
    low, high = np.quantile(draws, [tail, 1 - tail], method="nearest")
    return float(low), float(high)
