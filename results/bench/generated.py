"""Runs whose truth is known: for tests of the statistics, and for timing them.

log loss[recipe, seed] = log 0.5 + gap of the recipe + what is common to the seed + noise
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from fp4dse.dse import Recipe, recipe_files
from fp4dse.results.stats.factors import AXES
from fp4dse.results.store.schema import ROW, SCHEMA_VERSION, recipe_columns

_SLOTS = ("fprop_x", "fprop_w", "dgrad_g", "dgrad_w", "wgrad_g", "wgrad_x")
KNOBS: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "*.scale": (tuple(f"{slot}_scale" for slot in _SLOTS), ("e4m3", "e8m0-rceil", "ue5m3")),
    "*.tensor_scale": (tuple(f"{slot}_tensor_scale" for slot in _SLOTS), (None, 448.0)),
    "*.g.rounding": (("dgrad_g_rounding", "wgrad_g_rounding"), ("nearest", "stochastic")),
    "forward.rounding": (("fprop_x_rounding", "fprop_w_rounding"), ("nearest", "stochastic")),
    "wgrad.rotation": (("wgrad_rotation",), ("none", "rht16", "rht32")),
    "dgrad.rotation": (("dgrad_rotation",), ("none", "rht16")),
    "fprop.w.adapt": (("fprop_w_adapt",), ("none", "4over6-mse")),
    "backward.source": (("dgrad_source", "wgrad_source"), ("master", "forward")),
    "fprop.x.outliers": (("fprop_x_outliers",), ("none", "occ")),
    "estimator_w": (("estimator_w",), ("ste", "dge", "spline")),
    "fprop.x.scaling": (("fprop_x_scaling",), ("amax", "sawb")),
    "dgrad.g.range": (("dgrad_g_range",), ("full", "16/17")),
    "wgrad.x.adapt": (("wgrad_x_adapt",), ("none", "4over6-mse")),
}
"""Factor, as `design.factors` names it -> the columns that it sets, and its levels."""

Truth = Callable[[dict[str, NDArray[np.intp]]], NDArray[np.float64]]


def generated(
    knobs: Sequence[str] = tuple(KNOBS),
    seeds: int = 3,
    truth: Truth | None = None,
    noise: float = 0.01,
    common: float = 0.02,
    seed: int = 0,
    recipes: int | None = None,
    task: str = "generated",
) -> pd.DataFrame:
    """Runs of all combinations of some knobs, or of `recipes` of them drawn at random, and of BF16.

    truth: codes by knob -> gap of each combination (default 0.1). noise, common: standard deviations, per lane
    and per seed. `overhead` runs from 0.3 to 0.9; points are one more than the knobs that are not at their first level.
    """
    rng = np.random.default_rng(seed)
    codes = crossing(knobs)
    if recipes is not None and recipes < len(codes):
        codes = codes[np.sort(rng.choice(len(codes), recipes, replace=False))]
    count = len(codes)
    gap = np.zeros(count + 1)  # BF16 is the last
    gap[:-1] = 0.1 if truth is None else truth(dict(zip(knobs, codes.T, strict=True)))
    overhead = 0.3 + 0.6 * rng.random(count + 1)
    lanes = gap[:, None] + rng.normal(0, common, seeds) + rng.normal(0, noise, (count + 1, seeds))
    return as_runs(knobs, codes, 0.5 * np.exp(lanes), overhead, task)


def screening(recipes: int, seeds: int = 3, task: str = "generated") -> pd.DataFrame:
    """`generated`, and all named recipes that quantize beside them, as a study screens them.

    Most of what makes a named recipe is a level that it has alone: factors have many levels, and their pairs ten
    thousand.
    """
    runs = generated(seeds=seeds, recipes=recipes, seed=1, task=task)
    rng = np.random.default_rng(2)
    parts = [runs]
    for i, (name, file) in enumerate(recipe_files().items()):
        recipe = file.recipe.canonical()
        if recipe.columns()["fprop_x_element"] == "bf16":
            continue
        facts: dict[str, object] = {**recipe_columns(recipe), "config_id": f"{10**8 + i:016x}", "recipe_label": name}
        facts |= {"baseline_id": runs["baseline_id"].iloc[0], "is_baseline": False}
        facts |= {"recipe_name": name, "overhead": 0.3 + 0.6 * rng.random(), "points": 2 + i % 5}
        losses = runs["val_loss"].to_numpy()[:seeds] * np.exp(rng.normal(0.02, 0.03) + rng.normal(0, 0.01, seeds))
        facts |= dict.fromkeys(["val_loss", "val_loss_bf16", "train_loss_min", "train_loss_final"], losses)
        parts.append(runs.iloc[:seeds].assign(**facts))
    return pd.concat(parts, ignore_index=True)


def crossing(knobs: Sequence[str]) -> NDArray[np.intp]:
    """Codes [combinations, knobs] of all combinations of levels."""
    return np.array(list(product(*(range(len(KNOBS[name][1])) for name in knobs))))


def as_runs(
    knobs: Sequence[str],
    codes: NDArray[np.intp],
    losses: NDArray[np.float64],
    overhead: NDArray[np.float64],
    task: str = "generated",
    ids: NDArray[np.intp] | None = None,
) -> pd.DataFrame:
    """Runs with given losses. codes: [recipes, knobs]; losses: [recipes + 1, seeds], the last of BF16, NaN where a lane
    diverged; overhead: [recipes + 1]; ids: [recipes + 1], what config_ids are made from (default: 0, 1, 2 …)."""
    count, seeds = len(codes), losses.shape[1]
    ids = np.arange(count + 1) if ids is None else ids
    recipe, lane_seed = np.repeat(np.arange(count + 1), seeds), np.tile(np.arange(seeds), count + 1)
    columns: dict[str, object] = {**recipe_columns(Recipe.named("nvfp4")), **_FACTS, "task": task}
    for name, level in zip(knobs, codes.T, strict=True):
        values = np.array(KNOBS[name][1], object)[np.append(level, 0)[recipe]]
        columns |= dict.fromkeys(KNOBS[name][0], values.astype(float) if name == "*.tensor_scale" else values)
    points = np.append(1 + (codes > 0).sum(axis=1), 0)
    names = np.array([f"{i:016x}" for i in ids], object)
    columns |= {"config_id": names[recipe], "baseline_id": names[-1]}
    columns["recipe_label"] = np.array([*(f"recipe {i}" for i in range(count)), "bf16"], object)[recipe]
    columns["recipe_name"] = np.array([None] * count + ["bf16"], object)[recipe]
    columns |= {"is_baseline": recipe == count, "points": points[recipe], "seed": lane_seed}
    columns["overhead"] = overhead[recipe]
    columns |= dict.fromkeys(["val_loss", "val_loss_bf16", "train_loss_min", "train_loss_final"], losses.ravel())
    columns["status"] = np.where(np.isfinite(losses.ravel()), "done", "diverged").astype(object)
    return pd.DataFrame(columns, index=np.arange(len(recipe)))


def as_rows(runs: pd.DataFrame, losses: NDArray[np.float64]) -> pa.Table:
    """Runs as rows of a store, with training losses [runs, points] at steps 1 … 10,000; columns they lack are null."""
    count, points = losses.shape
    starts = pa.array(np.arange(0, count * points + 1, points, dtype=np.int32))
    steps = np.tile(np.geomspace(1, 10_000, points).astype(np.int32), count)
    curves = {"curve_step": steps, "curve_loss": losses.ravel()}
    runs = runs.assign(schema_version=SCHEMA_VERSION)
    columns = []
    for field in ROW:
        if field.name in curves:
            columns.append(pa.ListArray.from_arrays(starts, pa.array(curves[field.name], field.type.value_type)))
        elif field.name in runs:
            values = runs[field.name]
            text = isinstance(values.dtype, pd.StringDtype)
            columns.append(pa.Array.from_pandas(values.astype(object) if text else values, type=field.type))
        else:
            columns.append(pa.nulls(count, field.type))
    return pa.Table.from_arrays(columns, schema=ROW)


_FACTS = {
    "lr": 1e-3,
    "preset": "small",
    "dataset_digest": "0123abcd",
    "device_class": "cpu",
    "software_class": "torch",
    "rev_quantizers": 1,
    "rev_engine": 1,
    "rev_task": 1,
    "val_metric": 0.9,
    "metric_name": "accuracy",
    "metric_better": "higher",
    "steps": 1000,
    "train_s": 12.0,
    "setup_s": 3.0,
    "lane_s": 0.4,
    "lanes": 32,
    "device": "cpu",
    "device_name": "generated",
    "threads": 2,
    "dtype": "float32",
    "created_at": datetime(2026, 1, 1, tzinfo=UTC),
}
assert {column for columns, _ in KNOBS.values() for column in columns} <= set(AXES)
