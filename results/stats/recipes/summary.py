"""One line per recipe: its gap to BF16 with the interval over seeds, what it costs, and whether it is on the front."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse.cost import BAND, OVERHEAD_OF, rollout_share
from fp4dse.results.stats.estimates.intervals import CONFIDENCE, p_value, paired_interval
from fp4dse.results.stats.levels import are_shares, levels
from fp4dse.results.stats.paired import (
    DERIVED,
    MARGINS,
    NEEDED,
    OVERHEAD,
    SETTING,
    at_best_lr,
    bf16_cost,
    numbered,
    outcomes,
    rows_at_best_lr,
)
from fp4dse.results.stats.recipes.equal_time import slopes, times_to_quality
from fp4dse.results.stats.recipes.overheads import check_overhead, on_one_scale
from fp4dse.results.stats.recipes.pareto import front_of_any
from fp4dse.results.stats.stages import screened

ROLLOUT = "rollout_overhead"
"""Modelled time that is not in the overhead, where lanes learn from samples of their own: that is the trainer's."""
ITERATIONS = ITERATION, ROLLOUT_SHARE = "iteration_overhead", "rollout_share"
"""Modelled time of a rollout and the updates on its answers, and what the rollout takes of it in BF16."""
TIME = "time_to_quality"
"""The modelled time to BF16's loss, and with _low and _high the ends of its interval."""
LABELS = [
    "recipe_label",
    "recipe_name",
    "lr_source",
    "points",
    "bits_per_element",
    "val_metric",
    "metric_name",
    "metric_better",
    "gap_unit",
]
SUMMARIZED = list(dict.fromkeys([*NEEDED, *DERIVED, *LABELS, OVERHEAD, *BAND, "overhead_of", ROLLOUT]))
"""The columns that `summarize` reads."""


