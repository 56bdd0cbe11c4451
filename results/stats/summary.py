"""One line per recipe: its gap to BF16 with the interval over seeds, what it costs, and whether it is on the front."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse import ConfigError, StoreError
from fp4dse.dse.cost import BAND, OVERHEAD_OF
from fp4dse.results.stats.intervals import CONFIDENCE, mean_interval, p_value
from fp4dse.results.stats.levels import are_shares, levels
from fp4dse.results.stats.paired import (
    DERIVED,
    MEASURED,
    NEEDED,
    OVERHEAD,
    SETTING,
    at_best_lr,
    bf16_cost,
    by_seed,
    numbered,
    outcomes,
    rows_at_best_lr,
)
from fp4dse.results.stats.pareto import front_of_any
from fp4dse.results.stats.stages import screened

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
SUMMARIZED = list(dict.fromkeys([*NEEDED, *DERIVED, *LABELS, OVERHEAD, *BAND, "overhead_of"]))
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
    and with the worst; NaN where rows have none), on_front, note (why there is no gap or no overhead, else empty).

    A frame that has gap and baseline_loss (as Store.runs() gives) keeps them, so that rows may be filtered first.
    A recipe with a diverged seed has gap = inf, one with a pruned seed none. The front is over recipes that quantize
    (points > 0), have a finite gap and an overhead; BF16 is on none, but dominates what takes as long and is no better.
    A recipe is off the front if it is dominated with the best software, with the worst and with the middling one. Of
    modelled overheads those of the newest revision in the setting count. ConfigError if the rows have no numeric column
    `overhead`.
    """
    check_overhead(runs, overhead)
    rows = rows_at_best_lr(runs)
    rows = rows.assign(
        val_metric=rows["val_metric"].astype(float).where(rows["loss"].notna()),
        paired=rows["gap"].where(np.isfinite(rows["gap"])),
        in_bf16=rows["gap_bf16"].where(np.isfinite(rows["gap_bf16"])),
        in_match=rows["gap_matched"].where(np.isfinite(rows["gap_matched"])),
        in_excess=rows["gap_reducible"].where(np.isfinite(rows["gap_reducible"])),
        unpaired=rows["loss"].notna() & rows["baseline_loss"].isna(),
        cost=_on_one_scale(rows, overhead),
    )
    band = BAND if overhead == OVERHEAD else ()
    rows = rows.assign(**{name: rows[name].where(rows["cost"].notna()) if name in rows else np.nan for name in band})
    if "baseline_id" not in rows:
        rows = rows.assign(baseline_id=None)
    kept = [*SETTING, "baseline_id", "is_baseline", "lr", "metric_name", "metric_better", "gap_unit", "points"]
    rows = rows if "gap_unit" in rows else rows.assign(gap_unit=None)
    recipe = numbered(rows, ["setting", "config_id"], sort=False)
    kept += ["setting", "config_id", "recipe_label", "recipe_name", "bits_per_element"]
    means, sums = ["cost", *band, "loss", "val_metric"], ["diverged", "pruned", "failed", "unpaired"]
    out = pd.concat(
        [
            rows[list(dict.fromkeys(kept))].groupby(recipe).first(),
            rows[means].groupby(recipe).mean(),
            rows[sums].groupby(recipe).sum(),
            rows["loss"].groupby(recipe).count().rename("seeds"),
        ],
        axis=1,
    )
    out = out.rename(
        columns={"loss": "val_loss", "recipe_label": "label", "recipe_name": "name", "bits_per_element": "bits"}
    )
    paired = by_seed(rows, rows["paired"], recipe)[1]  # in the order of out: groups count up
    found = mean_interval(paired)
    out[["gap", "gap_low", "gap_high", "pairs"]] = found[["mean", "low", "high", "n"]].to_numpy()
    out["pairs"] = out["pairs"].astype(int)
    in_bf16 = mean_interval(by_seed(rows, rows["in_bf16"], recipe)[1])
    out[["gap_bf16", "gap_bf16_low", "gap_bf16_high"]] = in_bf16[["mean", "low", "high"]].to_numpy()
    matched = mean_interval(by_seed(rows, rows["in_match"], recipe)[1])
    out[["gap_matched", "gap_matched_low", "gap_matched_high"]] = matched[["mean", "low", "high"]].to_numpy()
    reducible = mean_interval(by_seed(rows, rows["in_excess"], recipe)[1])
    out[["gap_reducible", "gap_reducible_low", "gap_reducible_high"]] = reducible[["mean", "low", "high"]].to_numpy()
    diverged = out["diverged"].gt(0)
    for name in ("gap", "gap_bf16", "gap_matched") if diverged.any() else ():
        out.loc[diverged, [name, f"{name}_low", f"{name}_high"]] = [np.inf, np.nan, np.nan]
    quantizes = out["points"].gt(0) & np.isfinite(out["gap"].astype(float))
    out["note"] = np.select(
        [
            diverged,
            out["pruned"].gt(0),
            out["seeds"].eq(0),
            out["pairs"].eq(0) & out["unpaired"].gt(0),
            out["pairs"].eq(0),
        ],
        ["diverged", "pruned", "failed", "no baseline", "loss is not positive"],
        np.where(~out["is_baseline"] & (out["cost"].isna() | out["points"].isna()), f"no {overhead}", ""),
    )
    out[["survived", "survived_low", "survived_high"]] = survival(out["seeds"], out["diverged"]).to_numpy()
    out["on_front"] = False
    for _, part in out[quantizes].groupby("setting"):
        out.loc[part.index, "on_front"] = front_of_any(
            part[["cost", *band]].to_numpy(float).T, part["gap"], bf16_cost(part, overhead)
        )
    out["p_best"] = _p_against_best(out, quantizes, paired)
    out = out.sort_values(
        ["setting", "is_baseline", "on_front", "gap", "label"], ascending=[True, False, False, True, True]
    )
    columns = [*SETTING, "config_id", "label", "name", "baseline_id", "is_baseline", "lr", "seeds", "diverged"]
    columns += ["pruned", "failed", "val_loss", "val_metric", "metric_name", "metric_better", "gap_unit"]
    columns += ["gap", "gap_low", "gap_high", "pairs", "gap_bf16", "gap_bf16_low", "gap_bf16_high"]
    columns += ["gap_matched", "gap_matched_low", "gap_matched_high"]
    columns += ["gap_reducible", "gap_reducible_low", "gap_reducible_high"]
    columns += ["survived", "survived_low", "survived_high"]
    columns += ["p_best", "points", "bits", *([] if overhead == "points" else [overhead]), *band, "on_front", "note"]
    return out.rename(columns={"cost": overhead} if overhead != "points" else {})[columns].reset_index(drop=True)


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


