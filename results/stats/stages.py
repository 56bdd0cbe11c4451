"""The stages of a store's rows: screened ones say who is a candidate, fresh ones say how good the candidates are.

The luckiest of many is chosen from screened rows, so those are what flatters it; fresh seeds of the candidates do not
know of that choice. Every statistic is of screened rows alone, as fresh ones exist for the best recipes only; that of
fresh rows is confirmed.py.
"""

from __future__ import annotations

import pandas as pd

STAGE = "stage"
"""The column; null in screened rows."""
CONFIRM = "confirm"


def screened(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows that were trained to choose from; all of them where the column is missing."""
    if STAGE not in runs or not (added := runs[STAGE].notna()).any():
        return runs
    return runs[~added]


def fresh(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of the confirm stage, without the column: to other statistics a study of its own."""
    if STAGE not in runs:
        return runs.iloc[:0]
    return runs[runs[STAGE].notna()].drop(columns=STAGE)
