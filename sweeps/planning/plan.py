"""Plans a sweep: recipes × learning rates × seeds per task, less what the store has, cut into jobs.

A lane that is stored is never trained twice. The BF16 baselines of every task, learning rate and seed are always part
of a sweep, because every result is a gap to one: plain BF16, and BF16 under the training side of each recipe that
changes it (`Recipe.baseline`). Seeds are paired, so all recipes get the same list.

Lanes of equal (task, preset, structural signature) train in lock-step, so a job takes lanes of one such population.
Lanes that train together are cheaper than alone, and a job that dies loses all its lanes, so jobs are few but not huge,
and shorter towards the end: see `cut`.
Everything here is deterministic: the same question gives the same jobs in the same order.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from fp4dse.dse import SLOTS, ConfigError, Recipe, Space
from fp4dse.dse.cost import DEFAULT_COST, CostTarget
from fp4dse.dse.layers.rule import check_places, idle_rules
from fp4dse.dse.record import unlabelled
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.space.space import Count
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.tasks.experience import check_rollout
from fp4dse.tasks.facts import rate_of
from fp4dse.tasks.job import Job, Lane
from fp4dse.tasks.layers import find_layers
from fp4dse.tasks.teachable import check_distill

if TYPE_CHECKING:
    from fp4dse.tasks import TaskFacts

Rates = Callable[["TaskFacts", Recipe], Sequence[float]]
"""Learning rates of a recipe, canonical, on a task; none: it is not trained there."""


def class_rates(task: TaskFacts, recipe: Recipe) -> Sequence[float]:
    """The task's own learning rate for the recipe's class: what a recipe has where nobody gives any."""
    return [rate_of(task, recipe)]


BASELINE = "bf16"
"""Name of the recipe that gaps are measured against, where no training side is changed."""

SHARE = 0.25
"""Of what is left for each worker, what a job has at most: docs/log.md has what a simulation says of other shares."""
JOB_LANES = {"cpu": (16, 64), "cuda": (64, 512)}
"""Fewest and most lanes of a job. A population that is smaller is one."""


class Plan(msgspec.Struct, frozen=True):
    """`jobs` in the order in which they start. `asked` lanes make up the sweep; `stored` of them are there already.
    `sizes`: how many lanes a job has at most and why, by task."""

    asked: int
    stored: int
    recipes: int
    populations: int
    jobs: list[Job]
    sizes: dict[str, str] = {}

    @property
    def left(self) -> int:
        return sum(len(job.lanes) for job in self.jobs)

    def facts(self) -> dict[str, Any]:
        """For people and scripts: the counts, and lanes per job in the order of start."""
        counts = {"recipes": self.recipes, "lanes": self.asked, "stored": self.stored, "to_train": self.left}
        jobs = [f"{job.task}:{job.preset} × {len(job.lanes)}" for job in self.jobs]
        return {**counts, "populations": self.populations, "lanes_per_job": self.sizes, "jobs": jobs}


def plan(
    recipes: Iterable[Recipe],
    tasks: Sequence[TaskFacts],
    *,
    seeds: Sequence[int],
    lrs: Sequence[float] | Rates | None,
    is_stored: Callable[..., bool],
    machine: Machine,
    sizes: Mapping[tuple[str, str], int] = {},
    halving: Halving | None = None,
    cost: CostTarget = DEFAULT_COST,
) -> Plan:
    """Cut what is missing into jobs. `lrs = None`: the task's learning rate for the recipe's class. ConfigError on
    invalid recipes, and on rules that name layers of which a task's model has none.

    `is_stored(task, lane)` says if a lane need not be trained. Where the machine has several kinds of devices, each has
    baselines of its own, and `is_stored(task, lane, kind)` is asked of these; a kind is given by the columns of the
    environment that distinguish it. `sizes`: (task, preset) -> most lanes of a job, where it is known (job_sizes.py).

    Jobs have the rungs of `halving`, which go by the overheads of `cost`. Baselines have none: all others are compared
    with them.
    """
    configs = _with_baselines(recipes)
    _check_tasks(configs, tasks)
    device, workers = machine.device, len(machine.slots)
    known = dict.fromkeys(machine.kinds)
    kinds = [{"device_class": kind} for kind in known] if len(known) > 1 else [{}]
    asked = 0
    populations: dict[tuple[Any, ...], list[tuple[bool, list[str], int, Lane]]] = {}
    for order, recipe in enumerate(configs):
        baseline = recipe.is_baseline
        for task, (kind_number, kind) in itertools.product(tasks, enumerate(kinds if baseline else [{}])):
            rates = lrs(task, recipe) if callable(lrs) else lrs or class_rates(task, recipe)
            lanes, on = _lanes(recipe, rates, seeds), [kind] if kind else []
            asked += len(lanes)
            if missing := [lane for lane in lanes if not is_stored(task, lane, *on)]:
                key = (task.name, task.preset, baseline, kind_number, recipe.signature())
                turn = uses_random_bits(recipe), [rule.label() for rule in recipe.layers], order
                populations.setdefault(key, []).extend((*turn, lane) for lane in missing)
    left = sum(len(members) for members in populations.values())
    of = {(task.name, task.preset): task for task in tasks}
    rungs = {(task.name, task.preset): halving.rungs(task.steps) if halving else [] for task in tasks}
    pieces = []
    for (name, preset, baseline, *_), members in populations.items():
        # random bits cost time, and so does gathering lanes of a layer that compute alike: keep both together
        members.sort(key=lambda member: member[:3])
        most = sizes.get((name, preset)) or JOB_LANES[device][1]
        fewest = min(JOB_LANES[device][0], most)
        if rungs[name, preset]:  # lanes are ranked within their job: more lanes are worth more than a short end
            fewest = min(max(math.ceil(left / workers), fewest), most)
        pieces.append(Piece(baseline, [lane for *_, lane in members], of[name, preset].steps, fewest, most))
    keys = list(populations)
    jobs: list[tuple[int, int, int, Job]] = []
    for number, part in cut(pieces, workers):
        name, preset, baseline, kind_number, _ = keys[number]
        task = of[name, preset]
        rungs_of = [] if baseline else rungs[name, preset]
        job = Job(
            task=name,
            preset=preset,
            lanes=part,
            device=device,
            threads=machine.threads,
            rungs=rungs_of,
            overheads=[cost.overhead(lane.recipe) for lane in part] if rungs_of else [],
            origin=task.origin,
            digest=task.digest if task.origin else "",
            only_on=kinds[kind_number] if baseline else {},
        )
        jobs.append((job.turn, -len(part) * task.steps, len(jobs), job))
    jobs.sort(key=lambda entry: entry[:3])  # of a turn, long jobs first
    return Plan(
        asked=asked,
        stored=asked - left,
        recipes=len(configs),
        populations=len(populations),
        jobs=[job for *_, job in jobs],
    )


def count_space(space: Space, count: Count | None = None) -> dict[str, Any]:
    """Counts of the recipes of a space: raw product, merged as equivalent, rejected by rule, left, populations. `count`
    is filled in on the way."""
    count = count or Count()
    populations = {recipe.signature() for recipe in space.recipes(count)}
    met = {name: getattr(count, name) for name in ("raw", "merged", "rejected", "left")}
    return {"space": space.name, **met, "populations": len(populations)}


def checked_cost(space: Space | Sequence[Recipe]) -> CostTarget:
    """The model and the chip that overheads are of. ConfigError if the rules of a space leave no recipe, with what they
    reject."""
    if not isinstance(space, Space):
        return DEFAULT_COST
    if next(iter(space.recipes(count := Count())), None) is None:
        why = ", ".join(f"{number} rejected: {reason}" for reason, number in count.rejected.items())
        raise ConfigError("space", space.name, f"a space whose rules leave something ({why})")
    cost: CostTarget = space.cost
    return cost


class Piece(msgspec.Struct):
    """Lanes of one population that are not in a job yet. They take `steps` steps, in jobs of `fewest` to `most`."""

    baseline: bool
    lanes: list[Lane]
    steps: int
    fewest: int
    most: int

    @property
    def work(self) -> int:
        return len(self.lanes) * self.steps


def cut(populations: Sequence[Piece], workers: int) -> Iterator[tuple[int, list[Lane]]]:
    """Jobs as (number of the population, lanes), in the order in which they are to start but for their length.

    A job has at most `SHARE` of a worker's share of what is left, so that jobs become shorter towards the end and
    workers end at about the same time (guided self-scheduling). `fewest` and `most` go before, and a single worker has
    nobody to wait for.
    """
    left = sum(piece.work for piece in populations)
    heap = [(not piece.baseline, -piece.work, number, piece.lanes) for number, piece in enumerate(populations)]
    heapq.heapify(heap)
    while heap:
        rest, _, number, lanes = heapq.heappop(heap)
        piece, n = populations[number], len(lanes)
        share = max(1.0, left * SHARE / workers / piece.steps if workers > 1 else n)
        parts = max(math.ceil(n / piece.most), min(math.ceil(n / share), n // piece.fewest), 1)
        size = math.ceil(n / parts)
        yield number, lanes[:size]
        left -= size * piece.steps
        if size < n:
            heapq.heappush(heap, (rest, -(n - size) * piece.steps, number, lanes[size:]))


def uses_random_bits(recipe: Recipe) -> bool:
    """True where some slot rounds stochastically."""
    return any(isinstance(recipe.slot(slot).rounding, Stochastic) for slot in SLOTS)


def _with_baselines(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Canonical and distinct, the baselines first, of them plain BF16."""
    configs: dict[Recipe, Recipe] = {}
    for recipe in recipes:
        for rule, reason in recipe.validate():
            raise ConfigError(f"recipe {recipe.label()}", rule, f"recipes that keep this rule: {reason}")
        canonical = recipe.canonical()
        configs.setdefault(unlabelled(canonical), canonical)
    asked = list(configs.values())
    found = [Recipe.named(BASELINE).canonical(), *(recipe.baseline() for recipe in asked), *asked]
    return sorted(dict.fromkeys(found), key=lambda recipe: not recipe.is_baseline)