def summarize(runs: pd.DataFrame, overhead: str = OVERHEAD) -> pd.DataFrame:
    """One line per SETTING and recipe, at the recipe's best learning rate.

    Columns: SETTING, config_id, label, name, baseline_id (BF16 with its training side), is_baseline, lr, seeds
    (finished), diverged, pruned, failed, val_loss and val_metric (means), metric_name, metric_better, gap_unit
    (`points`: gaps are differences of shares; null: logarithms of ratios), gap, gap_low, gap_high (mean of the
    paired gaps, 95 % interval; NaN bounds with one pair), pairs, gap_bf16, gap_bf16_low, gap_bf16_high (the same of
    both models evaluated in BF16; NaN for rows of older engines), gap_matched, gap_matched_low, gap_matched_high
    (against BF16 with the recipe's training side; NaN without it), gap_reducible, gap_reducible_low,
    gap_reducible_high (of the loss above the entropy of the data; NaN where nobody knows that), survived (the share of
    seeds that did not diverge, of those that finished or diverged), survived_low, survived_high (95 %, Clopper and
    Pearson 1934), p_best (two-sided p of the paired difference to the recipe with the lowest gap), points, bits, the
    column `overhead` if it is another, overhead_low and overhead_high (of the modelled overhead: with the best software
    and with the worst; NaN where rows have none), rollout_overhead (of a token of the rollout, modelled, BF16 = 1,
    where lanes learn from samples of their own, whose overhead is that of the trainer's step alone; else NaN),
    iteration_overhead (of a rollout and its updates: rollout_share · rollout_overhead + (1 - rollout_share) · overhead,
    where the axis is the modelled overhead; NaN where that is of another model or chip than rollout_overhead),
    rollout_share (of BF16's iteration, of the workload `reasoning` in docs/cost.md), time_to_quality,
    time_to_quality_low, time_to_quality_high (where the axis is the modelled overhead: the time to BF16's loss,
    BF16 = 1, with the ends of the gap's interval; NaN where nobody knows it, inf where it is out of reach, see
    equal_time.py), on_front, note (why there is no gap or no overhead, else empty).

    A frame that has gap and baseline_loss (as Store.runs() gives) keeps them, so that rows may be filtered first.
    A recipe with a diverged seed has gap = inf, one with a pruned seed none. The front is over recipes that quantize
    (points > 0), have a finite gap and an overhead; BF16 is on none, but dominates what takes as long and is no better.
    A recipe is off the front if it is dominated with the best software, with the worst and with the middling one. Of
    modelled overheads those of the newest revision in the setting count. ConfigError if the rows have no numeric column
    `overhead`.
    """
    check_overhead(runs, overhead)
    rows = rows_at_best_lr(runs)
    recipe = numbered(rows, ["setting", "config_id"], sort=False)
    if recipe.hasnans:
        rows, recipe = rows[recipe.notna()], recipe.dropna()
    # a frame is made once, at the end: of few lines, most that pandas does with one is preparation
    codes, lines = recipe.to_numpy(np.int64), int(recipe.max()) + 1 if len(recipe) else 0
    kept = [*SETTING, "is_baseline", "lr", "metric_name", "metric_better", "points", "setting", "config_id"]
    out: dict[str, Any] = {name: _first(rows[name], codes, lines) for name in kept}
    for name in ("gap_unit", "baseline_id", *MARGINS):
        out[name] = _first(rows[name], codes, lines) if name in rows else pd.Series([None] * lines, dtype=object)
    for name, column in (("label", "recipe_label"), ("name", "recipe_name"), ("bits", "bits_per_element")):
        out[name] = _first(rows[column], codes, lines)

    cost = on_one_scale(rows, overhead)
    band = BAND if overhead == OVERHEAD else ()
    numbers = {name: rows[name].where(cost.notna()) if name in rows else np.nan for name in band}
    samples = rows[ROLLOUT].astype(float).where(are_shares(rows)) if ROLLOUT in rows else pd.Series(np.nan, rows.index)
    numbers |= {ROLLOUT: samples} if overhead != ROLLOUT else {}
    numbers |= _iterations(rows, samples, cost) if overhead == OVERHEAD else {}
    loss, metric = rows["loss"], rows["val_metric"].astype(float).where(rows["loss"].notna())
    means = pd.DataFrame({"cost": cost, **numbers, "val_loss": loss, "val_metric": metric}).groupby(codes).mean()
    out |= {name: means[name] for name in means}
    there = loss.notna()
    flags = {name: rows[name] for name in ("diverged", "pruned", "failed")}
    flags |= {"unpaired": there & rows["baseline_loss"].isna(), "seeds": there}
    out |= {name: _counts(codes[flag.to_numpy(bool)], lines) for name, flag in flags.items()}

    seed, seeds = pd.factorize(rows["seed"], sort=True)
    paired = _matrix(rows["gap"], codes, seed, (lines, len(seeds)))
    diverged = out["diverged"].gt(0)
    gaps = {"gap": paired}
    others = ("gap_bf16", "gap_matched", "gap_reducible")
    gaps |= {name: _matrix(rows[name], codes, seed, paired.shape) for name in others}
    unit = pd.DataFrame({"gap_unit": out["gap_unit"]})
    shares = are_shares(unit)
    counts = shares & ~out["is_baseline"].to_numpy(bool)  # BF16 is itself: its shares do not tie with its own by chance
    for name, of_seeds in gaps.items():
        found = paired_interval(of_seeds, counts)
        if name == "gap":
            out["pairs"] = found["n"]
        out[name] = found["mean"].mask(diverged, np.nan if name == "gap_reducible" else np.inf)
        out |= {f"{name}_{end}": found[end].mask(diverged) for end in ("low", "high")}

    quantizes = out["points"].gt(0) & np.isfinite(out["gap"])
    no_pair, no_cost = out["pairs"].eq(0), out["cost"].isna() | out["points"].isna()
    out["note"] = np.select(
        [diverged, out["pruned"].gt(0), out["seeds"].eq(0), no_pair & out["unpaired"].gt(0), no_pair],
        ["diverged", "pruned", "failed", "no baseline", "loss is not positive"],
        np.where(~out["is_baseline"] & no_cost, f"no {overhead}", ""),
    )
    survived = survival(out["seeds"], out["diverged"])
    out |= {"survived": survived["share"], "survived_low": survived["low"], "survived_high": survived["high"]}
    setting, gap = out["setting"].to_numpy(), out["gap"].to_numpy(float)
    out["on_front"] = np.zeros(lines, bool)
    costs = means[["cost", *band]].to_numpy(float).T
    for number in np.unique(setting[quantizes]):
        part = np.flatnonzero(quantizes & (setting == number))
        out["on_front"][part] = front_of_any(costs[:, part], gap[part], bf16_cost(unit.iloc[part], overhead))
    out["p_best"] = _p_against_best(setting, gap, quantizes.to_numpy(bool), paired, shares)

    priced = overhead == OVERHEAD
    if priced:
        slope = slopes(pd.DataFrame({name: out[name] for name in ("gap_unit", *MARGINS)}))
        ends = {f"{TIME}{end}": out[f"gap{end}"] for end in ("", "_low", "_high")}
        out |= {name: times_to_quality(gap, out["cost"], slope) for name, gap in ends.items()}

    columns = [*SETTING, "config_id", "label", "name", "baseline_id", "is_baseline", "lr", "seeds", "diverged"]
    columns += ["pruned", "failed", "val_loss", "val_metric", "metric_name", "metric_better", "gap_unit"]
    columns += ["gap", "gap_low", "gap_high", "pairs", "gap_bf16", "gap_bf16_low", "gap_bf16_high"]
    columns += ["gap_matched", "gap_matched_low", "gap_matched_high"]
    columns += ["gap_reducible", "gap_reducible_low", "gap_reducible_high"]
    columns += ["survived", "survived_low", "survived_high"]
    columns += ["p_best", "points", "bits", *([] if overhead == "points" else [overhead]), *band]
    columns += [
        *([ROLLOUT] if overhead != ROLLOUT else []),
        *([*ITERATIONS, *ends] if priced else []),
        "on_front",
        "note",
    ]
    if overhead != "points":
        out[overhead] = out["cost"]
    summary = pd.DataFrame({name: pd.Series(out[name]).array for name in dict.fromkeys([*columns, "setting"])})
    summary = summary.sort_values(
        ["setting", "is_baseline", "on_front", "gap", "label"], ascending=[True, False, False, True, True]
    )
    return summary[columns].reset_index(drop=True)


