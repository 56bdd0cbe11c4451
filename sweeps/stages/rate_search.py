"""A sweep for which every recipe first finds its own learning rate, on seeds that are not reported.

Recipes of a class share a tuned rate (dse/tuning.py) wherever nobody asks for more. Here each recipe, and BF16, is
trained at FACTORS of that rate with two seeds; where the best stands at an edge the grid goes on beyond it, in ROUNDS
rounds at most. The rows say `tune` in the column `stage`, so no statistic mixes them with the sweep's own, whose rows
say `searched` in `lr_source`. The same command goes on where it was stopped.

A rate is chosen from rows of these two seeds, of this version and of the grid that is asked for: a store may have been
tuned before, on seeds that are now reported, or over rates that are now none of the grid.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse import Recipe, Space
from fp4dse.results import Store, open_store
from fp4dse.results.stats.paired import SETTING, at_best_lr, outcomes
from fp4dse.results.stats.stages import STAGE, TUNE, of_stage, screened
from fp4dse.results.store.remote import locate
from fp4dse.sweeps.jobs.rows import SHARED, task_context
from fp4dse.sweeps.planning.plan import Rates
from fp4dse.sweeps.planning.setting import Tasks, elsewhere, find_setting
from fp4dse.sweeps.sweep import SweepResult, run_sweep
from fp4dse.tasks import TaskFacts, find_facts
from fp4dse.tasks.facts import rate_of

SEEDS = (3000, 3001)
"""No sweep has these by itself, nor has the tuning of presets."""
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
ROUNDS = 3

Key = tuple[str, str, str]  # task, preset, config_id


def run_tuned_sweep(
    space: Space | Sequence[Recipe],
    *,
    tasks: Tasks,
    store: str | Path,
    lrs: Sequence[float] | None = None,
    seeds: Sequence[int] | None = None,
    budget_s: float | None = None,
    rerun: bool = False,
    **limits: Any,
) -> SweepResult:
    """Tune the learning rate of every recipe, then sweep at these rates. The result is the sweep's; if the tuning did
    not end, that of the tuning.

    lrs: the grid for all recipes, as it is; None: FACTORS of each recipe's class rate, and beyond
    Other arguments are those of `run_sweep`.
    """
    grid = _given(lrs) if lrs else _around
    opened = open_store(store) if (locate(store) / "store.json").exists() else None
    local = limits.get("executor", "local") == "local"
    setting = find_setting(tasks, limits.get("device", "cpu"), limits.get("jobs"), local)
    own = _own_seeds(opened, setting.seeds_of(space, seeds, opened, None))
    spent = 0.0
    for number in range(1 if lrs else ROUNDS):
        left = None if budget_s is None else max(budget_s - spent, 0.0)
        result = run_sweep(
            space, tasks=tasks, seeds=own, lrs=grid, store=store, stage=TUNE, budget_s=left,
            rerun=rerun and not number, **{**limits, "halving": None},
        )  # fmt: skip
        spent += result.wall_s
        if result.left or result.interrupted:
            return msgspec.structs.replace(result, stopped=f"{result.stopped}, while learning rates were tuned")
        tried = rates_tried(open_store(store), tasks, own, lrs)
        if lrs or not any(_edge(losses) for losses in tried.values()):
            break
        grid = _beyond(tried)
    chosen = {key: min(losses, key=lambda lr: (losses[lr], lr)) for key, losses in tried.items()}

    def rates(task: TaskFacts, recipe: Recipe) -> Sequence[float]:
        return [chosen.get((task.name, task.preset, recipe.config_id), rate_of(task, recipe))]

    left = None if budget_s is None else max(budget_s - spent, 0.0)
    more = {"rerun": rerun, "budget_s": left, **limits}
    found = run_sweep(space, tasks=tasks, seeds=seeds, lrs=rates, store=store, **more)
    return msgspec.structs.replace(found, wall_s=found.wall_s + spent)


def _own_seeds(store: Store | None, reported: Collection[int]) -> list[int]:
    """The first from SEEDS on that are neither reported nor screened in the store already."""
    taken = {*reported, *(screened(store.runs(["seed", STAGE]))["seed"] if store else ())}
    return list(islice((seed for seed in count(SEEDS[0]) if seed not in taken), len(SEEDS)))


def rates_tried(
    store: Store, tasks: Tasks, seeds: Collection[int] = SEEDS, lrs: Collection[float] | None = None
) -> dict[Key, dict[float, float]]:
    """Task, preset and config_id -> rate -> rank of its losses on the tuning seeds, the lowest the best. Of all kinds
    of machines together, as each lane is trained on one of them. lrs: those that count; None: all."""
    contexts = [task_context(find_facts(*asked), elsewhere("cpu")) for asked in tasks]
    rows = of_stage(store.runs([*SETTING, "config_id", "lr", "seed", "status", "val_loss", STAGE]), TUNE)
    rows = rows[rows["seed"].isin(seeds) & (rows["lr"].isin(lrs) if lrs else True)]
    found: dict[Key, dict[float, float]] = {}
    for context in contexts:
        here = rows[(rows[SHARED] == [context[name] for name in SHARED]).all(axis="columns")]
        work = outcomes(here).assign(setting=0)
        while len(work):  # the best of all, the best of the others …
            best = at_best_lr(work)
            for config_id, lr in work[best][["config_id", "lr"]].drop_duplicates().itertuples(index=False):
                ranks = found.setdefault((context["task"], context["preset"], config_id), {})
                ranks.setdefault(float(lr), float(len(ranks)))
            work = work[~best]
    return found


def _given(lrs: Sequence[float]) -> Rates:
    return lambda _task, _recipe: lrs


def _around(task: TaskFacts, recipe: Recipe) -> Sequence[float]:
    return [factor * rate_of(task, recipe) for factor in FACTORS]


def _edge(ranks: Mapping[float, float]) -> float | None:
    """The lowest or highest rate, if it is the best; None if the best lies inside."""
    best = min(ranks, key=lambda lr: ranks[lr])
    return best if best in (min(ranks), max(ranks)) else None


def _beyond(tried: Mapping[Key, Mapping[float, float]]) -> Rates:
    """The rates that were tried, and two more beyond the edge at which a recipe has its best."""

    def rates(task: TaskFacts, recipe: Recipe) -> Sequence[float]:
        ranks = tried.get((task.name, task.preset, recipe.config_id), {})
        edge = _edge(ranks) if ranks else None
        if edge is None:
            return sorted(ranks) or _around(task, recipe)
        step = 0.5 if edge == min(ranks) else 2.0
        return sorted([*ranks, edge * step, edge * step**2])

    return rates