def _check_tasks(recipes: Iterable[Recipe], tasks: Iterable[TaskFacts]) -> None:
    """ConfigError for a rollout or a teacher with a task that has none, and for a rule that means no layer: with names
    or blocks of one task's model, with kinds and the ends alone of any task's. Models that are too large to be looked
    at here are checked when they are built."""
    recipes, tasks = list(recipes), list(tasks)
    for recipe, task in itertools.product(recipes, tasks):
        check_rollout(recipe, task)
        check_distill(recipe, task)
    ruled = [recipe for recipe in recipes if recipe.layers]
    if not ruled:
        return
    found = [(task, find_layers(*(task.origin or (task.name, task.preset)))) for task in tasks]
    places = [(task, [layer.place for layer in layers]) for task, layers in found if layers]
    every = [place for _, of_task in places for place in of_task]
    for recipe in ruled:
        idle = idle_rules(recipe.layers, every) if len(places) == len(found) else ()
        used = [rule for rule in recipe.layers if rule not in idle]
        for task, of_task in places:
            if (error := check_places(recipe.layers, of_task, used)) is not None:
                where = f"{task.name}:{task.preset}, recipe {recipe.label()}, {error.where}"
                raise ConfigError(where, error.found, error.accepted, error.also)


def _lanes(recipe: Recipe, lrs: Sequence[float], seeds: Sequence[int]) -> list[Lane]:
    """One a rate and seed; where nothing is trained, all rates are one."""
    lrs = lrs[:1] if recipe.training.trains == "none" else lrs
    return [Lane(recipe=recipe, lr=lr, seed=seed) for lr in lrs for seed in seeds]
