"""The stages of a store's rows: those that chose learning rates, screened ones, and fresh ones of the candidates.

What is chosen flatters itself on the rows that chose it. Learning rates are therefore chosen on seeds of their own
(`sweep --tune`), and the luckiest of many screened recipes is judged by fresh seeds, which do not know of that choice.
Every statistic is of screened rows alone; that of fresh rows is confirmed.py.
"""

from __future__ import annotations

import pandas as pd

STAGE = "stage"
"""The column; null in screened rows."""
CONFIRM, TUNE = "confirm", "tune"


def of_stage(runs: pd.DataFrame, stage: str | None) -> pd.DataFrame:
    """The rows of a stage; where the column is missing all rows are screened (None)."""
    if STAGE not in runs:
        return runs if stage is None else runs.iloc[:0]
    if stage is not None:
        return runs[runs[STAGE].eq(stage)]
    added = runs[STAGE].notna()
    return runs[~added] if added.any() else runs


def screened(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows that were trained to choose from."""
    return of_stage(runs, None)


def fresh(runs: pd.DataFrame) -> pd.DataFrame:
    """The rows of the confirm stage, without the column: to other statistics a study of its own."""
    return of_stage(runs, CONFIRM).drop(columns=STAGE, errors="ignore")
