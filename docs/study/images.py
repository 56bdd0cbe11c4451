"""The tables of findings.md about images: the named recipes on `vision:medium` and `diffusion:small`.

Neither preset resolves, so by plan.md these rows are reported and settle nothing. Gaps are against BF16 with the same
optimizer.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from cells import interval, spearman_words
from growth import SCALE

from fp4dse.dse import Recipe
from fp4dse.results.stats.estimates.intervals import holm, paired_interval
from fp4dse.results.stats.paired import by_seed, rows_at_best_lr
from fp4dse.results.stats.techniques.answers import effects_of
from fp4dse.results.stats.techniques.questions import load_questions
from fp4dse.results.text.ratios import change_with_range

QUESTIONS = Path(__file__).parent / "questions.toml"
TASKS = "vision:medium", "diffusion:small"
SHOWN = "nvfp4", "nvfp4-sr", "mxfp4", "mxfp4-sr-rht", "ue5m3-graphcore", "quartet2", "nvidia-nvfp4", "te-nvfp4"
SHOWN += ("nemotron-3-super",)
"""Named recipes that went on to a later stage, and two that differ in the layers that they keep in BF16 alone."""


def _gaps(runs: pd.DataFrame, task: str, column: str = "gap_matched") -> pd.DataFrame:
    """Gaps of a task in the screening: a row for each recipe but BF16, under whatever optimizer, a column for each
    seed."""
    mine = (runs["task"] + ":" + runs["preset"]).eq(task) & ~runs["seed"].isin(SCALE)
    rows = rows_at_best_lr(runs[mine & ~runs["config_id"].isin(runs["baseline_id"])])
    ids, gaps = by_seed(rows, rows[column])
    return pd.DataFrame(gaps, index=ids)


def _images(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each task: does it resolve, which of its recipes differ significantly from BF16 (Holm), does it order
    those that the screening's other tasks have as they do, and the effect of the one question that has a pair."""
    nvfp4 = Recipe.named("nvfp4").config_id
    found = []
    for task in TASKS:
        gaps = _gaps(runs, task)
        lines = paired_interval(gaps.to_numpy())
        told = holm(lines["p"]) < 0.05
        means = gaps.mean(axis=1)
        row: dict[str, object] = {"task": task, "recipes": len(gaps), "NVFP4": interval(gaps.loc[nvfp4].to_numpy())}
        row["of its sd"] = f"{means[nvfp4] / gaps.loc[nvfp4].std():.1f}"
        row["worse than BF16, better"] = f"{sum(told & (means > 0))}, {sum(told & (means < 0))}"
        for other in ("language:0.4M", "regression:deep"):
            both = pd.concat([means, _gaps(runs, other).mean(axis=1)], axis=1, join="inner")
            row[f"Spearman with {other}"] = f"{spearman_words(both[0], both[1])}, {len(both)} recipes"
        mine = (runs["task"] + ":" + runs["preset"]).eq(task)
        lines = effects_of(runs[mine], load_questions(QUESTIONS)).query("evaluation == 'quantized'")
        for line in lines.itertuples():
            row[line.effect] = change_with_range(line.difference, line.low, line.high)
        found.append(row)
    return found


def _named(runs: pd.DataFrame) -> list[dict[str, object]]:
    """A row for each recipe of SHOWN: its gaps on images; then what the last is worth against the one before."""
    labels = runs.drop_duplicates("config_id").set_index("config_id")["recipe_label"].astype(str)
    columns = [(task, "gap_matched", task) for task in TASKS] + [(f"{TASKS[1]} in BF16", "gap_bf16", TASKS[1])]
    gaps = {heading: _gaps(runs, task, column) for heading, column, task in columns}
    rows = []
    for name in SHOWN:
        recipe = Recipe.named(name).config_id
        values = {heading: interval(np.asarray(of.loc[recipe])) for heading, of in gaps.items()}
        rows.append({"recipe": f"`{name}`: {labels[recipe]}", **values})
    before, after = (Recipe.named(name).config_id for name in SHOWN[-2:])
    worth = {heading: interval((of.loc[after] - of.loc[before]).to_numpy()) for heading, of in gaps.items()}
    return [*rows, {"recipe": "*the last for the one before*", **worth}]


OF_IMAGES = {"images": _images, "named": _named}
"""Marker -> rows of its table, of all runs."""
