"""The recipes of each setting in the order in which they may be recommended, and all held against the first of them.

The first is expected to take the least time to BF16's loss, which is to have the lowest loss at equal time
(equal_time.py), of those that save time against BF16 if any does; where nothing tells what time is worth, or no gap is
in reach of more tokens, it has the lowest loss. Expected is what the posterior of shrinkage.py says (front_chance.py):
a recipe that is chosen by that is nearer to the best than the one of the lowest mean, which may be lucky.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.stats.factors import VariedBySetting, varied_by
from fp4dse.results.stats.paired import OVERHEAD, SETTING, bf16_cost, rows_at_best_lr
from fp4dse.results.stats.recipes.equal_time import at_equal_time, ranking, slope_of
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.recipes.front_chance import chance_of
from fp4dse.results.stats.recipes.margins import Margin, margin_of
from fp4dse.results.stats.recipes.pareto import LEAST_SAVING, worth_naming
from fp4dse.results.stats.recipes.summary import summarize

CHANCE = ["p_front", "expected", "expected_low", "expected_high"]
"""The columns that `front_chance` adds."""


def with_chance(recipes: pd.DataFrame, chance: pd.DataFrame) -> pd.DataFrame:
    """The lines of `summarize` with CHANCE of `front_chance`, NaN for those that do not compete."""
    keys = [*SETTING, "config_id"]
    return recipes.merge(chance[[*keys, *CHANCE]], how="left", on=keys)


@dataclass(frozen=True)
class Ranked:
    """The recipes of one setting, those that may be recommended in their order."""

    lines: pd.DataFrame
    """Of `with_chance`."""
    rows: pd.DataFrame
    """Of `rows_at_best_lr`."""

    @cached_property
    def margin(self) -> Margin:
        return margin_of(self.rows)

    @cached_property
    def tried(self) -> pd.DataFrame:
        return self.lines[~self.lines["is_baseline"]]

    @cached_property
    def finite(self) -> pd.DataFrame:
        """Those that quantize and have a gap."""
        found = self.tried[self.tried["points"].gt(0) & np.isfinite(self.tried["gap"].astype(float))]
        return found.assign(expected=found["expected"].fillna(found["gap"]).astype(float))

    @cached_property
    def named(self) -> NDArray[np.bool_]:
        """[finite]: those that may be recommended."""
        return worth_naming(self.finite[OVERHEAD], self.finite["seeds"], bf16_cost(self.rows))

    @cached_property
    def slope(self) -> float:
        """The worth of tokens by which recipes are ranked; NaN where they are ranked by their gaps."""
        able = self.finite[self.named]
        return ranking(able["expected"], able[OVERHEAD], slope_of(self.margin))[1]

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """Those that may be recommended, the first of them is."""
        return self._by_rank(self.finite[self.named])

    def slower(self) -> int:
        """The number of those that save no time, and would be ranked before the first that does."""
        if self.ranked.empty or not self.ranked[OVERHEAD].iloc[0] <= 1 - LEAST_SAVING:
            return 0
        often = self.finite[self.finite["seeds"].ge(min(2, self.finite["seeds"].max()))]
        before = self._by_rank(often)["rank"].lt(self.ranked["rank"].iloc[0])
        return int((before & often[OVERHEAD].gt(1 - LEAST_SAVING)).sum())

    def _by_rank(self, lines: pd.DataFrame) -> pd.DataFrame:
        rank, _ = ranking(lines["expected"], lines[OVERHEAD], self.slope)
        return lines.assign(rank=rank).sort_values(["rank", OVERHEAD], kind="stable")


def settings_of(rows: pd.DataFrame, recipes: pd.DataFrame) -> dict[tuple[Any, ...], Ranked]:
    """By SETTING, in the order of `recipes`. rows: of `rows_at_best_lr`; recipes: of `with_chance`."""
    parts = dict(iter(rows.groupby(list(SETTING), sort=False, observed=True)))
    settings = recipes.groupby(list(SETTING), sort=False)
    return {setting: Ranked(lines, parts.get(setting, rows.iloc[:0])) for setting, lines in settings}


def versus_first(
    rows: pd.DataFrame, each: Mapping[tuple[Any, ...], Ranked], varied: VariedBySetting | None = None
) -> pd.DataFrame:
    """The lines of `against` the first of each setting, at equal time where it was chosen by that."""
    picks = {setting: one.ranked["config_id"].iloc[0] for setting, one in each.items() if len(one.ranked)}
    slopes = pd.Series({one.rows["setting"].iloc[0]: one.slope for one in each.values()}, dtype=float)
    return against(at_equal_time(rows, slopes), picks, varied=varied)


def versus_soonest(runs: pd.DataFrame) -> pd.DataFrame:
    """Every recipe against the one to use: a line per SETTING and recipe, with the columns of `against`, of the
    differences that there would be at equal time (where `ranked_by` is `time`), and ranked_by (`time`, or `loss` where
    nothing tells what time is worth, or no recipe is in reach of BF16's loss). A setting without a recipe to use has
    none."""
    rows = rows_at_best_lr(runs)
    recipes = summarize(rows)
    varied = varied_by(rows)
    each = settings_of(rows, with_chance(recipes, chance_of(rows, recipes, varied=varied)))
    by = {setting: "loss" if np.isnan(one.slope) else "time" for setting, one in each.items()}
    lines = versus_first(rows, each, varied)
    ranked_by = [by[setting] for setting in lines[list(SETTING)].itertuples(index=False, name=None)]
    return lines.assign(ranked_by=pd.Series(ranked_by, lines.index, dtype=object))
