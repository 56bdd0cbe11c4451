"""The candidates that a sweep will confirm and what they cost, as far as that is known before it has screened them.

Which recipes are candidates is known once screening is done. Until then there is a bound: all recipes that quantize,
those that the store has of the tasks included, each on all fresh seeds at one learning rate, beside their baselines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from fp4dse.dse import Recipe, Space, recipe_from_dict
from fp4dse.dse.program.terminal import duration
from fp4dse.results import open_store
from fp4dse.results.store.remote import locate
from fp4dse.results.text.ratios import counted
from fp4dse.sweeps.planning.estimate import estimate
from fp4dse.sweeps.planning.plan import Plan
from fp4dse.sweeps.planning.setting import Tasks, find_setting
from fp4dse.sweeps.stages.confirming import FIRST_SEED, plan_confirm
from fp4dse.sweeps.sweep import plan_sweep
from fp4dse.tasks import find_facts


class Machines(msgspec.Struct, frozen=True):
    """Where the lanes are to train; fields as the arguments of `run_sweep`."""

    device: str = "cpu"
    jobs: int | None = None
    executor: str = "local"


def foresee_confirm(
    space: Space,
    screening: Plan,
    tasks: Tasks,
    store: str | Path,
    *,
    seeds: int,
    on: Machines,
    lrs: Sequence[float] | None = None,
    budget_s: float | None = None,
    timed: bool = False,
) -> str:
    """The number of candidates and what they cost, for people: of a sweep that has nothing left to screen as
    `plan_confirm` finds them, else the most that there can be.

    screening: the plan of the sweep; store: where it goes, there or not; seeds: fresh ones; lrs: of the sweep;
    timed: estimate the time, too, which trains briefly where the store knows nothing (estimate.py). ConfigError as of
    `plan_confirm`.
    """
    if not screening.left:
        opened = open_store(store, cost=space.cost)
        where = msgspec.structs.asdict(on)
        return plan_confirm(opened, tasks=tasks, seeds=seeds, budget_s=budget_s, **where).sentences()
    rates = lrs or space.lanes.lr
    most = plan_sweep(
        [*space.recipes(), *_stored(store, tasks)],
        tasks=tasks,
        seeds=range(FIRST_SEED, FIRST_SEED + seeds),
        lrs=rates[:1] if rates else None,
        **msgspec.structs.asdict(on),
    )
    recipes: dict[str, set[str]] = {}
    for job in most.jobs:
        quantizing = (lane.recipe.config_id for lane in job.lanes if not lane.recipe.is_plain)
        recipes.setdefault(f"{job.task}:{job.preset}", set()).update(quantizing)
    numbers = ", ".join(f"{len(ids)} of {task}" for task, ids in recipes.items())
    says = f"candidates are known once screening is done, at most {numbers}"
    says += f"\n{counted(seeds, 'fresh seed')} each, and BF16: at most {counted(most.left, 'lane')} to train"
    if timed:
        seconds = estimate(most, find_setting(tasks, on.device, on.jobs), store).seconds
        return f"{says}, about {duration(seconds)}"
    return f"{says}; --estimate says how long"


def _stored(store: str | Path, tasks: Tasks) -> list[Recipe]:
    """The recipes that a store has of the tasks: they may be candidates, too."""
    if not (locate(store) / "store.json").exists():
        return []
    opened = open_store(store)
    rows = opened.runs(["task", "preset", "config_id"])
    asked = {(task.name, task.preset) for task in (find_facts(*one) for one in tasks)}
    here = [of in asked for of in rows[["task", "preset"]].itertuples(index=False, name=None)]
    texts = opened.recipe_texts(list(rows.loc[here, "config_id"].unique()))
    return [recipe_from_dict(msgspec.json.decode(text)) for text in texts.values()]
