"""The choice of learning rates in a setting, in words: where they are from (`lr_source`), and what to beware of.

A class of recipes may have a rate that was tuned on other seeds, or the preset's, which nobody tuned for it; --lr and
spaces give the same rates to all. Sentences say no more than the rows do: "one learning rate for all" is said where
every recipe and BF16 had that one and no other, and nobody tuned it for them.
"""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd

from fp4dse.results.stats.learning_rates import TUNED
from fp4dse.results.text.ratios import counted

PRESET, GIVEN = "preset", "given"
"""Of lr_source: the preset's, which nobody tuned for the class, and --lr or the space's."""


class Rates(NamedTuple):
    """The choice of learning rates in a setting."""

    rates: tuple[float, ...]
    """Rates that most recipes were tried at, the lowest first."""
    alike: bool
    """Every recipe and BF16 was tried at these and no others."""
    sources: frozenset[str]
    """lr_source of the recipes and BF16; rows of before there was that column count as given."""
    untuned: int
    """Recipes at the preset's rate, which nobody tuned for their class."""
    pick_untuned: bool
    """The recipe to use is one of them."""
    baseline_untuned: bool
    at_others: int
    """Recipes that were given other rates than most."""
    at_edge: int
    """Recipes whose best rate is the lowest or highest of several: a better one may lie outside."""
    pick_at_edge: bool
    baseline_at_edge: bool

    def sentence(self) -> str:
        """For people; without a full stop."""
        rates = ", ".join(f"{rate:g}" for rate in self.rates)
        untuned = f"; {self._untuned()}" if self.untuned or self.baseline_untuned else ""
        if self.sources == {"searched"}:
            return "each recipe at a learning rate of its own, which was searched on other seeds"
        if self.sources & {*TUNED} and GIVEN in self.sources:
            return f"learning rates that were tuned on other seeds for some, and given for others ({rates}){untuned}"
        if self.sources & {*TUNED}:
            return f"learning rates that were tuned on other seeds, each class of recipes at its own{untuned}"
        if len(self.rates) == 1:
            searched = "it is the preset's, which nobody tuned" if self.sources == {PRESET} else "none was searched"
            return f"one learning rate for {'all' if self.alike else 'most'} recipes ({rates}); {searched}"
        who = "each recipe" if self.alike else "most recipes"
        return f"{who} at the best of {len(self.rates)} learning rates ({rates})"

    def warnings(self) -> tuple[str, ...]:
        """Warnings about the choice, one sentence each, without a full stop."""
        says = []
        if self.alike and len(self.rates) == 1 and self.sources <= {GIVEN, PRESET}:
            fix = "--tune finds one for each" if PRESET in self.sources else "--lr takes several"
            whose = ", the preset's, which nobody tuned" if self.sources == {PRESET} else ""
            says.append(
                f"one learning rate ({self.rates[0]:g}) for all{whose}: a recipe or BF16 that needs another one looks "
                f"worse than it is; {fix}"
            )
        elif self.untuned or self.baseline_untuned:
            says.append(f"{self._untuned()}: at a better one the loss may be lower; --tune finds one for each recipe")
        if self.pick_at_edge or self.baseline_at_edge:
            who = " and ".join(
                name for name, so in (("this recipe", self.pick_at_edge), ("BF16", self.baseline_at_edge)) if so
            )
            says.append(f"the best learning rate of {who} is at the edge of the grid: a better one may lie outside")
        elif self.at_edge:
            says.append(f"the best learning rate of {counted(self.at_edge, 'recipe')} is at the edge of the grid")
        if self.at_others:
            had = "had other learning rates than the rest"
            says.append(f"{counted(self.at_others, 'recipe')} {had}: not a fair comparison")
        return tuple(says)

    def _untuned(self) -> str:
        """`BF16 and 3 recipes, this one among them, had the preset's learning rate, …`; somebody must have."""
        who = ["BF16"] if self.baseline_untuned else []
        if self.untuned == 1 and self.pick_untuned:
            who.append("this recipe")
        elif self.untuned:
            who.append(f"{counted(self.untuned, 'recipe')}{', this one among them,' if self.pick_untuned else ''}")
        whose = "its class" if self.untuned + self.baseline_untuned == 1 else "their classes"
        return f"{' and '.join(who)} had the preset's learning rate, which nobody tuned for {whose}"


def rates_of(lines: pd.DataFrame, pick: str | None) -> Rates:
    """The choice in the lines of `learning_rates` of one setting. pick: config_id of the recipe to use, if any."""
    source = lines["source"].astype(object).where(lines["source"].notna(), GIVEN)
    same, base = lines["same_grid"].astype(bool), lines["is_baseline"].astype(bool)
    picked, edge, untuned = lines["config_id"].eq(pick), lines["at_edge"].astype(bool), source.eq(PRESET)
    usual = lines.loc[same & ~source.isin(TUNED), "grid"]
    usual = usual if len(usual) else lines["grid"]
    return Rates(
        rates=tuple(float(text) for text in usual.iloc[0].split(", ")) if len(usual) else (),
        alike=lines["grid"].nunique() == 1,
        sources=frozenset(source),
        untuned=int((untuned & ~base).sum()),
        pick_untuned=bool((untuned & picked).any()),
        baseline_untuned=bool((untuned & base).any()),
        at_others=int((~same & ~untuned).sum()),
        at_edge=int((edge & ~base).sum()),
        pick_at_edge=bool((edge & picked).any()),
        baseline_at_edge=bool((edge & base).any()),
    )
