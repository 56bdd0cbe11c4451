"""Search instead of enumeration: samplers propose recipes in batches, one sweep trains them all, the store answers.

    ask for a batch  ->  look up, or train  ->  tell

Every task has a study of its own, with batches and results of its own; the jobs of all studies run side by side on one
executor, which stays from the first batch to the last. The order of batches and results in a study does not depend on
how fast jobs are (study.py), so the same command after an interruption, and a second search with the same seed,
propose the same.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse import ConfigError, Space
from fp4dse.dse.record import unlabelled
from fp4dse.sweeps.executors import EXECUTORS
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.sweeps.planning.plan import JOB_LANES, class_rates
from fp4dse.sweeps.planning.setting import Setting
from fp4dse.sweeps.running.driver import Sweep
from fp4dse.sweeps.running.opening import Request, open_sweep
from fp4dse.sweeps.running.state import Failure
from fp4dse.sweeps.searching.answers import OBJECTIVES, Answers
from fp4dse.sweeps.searching.sampling import MOST_OPEN, SAMPLERS, Proposals, make_study
from fp4dse.sweeps.searching.study import Study, StudyResult, Trainer
from fp4dse.tasks import find_facts

SMALLEST_BATCH = 4
ROUNDS = 8
"""Batches that a search has at least: a sampler that is asked for all at once learns nothing."""
MOST_COUNTED = 20_000
"""Combinations of a space up to which its recipes are counted one by one."""


class SearchResult(msgspec.Struct, frozen=True):
    """The result of a search: a study a task, and `lanes` trained for all of them together.

    asked       trials of each study that were asked for
    space       recipes of the space; None: it has more combinations than are counted
    combinations    of the space, equivalent and forbidden ones included
    stopped     why studies are not at their end, if not for a reason of their own
    """

    store: str
    sampler: str
    objectives: list[str]
    asked: int
    space: int | None
    combinations: int
    studies: list[StudyResult]
    lanes: int
    failures: list[Failure]
    stopped: str | None
    interrupted: bool
    wall_s: float

    def facts(self) -> dict[str, Any]:
        """For scripts."""
        return dict(msgspec.to_builtins(self))

    @property
    def exit_code(self) -> int:
        """130 if interrupted, 1 if recipes failed, else 0."""
        return 130 if self.interrupted else int(any(study.failed for study in self.studies))


def run_search(
    space: Space,
    *,
    sampler: str,
    trials: int,
    objectives: Sequence[str] = ("gap", "overhead"),
    seeds: Sequence[int] | None = None,
    lrs: Sequence[float] | None = None,
    store: str | Path,
    batch: int | None = None,
    sampler_seed: int = 0,
    halving: Halving | None = None,
    **more: Any,
) -> SearchResult:
    """Search the axes of a space for recipes with small objectives, for every task apart. Its design plays no part.

    sampler     one of SAMPLERS; there is no default, for none is right for all spaces
    trials      recipes to try for each task, those that the store knows included
    objectives  of OBJECTIVES; `metric` where every task says which way it is better
    batch       recipes that are proposed together; None: what fills the workers' populations, an eighth of all at most
    more        further arguments of `run_sweep`: tasks, device, jobs, budget_s, progress, executor, options, …

    ConfigError on wrong input; what `run_sweep` raises.
    """
    begin = time.monotonic()
    _check(space, sampler, trials, objectives, batch)
    if not 0 <= sampler_seed < 2**32:
        raise ConfigError("--sampler-seed", sampler_seed, f"a whole number from 0 to {2**32 - 1}")
    request = Request(store=store, **more)
    if request.executor == "folder":
        others = ", ".join(name for name in EXECUTORS if name != "folder")
        raise ConfigError("--executor", "folder", f"{others}: a search proposes by what came back")
    for task in (find_facts(*asked) for asked in request.tasks if "metric" in objectives):
        if task.better is None:
            others = ", ".join(name for name in OBJECTIVES if name != "metric")
            why = f"{task.name} has no metric of which it says whether higher or lower is better"
            raise ConfigError("--objectives", "metric", f"{others} ({why})")
    lrs = lrs or space.lanes.lr
    with open_sweep(space, request) as sweep:
        setting = sweep.setting
        seeds = setting.seeds_of(space, seeds, sweep.store, None)
        size = batch or batch_size(setting, len(seeds) * len(lrs or [0]), trials)
        sweep.baselines.rates = None if lrs else class_rates
        run_ids = sweep.baselines.stored = sweep.store.done(pruned=halving is not None)
        sweep.baselines.note_stored(sweep.store)
        studies = []
        for task in setting.tasks:
            proposals = Proposals(space, make_study(sampler, len(objectives), size, sampler_seed))
            answers = Answers(sweep.store, setting.contexts[task.name, task.preset], objectives)
            trainer = Trainer(sweep, replace(setting, tasks=[task]), task, lrs, halving, run_ids)
            studies.append(Study(proposals, answers, trainer, seeds, size, trials, MOST_OPEN.get(sampler, 2)))
        sweep.state.trials_asked = trials * len(studies)
        sweep.run(lambda: _step(studies, sweep))
        for study in studies:
            study.end()
        _count(studies, sweep)
    return SearchResult(
        store=str(store),
        sampler=sampler,
        objectives=list(objectives),
        asked=trials,
        space=count_recipes(space),
        combinations=space.size,
        studies=[study.result() for study in studies],
        lanes=sweep.state.done + sweep.state.diverged + sweep.state.pruned,
        failures=list(sweep.state.failures.values()),
        stopped=sweep.stopped,
        interrupted=bool(sweep.signals),
        wall_s=time.monotonic() - begin,
    )


def batch_size(setting: Setting, lanes_per_recipe: int, trials: int) -> int:
    """Recipes that fill the smallest good population of every worker, shared among the tasks; fewer of few trials."""
    fewest, _ = JOB_LANES[setting.machine.device]
    full = len(setting.machine.slots) * fewest // (lanes_per_recipe * len(setting.tasks))
    return max(SMALLEST_BATCH, min(full, trials // ROUNDS))


def count_recipes(space: Space) -> int | None:
    """Distinct recipes that a sampler may propose and no rule rejects; None where it would take long to count them."""
    if space.size > MOST_COUNTED:
        return None
    levels = itertools.product(*(range(len(axis.values)) for axis in space.axes.values()))
    return sum(not space.broken(recipe) for recipe in {unlabelled(space.build(found)) for found in levels})


def _check(space: Space, sampler: str, trials: int, objectives: Sequence[str], batch: int | None) -> None:
    if sampler not in SAMPLERS:
        raise ConfigError("--sampler", sampler, ", ".join(SAMPLERS))
    for name in objectives or [""]:
        if name not in OBJECTIVES or list(objectives).count(name) > 1:
            raise ConfigError("--objectives", name, f"some of {', '.join(OBJECTIVES)}, with commas, each once")
    for name, value in (("--trials", trials), ("--batch", batch)):
        if value is not None and value < 1:
            raise ConfigError(name, value, "a whole number above 0")
    if not space.axes:
        raise ConfigError("space", space.name, "a space with axes; joined spaces have none of their own")


def _step(studies: Sequence[Study], sweep: Sweep) -> bool:
    """Let every study do one thing; whether any did."""
    busy = [study.step() for study in studies]
    _count(studies, sweep)
    return any(busy)


def _count(studies: Sequence[Study], sweep: Sweep) -> None:
    """For the display."""
    sweep.state.trials = sum(study.trials for study in studies)
    sweep.state.trials_stored = sum(study.stored for study in studies)
