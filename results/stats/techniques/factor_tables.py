"""The recipes of each setting as codes of factors beside log losses: what statistics of techniques are computed from.

A table holds the recipes that quantize, at their best learning rates. Where several statistics are asked of the same
rows, the tables are made once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.factors import Factor, VariedBySetting, varied_by
from fp4dse.results.stats.paired import SETTING, by_seed, rows_at_best_lr

Response = Literal["gap", "rank"]


class FactorTable(NamedTuple):
    """One setting as factors and responses. All arrays [recipes, …] in the same order."""

    config_ids: pd.Index
    y: NDArray[np.float64]
    """[recipes, seeds]: log loss (NaN where lacking, a whole row NaN where diverged) or rank."""
    diverged: NDArray[np.bool_]
    factors: list[Factor]
    """Those that differ among these recipes."""
    baseline: float
    """Mean log loss of BF16 over the seeds; 0 for ranks, NaN where there is none."""


Tables = Iterable[tuple[tuple[Any, ...], FactorTable]]
"""Values of SETTING, and a setting's recipes that quantize, at their best rates."""


def factor_tables(
    runs: pd.DataFrame, response: Response = "gap", varied: VariedBySetting | None = None
) -> Iterator[tuple[tuple[Any, ...], FactorTable]]:
    """The Tables of some runs. Each setting has the factors of its own recipes. varied: of `varied_by`, if it is at
    hand."""
    rows = rows_at_best_lr(runs)
    varied = varied_by(rows) if varied is None else varied
    rows = rows.loc[rows["points"].gt(0), [*SETTING, "config_id", "seed", "log_loss", "reference", "diverged"]]
    for keys, part in rows.groupby(list(SETTING), sort=False):
        ids, y = by_seed(part, part["log_loss"])
        diverged = part.groupby("config_id", sort=False)["diverged"].any().reindex(ids).to_numpy(bool)
        base = 0.0
        if response == "rank":
            has_diverged = by_seed(part, part["diverged"].astype(float))[1] == 1
            y = pd.DataFrame(np.where(has_diverged, np.inf, y)).rank(pct=True).to_numpy()
        else:
            y[diverged] = np.nan
            base = float(np.mean(part.drop_duplicates("seed")["reference"]))
        places = varied[keys].recipes.get_indexer(ids)
        factors = [f._replace(codes=f.codes[places]) for f in varied[keys].factors]
        yield keys, FactorTable(ids, y, diverged, factors, base)
