"""One task at several presets as points of a scaling law: (parameters, tokens), BF16's loss and the paired gaps there.

A point is one SETTING: gaps are paired within it, and only fits look across points. Presets of different context or
batch are points of one law as far as the reader takes them for such; filter the rows where they should not be.

Uncertainty over seeds is a parametric bootstrap: a thousand draws of what all seeds together would say, of BF16's
mean log loss, and of the gaps at a preset: each recipe's own part, and one that BF16's luck gives to all of them.
Variances are pooled as far as they are alike (spread.py): of gaps over the recipes of a preset, of BF16 and its luck
over presets, because three seeds alone leave room for anything. What is fitted to the draws has its limits at their
percentiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from fp4dse.results.stats.estimates.intervals import CONFIDENCE
from fp4dse.results.stats.estimates.spread import shrunken, spread_over_seeds
from fp4dse.results.stats.levels import are_shares, log_or_nan
from fp4dse.results.stats.paired import EXCESS, SETTING, by_seed, rows_at_best_lr

Array = NDArray[np.float64]

GROUP = tuple(name for name in SETTING if name not in ("preset", "device_class", "software_class"))
"""Columns that the points of one law share."""

SIZES_READ = ["parameters", "tokens", "fprop_x_element", "fprop_w_element"]
SIZES_READ += ["dgrad_g_element", "dgrad_w_element", "wgrad_g_element", "wgrad_x_element", "layers", "attention"]
"""The columns of runs that this reads beside those of `summarize`."""

RESAMPLES = 1000
PLAIN = ("none", "bf16")


class Recipes(NamedTuple):
    """The recipes of a group that have gaps, in the order of `Sizes.gap`."""

    config_id: list[str]
    label: list[str]
    forward: NDArray[np.bool_]
    """Quantizes its forward pass, in most layers. Where all products are plain and some layers or the attention core
    are exceptions, it counts as quantizing both passes: rows do not say which."""
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
    """Standard deviation of a paired gap [recipes, P], each recipe's own as far as its seeds tell it, without what all
    recipes of a seed share; NaN where it was not tried, or no recipe has two seeds."""

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
            self.noise[:, points],
        )

    @property
    def distinct(self) -> int:
        """The number of presets: two kinds of card at one preset are two points of one."""
        return _distinct(self.parameters, self.tokens)

    def tried(self, recipe: int) -> int:
        """The number of presets at which a recipe was tried."""
        here = self.recipes.seeds[recipe] > 0
        return _distinct(self.parameters[here], self.tokens[here])


def _distinct(parameters: Array, tokens: Array) -> int:
    return len(set(zip(parameters.tolist(), tokens.tolist(), strict=True)))


def sizes(runs: pd.DataFrame, resamples: int = RESAMPLES, seed: int = 0) -> Iterator[Sizes]:
    """The points of each group of runs whose rows say parameters and tokens, and have a baseline. runs: SIZES_READ and
    what `summarize` reads. Losses that are shares follow no such law, and are left out. A recipe is left out at points
    where one of its seeds diverged or was pruned."""
    if runs.empty or not {"parameters", "tokens"} <= set(runs):
        return
    rows = rows_at_best_lr(runs)
    rows = rows[rows["parameters"].gt(0) & rows["tokens"].gt(0) & ~are_shares(rows)]
    for group, part in rows.groupby(list(GROUP), sort=False):
        points = [_Point(point) for _, point in part.groupby("setting")]
        points = sorted(
            (point for point in points if len(point.seeds)), key=lambda point: (point.parameters, point.tokens)
        )
        if points:
            yield _joined(group, points, part, np.random.default_rng(seed), resamples)


class _Point:
    """One setting: its seeds, and gaps as a matrix [recipes, seeds]."""

    def __init__(self, rows: pd.DataFrame) -> None:
        base = rows[rows["is_baseline"].astype(bool) & rows["loss"].notna()].sort_values("seed")
        self.preset = str(rows["preset"].iloc[0])
        self.parameters, self.tokens = float(rows["parameters"].iloc[0]), float(rows["tokens"].iloc[0])
        self.seeds = base["seed"].to_numpy()
        if not len(self.seeds):
            return
        self.logs = log_or_nan(base["loss"])
        known = base["metric_name"].eq(EXCESS).all()
        self.entropy = float((base["loss"] - base["val_metric"].astype(float)).mean()) if known else np.nan
        finite = ~np.isinf(rows["gap"].astype(float)).groupby(rows["config_id"]).transform("any")
        tried = rows[~rows["is_baseline"].astype(bool) & finite & rows["gap"].notna()]
        self.ids, self.gaps = by_seed(tried, tried["gap"])
        self.spread = spread_over_seeds(self.gaps) if len(self.ids) else None


def _drawn(rng: np.random.Generator, variance: ArrayLike, seeds: NDArray[np.intp], resamples: int) -> Array:
    """Deviations of means [R, P] whose variances over `seeds` are pooled; 0 where no variance is known."""
    pooled, freedom = shrunken(np.asarray(variance, float), np.asarray(seeds - 1, float))
    error = np.sqrt(np.nan_to_num(pooled) / seeds)
    found: Array = error * rng.standard_t(np.clip(freedom, 1, 1e6), (resamples, len(seeds)))
    return found


def _joined(
    group: tuple[Any, ...], points: list[_Point], part: pd.DataFrame, rng: np.random.Generator, resamples: int
) -> Sizes:
    ids = list(dict.fromkeys(name for point in points for name in point.ids))
    gap = np.full((len(ids), resamples + 1, len(points)), np.nan)
    seeds = np.zeros((len(ids), len(points)), np.intp)
    of_bf16 = np.array([len(point.seeds) for point in points])
    several = [point.logs.var(ddof=1) if len(point.logs) > 1 else np.nan for point in points]
    loss = np.array([point.logs.mean() for point in points]) + np.vstack(
        [np.zeros(len(points)), _drawn(rng, several, of_bf16, resamples)]
    )
    luck = [point.spread.shared_error**2 * point.spread.seeds if point.spread else np.nan for point in points]
    shared = _drawn(rng, np.where(of_bf16 > 1, luck, np.nan), of_bf16, resamples)
    noise = np.full((len(ids), len(points)), np.nan)
    for i, point in enumerate(points):
        if point.spread is None:
            continue
        places, count = [ids.index(name) for name in point.ids], np.isfinite(point.gaps).sum(axis=1)
        own = rng.standard_t(np.clip(point.spread.freedom, 1, 1e6), (resamples, len(places)))
        moved = (np.nan_to_num(point.spread.error) * own + shared[:, [i]]).T
        gap[places, :, i] = point.spread.mean[:, None] + np.pad(moved, ((0, 0), (1, 0)))
        seeds[places, i] = count
        noise[places, i] = point.spread.error * np.sqrt(count)
    first = part.drop_duplicates("config_id").set_index("config_id").reindex(ids)
    entropy = np.array([point.entropy for point in points])
    return Sizes(
        group,
        [point.preset for point in points],
        np.array([point.parameters for point in points]),
        np.array([point.tokens for point in points]),
        of_bf16,
        np.exp(loss),
        entropy if np.isfinite(entropy).all() else None,
        Recipes(ids, first["recipe_label"].tolist(), *_passes(first), seeds),
        gap,
        noise,
    )


def _quantizes(recipes: pd.DataFrame, stage: str) -> NDArray[np.bool_]:
    elements = recipes[[name for name in SIZES_READ if name.startswith(stage) and name in recipes]]
    found: NDArray[np.bool_] = (~elements.isin(PLAIN)).any(axis=1).to_numpy(bool)
    return found


def _passes(recipes: pd.DataFrame) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """True for recipes that quantize the forward pass, and for those that do the backward pass; see
    `Recipes.forward`."""
    forward, backward = _quantizes(recipes, "fprop"), _quantizes(recipes, "dgrad") | _quantizes(recipes, "wgrad")
    words = recipes[[name for name in ("layers", "attention") if name in recipes]].astype("string").fillna("none")
    elsewhere = words.ne("none").any(axis=1).to_numpy(bool) & ~forward & ~backward
    return forward | elsewhere, backward | elsewhere


def limits(draws: Array, known: NDArray[np.bool_]) -> tuple[float, float]:
    """The 95 % limits of what draws [R] estimate, which may be infinite; NaN unless every point's noise is known."""
    if not known.all() or np.isnan(draws).any():
        return np.nan, np.nan
    tail = 0.5 - CONFIDENCE / 2
    low, high = np.quantile(draws, [tail, 1 - tail], method="nearest")
    return float(low), float(high)
