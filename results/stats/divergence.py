"""The share of recipes that diverged, for each level of each factor and each pair of levels.

A recipe counts as diverged if one of its seeds did, at its best learning rate.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.stats.effects import FactorTable, factor_tables
from fp4dse.results.stats.factors import Factor
from fp4dse.results.stats.paired import SETTING, stacked

COLUMNS = [*SETTING, "factor", "level", "with_factor", "with_level", "recipes", "blown", "diverged"]


def divergence(runs: pd.DataFrame) -> pd.DataFrame:
    """One line per SETTING and level (with_factor and with_level null) or pair of levels that some recipe has.

    Columns: SETTING, factor, level, with_factor, with_level, recipes (that quantize and have it), blown (how many of
    them diverged), diverged (their share). Factors in the order of the recipe's columns.
    """
    parts: list[pd.DataFrame] = []
    for keys, table in factor_tables(runs):
        alone_and_pairs = [*combinations(table.factors, 1), *combinations(table.factors, 2)]
        parts += [_counted(table, keys, chosen) for chosen in alone_and_pairs]
    return stacked(parts, COLUMNS)


def _counted(table: FactorTable, keys: tuple[Any, ...], chosen: tuple[Factor, ...]) -> pd.DataFrame:
    sizes = [len(f.levels) for f in chosen]
    cell = np.ravel_multi_index([f.codes for f in chosen], sizes)
    recipes = np.bincount(cell, minlength=int(np.prod(sizes)))
    diverged = np.bincount(cell[table.diverged], minlength=len(recipes))
    here = np.flatnonzero(recipes)
    indices = np.unravel_index(here, sizes)
    out = pd.DataFrame(dict(zip(SETTING, keys, strict=True)), index=range(len(here)))
    out = out.assign(recipes=recipes[here], blown=diverged[here], diverged=diverged[here] / recipes[here])
    out = out.assign(with_factor=None, with_level=None)
    for prefix, f, codes in zip(("", "with_"), chosen, indices, strict=False):
        out[f"{prefix}factor"] = f.name
        out[f"{prefix}level"] = [f.levels[i] for i in codes]
    return out
