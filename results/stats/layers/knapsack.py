"""The units to spare within a budget: a knapsack on what sparing each of them gains."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fp4dse.results.stats.layers.study import Spend, Study

FINENESS = 10_000
"""Parts of a budget that costs are rounded up to."""


class Option(NamedTuple):
    """Something that can be taken: what it is worth, what it costs, the units that it is made of."""

    value: float
    cost: float
    units: tuple[int, ...]


def options(
    study: Study, gains: Sequence[float], spend: Spend, scopes: Mapping[str, tuple[str, ...]]
) -> list[list[Option]]:
    """For each group of layers, ways to spare them: sets of units that share no product, with a gain above zero.

    gains: of the units, NaN where nothing is known; scopes: name -> the products that it has.
    """
    groups: dict[str, list[Option]] = {}
    for number, unit in enumerate(study.units):
        here = groups.setdefault(unit.layers, [])
        if not gains[number] > 0:
            continue
        mine = set(scopes[unit.scope])
        taken = [
            other
            for other in here
            if mine.isdisjoint(stage for i in other.units for stage in scopes[study.units[i].scope])
        ]
        for other in [Option(0.0, 0.0, ()), *taken]:
            value, cost = other.value + gains[number], other.cost + unit.cost(spend)
            here.append(Option(value, cost, (*other.units, number)))
    return list(groups.values())


def best_choice(groups: Iterable[Sequence[Option]], budget: float) -> Option:
    """The most that can be had for the budget, with one option of a group at most (a knapsack, by dynamic programming
    over costs in FINENESS parts of the budget, rounded up)."""
    best = {0: Option(0.0, 0.0, ())}
    for group in groups:
        found = dict(best)
        for spent, so_far in best.items():
            for option in group:
                cost = spent + (math.ceil(option.cost / budget * FINENESS - 1e-9) if budget > 0 else option.cost > 0)
                if cost > (FINENESS if budget > 0 else 0):
                    continue
                new = Option(so_far.value + option.value, so_far.cost + option.cost, so_far.units + option.units)
                if cost not in found or new.value > found[cost].value:
                    found[cost] = new
        best, most = {}, -math.inf
        for cost in sorted(found):  # what costs more and gives less is of no use
            if found[cost].value > most:
                best[cost], most = found[cost], found[cost].value
    return max(best.values(), key=lambda option: option.value)
