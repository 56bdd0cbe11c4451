"""Columns that may be an overhead axis, and figures on it that may be compared."""

from __future__ import annotations

import pandas as pd

from fp4dse.dse import ConfigError, StoreError
from fp4dse.dse.cost import OVERHEAD_OF
from fp4dse.results.stats.paired import MEASURED, OVERHEAD


def check_overhead(runs: pd.DataFrame, overhead: str) -> None:
    """ConfigError unless `overhead` is a column of numbers, and all of one kind if it was measured."""
    types = pd.api.types
    if overhead not in runs or not types.is_numeric_dtype(runs[overhead]) or types.is_bool_dtype(runs[overhead]):
        numeric = [name for name in runs if types.is_numeric_dtype(runs[name])]
        raise ConfigError("overhead", overhead, f"a column of numbers: {', '.join(map(str, numeric))}")
    if overhead == MEASURED[0] and MEASURED[1] in runs and runs[MEASURED[1]].nunique() > 1:
        found = "; ".join(sorted(runs[MEASURED[1]].dropna().unique()))
        raise ConfigError("overhead", overhead, f"figures of one model on one device; these rows have: {found}")


def on_one_scale(rows: pd.DataFrame, overhead: str) -> pd.Series:
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
