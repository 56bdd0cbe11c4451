"""What a sweep has to train: recipes × learning rates × seeds per task, less what the store has, cut into jobs.

A lane that is stored is never trained twice. The BF16 baseline of every task, learning rate and seed is always part
of a sweep, because every result is a gap to it; seeds are paired, so all recipes get the same list.

Lanes of equal (task, preset, structural signature) train in lock-step, so a job takes lanes of one such population.
Lanes in company are cheaper than alone and a job that dies loses all its lanes, so jobs are few but not huge: see
`job_size`.
Everything here is deterministic: the same question gives the same jobs in the same order.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from fp4dse.dse import SLOTS, ConfigError, Recipe, Space
from fp4dse.dse.cost import overhead
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.space import Count
from fp4dse.tasks.job import Job, Lane, Rung

if TYPE_CHECKING:
    from fp4dse.tasks import Task

BASELINE = "bf16"
"""Name of the recipe that gaps are measured against."""

JOB_LANES = {"cpu": (16, 64), "cuda": (64, 512)}
"""Fewest and most lanes that `job_size` aims at. A population that is smaller is one job."""


class Plan(msgspec.Struct, frozen=True):
    """`jobs` in the order in which they start. `asked` lanes make up the sweep; `stored` of them are there already."""

    asked: int
    stored: int
    recipes: int
    populations: int
    jobs: list[Job]

    @property
    def left(self) -> int:
        return sum(len(job.lanes) for job in self.jobs)

    def facts(self) -> dict:
        """For people and scripts: the counts, and lanes per job in the order of start."""
        counts = {"recipes": self.recipes, "lanes": self.asked, "stored": self.stored, "to_train": self.left}
        jobs = [f"{job.task}:{job.preset} × {len(job.lanes)}" for job in self.jobs]
        return {**counts, "populations": self.populations, "jobs": jobs}


def plan(
    recipes: Iterable[Recipe],
    tasks: Sequence[Task],
    *,
    seeds: Sequence[int],
    lrs: Sequence[float] | None,
    is_stored: Callable[[Task, Lane], bool],
    device: str = "cpu",
    threads: int = 1,
    workers: int = 1,
    max_lanes: int | None = None,
    rungs: Callable[[Task], list[Rung]] = lambda _: [],
) -> Plan:
    """Cut what is missing into jobs. `lrs = None`: each task's own learning rate. ConfigError on invalid recipes.

    `rungs` of a task are those of its jobs, but for the baseline's, which is what all others are compared with.
    """
    configs = _with_baseline(recipes)
    asked = 0
    populations: dict[tuple, list[tuple[bool, int, Lane]]] = {}
    for order, recipe in enumerate(configs):
        signature, random = recipe.signature(), uses_random_bits(recipe)
        for task in tasks:
            for lane in _lanes(recipe, lrs or [task.lr], seeds):
                asked += 1
                if not is_stored(task, lane):
                    key = (task.name, task.preset, order == 0, signature)
                    populations.setdefault(key, []).append((random, order, lane))
    left = sum(len(members) for members in populations.values())
    size = max_lanes or job_size(left, device, workers)
    of = {(task.name, task.preset): task for task in tasks}
    halving = {(task.name, task.preset): rungs(task) for task in tasks}
    jobs: list[tuple[bool, int, int, Job]] = []
    for (name, preset, baseline, _), members in populations.items():
        members.sort(key=lambda member: member[:2])  # random bits cost time: keep recipes without them together
        for part in split([lane for *_, lane in members], size):
            task = of[name, preset]
            rungs_of = [] if baseline else halving[name, preset]
            job = Job(
                task=name,
                preset=preset,
                lanes=part,
                device=device,
                threads=threads,
                rungs=rungs_of,
                overheads=[overhead(lane.recipe) for lane in part] if rungs_of else [],
                origin=task.origin,
                digest=task.digest if task.origin else "",
            )
            jobs.append((not baseline, -len(part) * task.steps, len(jobs), job))
    jobs.sort(key=lambda entry: entry[:3])  # baselines first: gaps can then be shown; long jobs next
    return Plan(
        asked=asked,
        stored=asked - left,
        recipes=len(configs),
        populations=len(populations),
        jobs=[job for *_, job in jobs],
    )


def count_space(space: Space, count: Count | None = None) -> dict:
    """What enumerating a space meets: raw product, merged as equivalent, rejected by rule, left, populations. `count`
    is filled in on the way."""
    count = count or Count()
    populations = {recipe.signature() for recipe in space.recipes(count)}
    met = {name: getattr(count, name) for name in ("raw", "merged", "rejected", "left")}
    return {"space": space.name, **met, "populations": len(populations)}


def job_size(lanes: int, device: str, workers: int) -> int:
    """Most lanes in a job: a worker's share of what is left, within the bounds of `JOB_LANES`."""
    fewest, most = JOB_LANES[device]
    return min(max(math.ceil(lanes / workers), fewest), most)


def split(lanes: list[Lane], size: int) -> list[list[Lane]]:
    """Consecutive parts of at most `size` lanes that differ in length by one at most."""
    parts = math.ceil(len(lanes) / size)
    cuts = [len(lanes) * i // parts for i in range(parts + 1)]
    return [lanes[a:b] for a, b in itertools.pairwise(cuts)]


def uses_random_bits(recipe: Recipe) -> bool:
    """True where some slot rounds stochastically."""
    return any(isinstance(recipe.slot(slot).rounding, Stochastic) for slot in SLOTS)


def _with_baseline(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Canonical and distinct, the baseline first."""
    configs = {Recipe.named(BASELINE).canonical(): None}
    for recipe in recipes:
        for rule, reason in recipe.validate():
            raise ConfigError(f"recipe {recipe.label()}", rule, f"recipes that keep this rule: {reason}")
        configs[recipe.canonical()] = None
    return list(configs)


def _lanes(recipe: Recipe, lrs: Sequence[float], seeds: Sequence[int]) -> Iterator[Lane]:
    for lr in lrs:
        for seed in seeds:
            yield Lane(recipe=recipe, lr=lr, seed=seed)
