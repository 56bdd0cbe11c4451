"""Reasons why rows cannot support the statistics over sizes and against published tables, and the command that helps.

An answer without lines does not say whether nothing was found or nothing could be: these functions do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from fp4dse.results.published import Table, tables
from fp4dse.results.stats.paired import SETTING
from fp4dse.results.stats.sizes.loss_law import why_no_law
from fp4dse.results.stats.sizes.points import sizes

SMALL = ("language:tiny", "language:small")
"""The cheapest presets of two sizes: they share their data."""
FOR_A_LAW = ("language:0.4M", "language:1M", "language:3M", "language:10M", "language:10M-long")
"""Presets that determine a law of the loss: they share their data, but not the number of tokens a parameter."""


def sizes_lacking(runs: pd.DataFrame, store: str) -> str:
    """Empty where a law of BF16's loss can be fitted for some task with recipes beside it, else what is missing and the
    command that trains it. runs: as `sizes` reads them; store: as --store names it."""
    known = {"parameters", "tokens"} <= set(runs)
    sized = runs[runs["parameters"].gt(0) & runs["tokens"].gt(0)] if known else runs[:0]
    if sized.empty:
        sweep = f"`{_sweep(store, SMALL)}` gives exponents, and {len(FOR_A_LAW)} presets, {_listed(FOR_A_LAW)}, a law"
        return f"no row states parameters and tokens, as those of language tasks do; {sweep}"
    here = _presets(sized)
    found = [one for one in sizes(sized, resamples=1) if one.recipes.config_id]
    if not found:
        return f"no recipe finished beside BF16 at any size; `{_sweep(store, here)}` tries the failed ones again"
    if not all(map(why_no_law, found)):
        return ""
    most = max(found, key=lambda one: len(one.presets))
    return f"{why_no_law(most)}; `{_sweep(store, _others(here))}` trains others"


def recipes_lacking(runs: pd.DataFrame, store: str, least: int = 1) -> str:
    """Empty where a setting has gaps of `least` recipes of one group of a published table; else how many recipes each
    table has here, and the command that trains them. runs: with a gap; store: as --store names it."""
    able = runs[np.isfinite(runs["gap"].astype(float)) & ~runs["is_baseline"].astype(bool)]
    settings = [set(part["config_id"]) for _, part in able.groupby(list(SETTING), observed=True)]
    groups = {name: _groups(table) for name, table in tables().items()}
    if any(len(group & there) >= least for of in groups.values() for group in of for there in settings):
        return ""
    counts = []
    for name, of in groups.items():
        schemes = set().union(*of)
        most = max((len(schemes & there) for there in settings), default=0)
        counts.append(f"{most} of the {len(schemes)} of {name}")
    wanted = "no recipe" if least == 1 else f"no {least} recipes of one group"
    spaces = " and ".join(dict.fromkeys(table.space for table in tables().values() if table.space))
    command = _sweep(store, _presets(runs)[:1] or SMALL[-1:], spaces)
    return f"{wanted} of a published table with a gap here ({', '.join(counts)}); `{command}` trains those of {spaces}"


def _groups(table: Table) -> list[set[str]]:
    """The config_ids of the schemes of each group."""
    expressible = [(scheme.group, scheme.recipe) for scheme in table.schemes.values() if scheme.recipe is not None]
    return [{recipe for of, recipe in expressible if of == group} for group in table.groups()]


def _presets(runs: pd.DataFrame) -> list[str]:
    return sorted((runs["task"].astype(str) + ":" + runs["preset"].astype(str)).unique())


def _others(here: Iterable[str]) -> Sequence[str]:
    """Presets on the data of those that there are; those of a law if they are all there or none is known."""
    for family in (FOR_A_LAW, SMALL):
        left = [preset for preset in family if preset not in here]
        if 0 < len(left) < len(family):
            return left
    return FOR_A_LAW


def _sweep(store: str, presets: Sequence[str], space: str = "SPACE") -> str:
    return f"fp4dse sweep {space} {' '.join(f'--task {preset}' for preset in presets)} --seeds 3 --store {store}"


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}"