def _iterations(rows: pd.DataFrame, samples: pd.Series, cost: pd.Series) -> dict[str, pd.Series]:
    """ITERATIONS of rows whose rollouts take `samples`, NaN of lanes without, and their trainer's steps `cost`."""
    if "overhead_of" in rows:
        samples = samples.where(rows["overhead_of"].eq(OVERHEAD_OF))
    share = rollout_share() if samples.notna().any() else np.nan  # worked out only where it is asked for
    found = share * samples + (1 - share) * cost
    return {ITERATION: found, ROLLOUT_SHARE: pd.Series(share, rows.index).where(found.notna())}


def _first(values: pd.Series, codes: NDArray[np.int64], lines: int) -> pd.Series:
    """The first value of each line that is not missing; of no such the missing one. codes: the line of each value."""
    at = np.zeros(lines, np.int64)
    for places in (np.arange(len(values)), np.flatnonzero(values.notna())):
        at[codes[places[::-1]]] = places[::-1]  # of a line that stands there often, the last one counts
    return pd.Series(values.array.take(at))


def _counts(codes: NDArray[np.int64], lines: int) -> pd.Series:
    return pd.Series(np.bincount(codes, minlength=lines))


def _matrix(
    values: pd.Series, codes: NDArray[np.int64], seed: NDArray[np.int64], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """The values by line and seed, NaN where there is none that is finite."""
    matrix, found = np.full(shape, np.nan), values.to_numpy(float)
    matrix[codes, seed] = np.where(np.isfinite(found), found, np.nan)
    return matrix


def survival(finished: pd.Series, diverged: pd.Series) -> pd.DataFrame:
    """Share of seeds that finished and its exact 95 % interval; NaN without a seed. finished, diverged: counts."""
    from scipy.special import betaincinv

    k, n = finished.to_numpy(float), (finished + diverged).to_numpy(float)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(n > 0, k / n, np.nan)
        low = np.where(k > 0, betaincinv(np.maximum(k, 1), n - k + 1, 0.5 - CONFIDENCE / 2), 0.0)
        high = np.where(k < n, betaincinv(k + 1, np.maximum(n - k, 1), 0.5 + CONFIDENCE / 2), 1.0)
    known = n > 0
    return pd.DataFrame({"share": share, "low": np.where(known, low, np.nan), "high": np.where(known, high, np.nan)})


def _p_against_best(
    setting: NDArray[Any],
    gap: NDArray[np.float64],
    candidates: NDArray[np.bool_],
    gaps: NDArray[np.float64],
    shares: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """Two-sided p of the seed-paired difference between each candidate and the lowest gap of its setting; NaN for other
    lines. All but gaps: a value a line; gaps: of the lines' seeds, [lines, seeds]."""
    chosen = np.flatnonzero(candidates)
    setting, mean = setting[chosen], gap[chosen]
    order = np.lexsort((mean, setting))
    settings, first = np.unique(setting[order], return_index=True)
    best = chosen[order][first][settings.searchsorted(setting)]
    found = np.full(len(gap), np.nan)
    counts = shares[chosen] & (chosen != best)
    found[chosen] = p_value(gaps[chosen] - gaps[best], counts)
    return found


def noise_floor(runs: pd.DataFrame) -> pd.DataFrame:
    """Per SETTING: the baseline's lr, seeds, val_loss, val_metric, metric_name, metric_better, gap_unit and
    noise_floor.

    noise_floor is the rms of log(loss_i / loss_j) over all pairs of seeds, which is √2 · std of the log losses (of the
    losses themselves, where gaps are in points): how far BF16 is from BF16 when only the seed differs. NaN with fewer
    than two seeds.
    """
    base = screened(runs[runs["is_baseline"].astype(bool)])
    base = base if "gap_unit" in base else base.assign(gap_unit=None)
    base = base.assign(loss=outcomes(base)["loss"])[at_best_lr(outcomes(base))]
    out = (
        base.assign(log=levels(base["loss"], are_shares(base)))
        .groupby(list(SETTING), sort=False)
        .agg(
            lr=("lr", "first"),
            seeds=("loss", "count"),
            val_loss=("loss", "mean"),
            val_metric=("val_metric", "mean"),
            metric_name=("metric_name", "first"),
            metric_better=("metric_better", "first"),
            gap_unit=("gap_unit", "first"),
            std=("log", "std"),
        )
        .reset_index()
    )
    return out.assign(noise_floor=np.sqrt(2) * out["std"]).drop(columns="std")
