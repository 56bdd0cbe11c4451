"""Effects over several tasks at once, on ranks, so that the size of a task's losses does not matter.

Within each setting and seed the recipes are ranked by loss, 0 … 1, diverged last, and the linear model is fitted to the
ranks. The effect over T settings is the mean of theirs; its error is that of a mean of independent estimates, with
Satterthwaite's degrees of freedom. So it speaks of these tasks; whether it holds on another is what `agree` hints at.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.special import stdtr, stdtrit

from fp4dse.results.stats.estimates.intervals import CONFIDENCE, adjusted
from fp4dse.results.stats.paired import rows_at_best_lr, stacked
from fp4dse.results.stats.techniques.effects import effects

LINE = ["kind", "factor", "level", "with_factor", "with_level"]


def pooled_effects(runs: pd.DataFrame) -> pd.DataFrame:
    """Effects on rank over all settings, of the quantizing recipes that every setting has.

    Columns: kind, factor, level, with_factor, with_level, reference (as `effects`), effect (mean difference of rank in
    0 … 1, below 0 where it helps), low, high (95 %), p, q (p adjusted for all lines: false discovery rate), settings
    (that tell it), agree (in how many of them the sign is that of the mean), share (mean), diverged (mean). Empty if no
    two recipes were run in every setting.
    """
    rows = rows_at_best_lr(runs)
    rows = rows[rows["points"].gt(0)]
    everywhere = rows.groupby("config_id")["setting"].nunique()
    rows = rows[rows["config_id"].map(everywhere).eq(rows["setting"].nunique())]
    each = effects(rows, "rank")
    columns = [*LINE, "reference", "effect", "low", "high", "p", "q", "settings", "agree", "share", "diverged"]
    if each.empty:
        return stacked([], columns)
    reference = each["kind"].eq("main") & each["level"].eq(each["reference"])
    known = each.assign(
        variance=np.square(each["error"].astype(float).mask(reference, 0.0)),
        sign=np.sign(each["effect"].astype(float)),
    )
    known["fourth"] = np.square(known["variance"]) / known["freedom"]
    known = known[known["effect"].notna()]
    lines = known.groupby(LINE, dropna=False, sort=False)
    out = lines.agg(
        reference=("reference", "first"),
        effect=("effect", "mean"),
        variance=("variance", lambda values: values.sum(skipna=False)),
        fourth=("fourth", lambda values: values.sum(skipna=False)),
        settings=("effect", "count"),
        share=("share", "mean"),
        diverged=("diverged", "mean"),
    )
    out["agree"] = (
        known.assign(same=known["sign"].eq(np.sign(lines["effect"].transform("mean"))))
        .groupby(LINE, dropna=False, sort=False)["same"]
        .sum()
    )
    out = out.reset_index()
    freedom = np.square(out["variance"]) / out["fourth"].where(out["fourth"].gt(0))
    error = np.sqrt(out["variance"]) / out["settings"]
    half = stdtrit(freedom, 0.5 + CONFIDENCE / 2) * error
    out["low"], out["high"] = out["effect"] - half, out["effect"] + half
    out["p"] = 2 * stdtr(freedom, -(out["effect"] / error.where(error.gt(0))).abs())
    out["q"] = adjusted(out["p"].to_numpy(float))
    largest = out.groupby(["kind", "factor", "with_factor"], dropna=False)["share"].transform("max")
    out = out.assign(order=-largest, interacts=out["kind"].eq("interaction"))
    out = out.sort_values(["interacts", "order", "factor", "with_factor"], kind="stable")
    return out[columns].reset_index(drop=True)
