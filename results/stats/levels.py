"""Numbers whose differences are gaps: logarithms of losses, or the losses themselves where they are shares.

A task says which by its `gap_unit`, a column of its rows: `points`, where the loss is the share of what is wrong and a
gap is in hundredths of accuracy; null, where a gap is the logarithm of a ratio.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

POINTS = "points"
"""The gap_unit of losses that are shares."""


def are_shares(rows: pd.DataFrame) -> NDArray[np.bool_]:
    """True for rows whose losses are compared in points."""
    known = rows["gap_unit"] if "gap_unit" in rows else pd.Series(None, rows.index, dtype=object)
    return np.asarray(known.eq(POINTS).to_numpy(bool, na_value=False))


def units(rows: pd.DataFrame) -> dict[tuple[str, str], str]:
    """(task, preset) -> `points`, of those whose gaps are in points."""
    found = rows.loc[are_shares(rows), ["task", "preset"]].drop_duplicates()
    return {(str(task), str(preset)): POINTS for task, preset in found.itertuples(index=False)}


def levels(losses: object, shares: object) -> NDArray[np.float64]:
    """Numbers whose differences are gaps: the logarithm of a loss, or the loss itself where `shares` is true."""
    losses = np.asarray(losses, float)
    return np.where(np.asarray(shares, bool), losses, log_or_nan(losses))


def log_or_nan(values: object) -> NDArray[np.float64]:
    """Natural logarithm, NaN where a value is not positive."""
    values = np.asarray(values, float)
    return np.log(np.where(values > 0, values, np.nan))