def check_overhead(runs: pd.DataFrame, overhead: str) -> None:
    """ConfigError unless `overhead` is a column of numbers, and all of one kind if it was measured."""
    types = pd.api.types
    if overhead not in runs or not types.is_numeric_dtype(runs[overhead]) or types.is_bool_dtype(runs[overhead]):
        numeric = [name for name in runs if types.is_numeric_dtype(runs[name])]
        raise ConfigError("overhead", overhead, f"a column of numbers: {', '.join(map(str, numeric))}")
    if overhead == MEASURED[0] and MEASURED[1] in runs and runs[MEASURED[1]].nunique() > 1:
        found = "; ".join(sorted(runs[MEASURED[1]].dropna().unique()))
        raise ConfigError("overhead", overhead, f"figures of one model on one device; these rows have: {found}")


def _on_one_scale(rows: pd.DataFrame, overhead: str) -> pd.Series:
    """The column as floats, NaN where the cost model was of an older revision than that of another row of the setting:
    such figures are not to be compared."""
    cost = rows[overhead].astype(float)
    if overhead != OVERHEAD or "overhead_of" not in rows:
        return cost
    revisions = {of: _revision(of) for of in rows["overhead_of"].dropna().unique()}
    revision = rows["overhead_of"].map(revisions).astype(float)
    newest = revision.groupby(rows["setting"]).transform("max")
    return cost.where(revision.eq(newest) | newest.isna())


def _revision(of: str) -> int:
    """Of the cost model, the last word of an `overhead_of`. StoreError if there is none: no figure is left out for it
    in silence."""
    last = of.rpartition(" ")[2]
    if not (last.isascii() and last.isdecimal()):
        accepted = f"model, chip and revision, as {OVERHEAD_OF!r}"
        fix = "fp4dse wrote no such rows; find them with `fp4dse query` and move their file away"
        raise StoreError(f"overhead_of: found {of[:60]!r}; accepted: {accepted}; {fix}")
    return int(last)


def _p_against_best(lines: pd.DataFrame, candidates: pd.Series, gaps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Two-sided p of the seed-paired difference between each candidate and the lowest gap of its setting; NaN for other
    lines. gaps: of the lines' seeds, [lines, seeds]."""
    chosen = np.flatnonzero(candidates)
    setting, mean = lines["setting"].to_numpy()[chosen], lines["gap"].to_numpy(float)[chosen]
    order = np.lexsort((mean, setting))
    settings, first = np.unique(setting[order], return_index=True)
    best = chosen[order][first][settings.searchsorted(setting)]
    found = np.full(len(lines), np.nan)
    found[chosen] = p_value(gaps[chosen] - gaps[best])
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
