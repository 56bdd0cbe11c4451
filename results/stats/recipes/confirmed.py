"""The candidates on fresh seeds: one half of these chooses the best, the other half says how good it is.

The recipe of the lowest of many means is a lucky one, and its mean is too low. Fresh seeds know nothing of how the
candidates were chosen (candidates.py), but they are flattered once more when the best is chosen among them. So it is
chosen on the first half of the fresh seeds, and its gap is that of the other half, which no choice has seen.

A recipe stands at the learning rate that its screened rows chose, and BF16 at its own.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from fp4dse.results.stats.estimates.intervals import paired_interval
from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import OVERHEAD, SETTING, bf16_cost, by_seed, rows_at_best_lr, stacked
from fp4dse.results.stats.recipes.candidates import candidates
from fp4dse.results.stats.recipes.equal_time import at_equal_time, ranking, slope_of
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.recipes.margins import margin_of
from fp4dse.results.stats.recipes.pareto import worth_naming
from fp4dse.results.stats.recipes.summary import summarize
from fp4dse.results.stats.stages import fresh

LEAST_SEEDS = 4
"""Two that choose and two that estimate: fewer give no interval."""
_KEYS = [*SETTING, "config_id"]
_JUDGED = ["seeds", "diverged", "gap", "gap_low", "gap_high", "chosen_on", "estimated_on", "choice", "estimate"]
_JUDGED += ["low", "high", "best", "recommended", "ranked_by", "verdict"]
COLUMNS = [*SETTING, "config_id", "label", "lr", OVERHEAD, "behind", "screened", "screened_low", "screened_high"]
COLUMNS += [*_JUDGED, "moved"]


def confirmed(runs: pd.DataFrame) -> pd.DataFrame:
    """One line per SETTING and recipe that is a candidate or has rows of the confirm stage, the lowest gap first.

    Columns: SETTING, config_id, label, lr, overhead, behind (of `candidates`; NaN if it is none), screened,
    screened_low, screened_high (the gap of its screened seeds), seeds, diverged (fresh ones), gap, gap_low, gap_high
    (mean over the fresh seeds, 95 %), chosen_on, estimated_on (seeds of the two halves), choice (mean gap of the first
    half), estimate, low, high (of the other, 95 %), best (the lowest choice of those that finished on all fresh seeds,
    and save time against BF16 if any does), recommended (of these the first of `ranking`, see equal_time.py, on that
    half), ranked_by (`time` to BF16's loss or `loss`), verdict (against the recommended one on the other half, at equal
    time if ranked by time, as of `against`), moved (gap - screened). Where nothing was confirmed the columns of fresh
    seeds are NaN.
    """
    new = fresh(runs)
    listed = candidates(runs).drop(columns="same_bits")
    if len(new):
        lines = summarize(runs)
        lines = lines[lines["points"].gt(0)]
        others = lines.merge(new[_KEYS].drop_duplicates(), on=_KEYS).merge(listed[_KEYS], how="left", indicator=True)
        others = others[others["_merge"].eq("left_only")].assign(behind=np.nan)
        parts = [part for part in (listed, others[[*listed]]) if len(part)]
        listed = stacked(parts, list(listed))
    names = {"gap": "screened", "gap_low": "screened_low", "gap_high": "screened_high"}
    listed = listed.rename(columns=names)
    parts = _judged(new, listed) if len(new) else []
    unknown = listed.assign(**{**dict.fromkeys(_JUDGED, np.nan), "ranked_by": None, "verdict": None})
    out = listed.merge(stacked(parts, [*_KEYS, *_JUDGED]), how="left", on=_KEYS) if parts else unknown
    out["moved"] = out["gap"] - out["screened"].where(np.isfinite(out["screened"].astype(float)))
    for name in ("best", "recommended"):
        out[name] = out[name].eq(True)
    return out.sort_values([*SETTING, "gap", "behind", "label"])[COLUMNS].reset_index(drop=True)


def _judged(new: pd.DataFrame, listed: pd.DataFrame) -> list[pd.DataFrame]:
    """_KEYS and _JUDGED of the recipes with fresh rows at the rate of `listed`, a frame for each setting with any."""
    reference = new["is_baseline"].astype(bool)
    if "baseline_id" in new:
        reference |= new["config_id"].isin(new["baseline_id"].dropna().unique())
    rates = new[reference][[*_KEYS, "lr"]].drop_duplicates()
    rows = rows_at_best_lr(new.merge(pd.concat([listed[[*_KEYS, "lr"]], rates]), on=[*_KEYS, "lr"]))
    rows = rows[rows["points"].gt(0)]
    return [_of_setting(part) for _, part in rows.groupby("setting", sort=False)]


def _of_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The lines of a setting. rows: of `rows_at_best_lr`, of recipes that quantize."""
    recipes, gaps = by_seed(rows, rows["gap"])  # seeds are in rising order
    facts = rows.groupby("config_id", sort=False)
    seeds = np.sort(rows["seed"].unique())
    half = len(seeds) // 2
    shares = bool(are_shares(rows).any())
    found = paired_interval(gaps, shares)
    out = pd.DataFrame({"config_id": recipes, "seeds": facts["loss"].count().reindex(recipes).to_numpy()})
    out = out.assign(**{name: rows[name].iloc[0] for name in SETTING})
    out["diverged"] = facts["diverged"].sum().reindex(recipes).to_numpy()
    out[["gap", "gap_low", "gap_high"]] = found[["mean", "low", "high"]]
    out.loc[out["diverged"].gt(0), ["gap", "gap_low", "gap_high"]] = [np.inf, np.nan, np.nan]
    out = out.assign(chosen_on=half, estimated_on=len(seeds) - half, choice=np.nan, best=False, recommended=False)
    out[["estimate", "low", "high"]] = np.nan
    out["verdict"] = out["ranked_by"] = None
    whole = np.isfinite(gaps).all(axis=1)
    if not half or not whole.any():
        return out
    out.loc[whole, "choice"] = gaps[whole, :half].mean(axis=1)
    estimates = paired_interval(gaps[whole, half:], shares)
    out.loc[whole, ["estimate", "low", "high"]] = estimates[["mean", "low", "high"]].to_numpy()
    able = rows[rows["config_id"].isin(recipes[whole])]
    first, other = (able[able["seed"].isin(part)] for part in (seeds[:half], seeds[half:]))
    named = summarize(first)
    named = named[worth_naming(named[OVERHEAD], named["seeds"], bf16_cost(first)) & np.isfinite(named["gap"])]
    if named.empty:
        return out
    rank, slope = ranking(named["gap"], named[OVERHEAD], slope_of(margin_of(first)))
    chosen = named.assign(rank=rank).sort_values(["rank", OVERHEAD], kind="stable")["config_id"].iloc[0]
    moved = at_equal_time(other, pd.Series(slope, other["setting"].unique()))
    versus = against(moved, chosen).set_index("config_id")["verdict"]
    out["best"] = out["config_id"].eq(named.sort_values("gap", kind="stable")["config_id"].iloc[0])
    out["recommended"] = out["config_id"].eq(chosen)
    out["ranked_by"] = "loss" if np.isnan(slope) else "time"
    out["verdict"] = out["config_id"].map(versus).astype(object).where(lambda found: found.notna(), None)
    return out
