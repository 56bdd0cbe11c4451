"""The share of the effects of the study's questions that are in their intervals, with the noise of its own recipes.

    python docs/study/resampled_answers.py language:0.4M 400

draws 400 studies of three seeds: what a recipe's seeds have on average is its truth, and lanes are normal, with the
spread that its seeds have (shrunk towards that of recipes of a similar loss). Recipes with one seed are left out. For
each effect that has a pair it prints how often its own interval, and that for all effects of its question, covers; then
the mean over effects, and for each question how often all cover at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from fp4dse.results import open_store
from fp4dse.results.stats.estimates.spread import lane_variances
from fp4dse.results.stats.paired import SETTING, by_seed, rows_at_best_lr
from fp4dse.results.stats.techniques.answers import effects_over, pairs_of, rows_of_pairs
from fp4dse.results.stats.techniques.questions import load_questions

HERE = Path(__file__).parent
SEEDS = 3


def main(name: str, studies: int) -> None:
    """Print the figures of each setting of a task (TASK:PRESET)."""
    task, _, preset = name.partition(":")
    questions = load_questions(HERE / "questions.toml")
    runs = open_store(HERE / "store").runs()
    runs = runs[runs["task"].eq(task) & runs["preset"].eq(preset)]
    pairs, rng = pairs_of(runs, questions), np.random.default_rng(0)
    for _, part in rows_at_best_lr(runs).groupby(list(SETTING), observed=True, sort=False):
        ids, y = by_seed(part, part["gap_matched"])
        often = np.isfinite(y).sum(axis=1) > 1
        ids, y = ids[often], y[often]
        places = {key: at for key, of in pairs.items() if len(at := rows_of_pairs(ids, of))}
        if not places:
            continue
        truth, spread = np.nanmean(y, axis=1), np.sqrt(lane_variances(y)[0])
        print(f"{len(ids)} recipes, spread of a lane {100 * spread.min():.3f} to {100 * spread.max():.1f} %")
        lines = effects_over(_drawn(ids, truth, spread, studies, rng), pairs, questions.negligible)
        right = {key: (truth[at[:, 1]] - truth[at[:, 0]]).mean() for key, at in places.items()}
        _report(lines[lines["evaluation"].eq("quantized")], right)


def _drawn(
    ids: pd.Index, truth: np.ndarray, spread: np.ndarray, studies: int, rng: np.random.Generator
) -> pd.DataFrame:
    """Rows as `effects_over` reads them, a study a task."""
    count = len(ids) * SEEDS
    gaps = np.repeat(truth, SEEDS) + np.repeat(spread, SEEDS) * rng.normal(size=(studies, count))
    rows = pd.DataFrame(dict.fromkeys(SETTING, "drawn"), index=range(gaps.size))
    rows = rows.assign(task=np.repeat([f"{i:05}" for i in range(studies)], count), diverged=False)
    rows["config_id"] = np.tile(np.repeat(np.asarray(ids, object), SEEDS), studies)
    rows["seed"] = np.tile(np.arange(SEEDS), len(ids) * studies)
    return rows.assign(gap=gaps.ravel(), gap_bf16=gaps.ravel(), gap_matched=gaps.ravel())


def _report(lines: pd.DataFrame, right: dict[tuple[str, str], float]) -> None:
    """right: what is true of each question and effect."""
    keys = zip(lines["question"], lines["effect"], strict=True)
    lines = lines.assign(truth=[right[key] for key in keys])
    lines["own"] = lines["truth"].between(lines["own_low"], lines["own_high"])
    lines["together"] = lines["truth"].between(lines["low"], lines["high"])
    lines["percent"] = 100 * (lines["own_high"] - lines["own_low"])
    of = lines.groupby(["question", "effect"], sort=False)
    by = of.agg({"pairs": "first", "own": "mean", "together": "mean", "percent": "median"})
    print(by.rename(columns={"percent": "median width, %"}).round(3).to_string())
    ends = by["own"].quantile([0, 0.1, 0.5, 0.9, 1]).round(3).tolist()
    print(f"own intervals: mean {by['own'].mean():.3f}; least, tenth, median, ninetieth percentile and most: {ends}")
    together = lines.groupby(["task", "question"])["together"].all().groupby("question").mean()
    print(f"all of a question at once: {together.mean():.3f}; {together.round(3).to_dict()}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
