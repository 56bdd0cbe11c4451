"""The share of recipes that diverged, for each level of each factor and each pair of levels.

A recipe counts as diverged if one of its seeds did, at its best learning rate.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd

from fp4dse.results.stats.factors import Factor
from fp4dse.results.stats.paired import SETTING, stacked
from fp4dse.results.stats.techniques.contrasts import Lines, as_frame
from fp4dse.results.stats.techniques.factor_tables import FactorTable, Tables, factor_tables

COLUMNS = [*SETTING, "factor", "level", "with_factor", "with_level", "recipes", "blown", "diverged"]


def divergence(runs: pd.DataFrame, tables: Tables | None = None) -> pd.DataFrame:
    """One line per SETTING and level (with_factor and with_level null) or pair of levels that some recipe has.

    Columns: SETTING, factor, level, with_factor, with_level, recipes (that quantize and have it), blown (how many of
    them diverged), diverged (their share). Factors in the order of the recipe's columns. tables: of `factor_tables`, if
    they are at hand.
    """
    parts = []
    for keys, table in factor_tables(runs) if tables is None else tables:
        alone_and_pairs = [*combinations(table.factors, 1), *combinations(table.factors, 2)]
        if alone_and_pairs:
            lines = as_frame([_counted(table, chosen) for chosen in alone_and_pairs])
            parts.append(lines.assign(**dict(zip(SETTING, keys, strict=True))))
    return stacked(parts, COLUMNS)


def _counted(table: FactorTable, chosen: tuple[Factor, ...]) -> Lines:
    sizes = [len(f.levels) for f in chosen]
    cell = np.ravel_multi_index([f.codes for f in chosen], sizes)
    recipes = np.bincount(cell, minlength=int(np.prod(sizes)))
    diverged = np.bincount(cell[table.diverged], minlength=len(recipes))
    here = np.flatnonzero(recipes)
    indices = np.unravel_index(here, sizes)
    out: Lines = {"recipes": recipes[here], "blown": diverged[here], "diverged": diverged[here] / recipes[here]}
    out |= {"with_factor": None, "with_level": None}
    for prefix, f, codes in zip(("", "with_"), chosen, indices, strict=False):
        out |= {f"{prefix}factor": f.name, f"{prefix}level": [f.levels[i] for i in codes]}
    return out
