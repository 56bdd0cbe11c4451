"""Searches for one task: batches of recipes are proposed, trained, and their results told to the sampler.

A study is a batch ahead: the next one is asked for before the last one is back, so that workers have something to do
while its last lanes are trained. The next step of a study depends on how many batches are under way, never on the time:
the sampler gets the results of one whole batch before those of the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fp4dse.dse import Recipe
from fp4dse.sweeps.jobs.rows import lane_id
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.sweeps.planning.plan import BASELINE
from fp4dse.sweeps.planning.setting import Setting
from fp4dse.sweeps.running.driver import Sweep
from fp4dse.sweeps.searching.answers import Answers
from fp4dse.sweeps.searching.sampling import Proposals
from fp4dse.tasks import TaskFacts
from fp4dse.tasks.facts import rate_of
from fp4dse.tasks.job import Lane

ASKS = 20
"""Proposals for each recipe of a batch, after which a batch that is not full is submitted as it is."""


class StudyResult(msgspec.Struct, frozen=True):
    """The result of the study of one task. `trials` = `trained` + `stored` + `replicates`, with `diverged` and `failed`
    among them.

    stored      recipes that the store could answer
    replicates  recipes that were trained again, with further seeds
    repeated    proposals that were known already; rejected: by a rule of the space. Both were asked again
    front       non-dominated recipes of those that were met: label, config_id, seeds and the objectives
    stopped     why there are fewer trials than asked for, if the sampler is the reason
    """

    task: str
    preset: str
    trials: int
    trained: int
    stored: int
    replicates: int
    diverged: int
    failed: int
    repeated: int
    rejected: int
    recipes: int
    front: list[dict[str, Any]]
    stopped: str | None
    gap_unit: str | None = None


@dataclass
class Batch:
    """Recipes that are proposed and trained together. `lanes`: those that it waits for, the baselines' included."""

    size: int
    asks: int = 0
    config_ids: list[str] = field(default_factory=list)
    replicates: bool = False
    stored: set[str] = field(default_factory=set)
    lanes: set[Lane] = field(default_factory=set)


@dataclass
class Trainer:
    """Trains recipes for the study of one task. `lrs`: None for the task's own rates; `run_ids`: those that are stored
    or queued, of all studies."""

    sweep: Sweep
    setting: Setting
    task: TaskFacts
    lrs: Sequence[float] | None
    halving: Halving | None
    run_ids: set[str]
    _seen: int = -1
    _open: set[Lane] = field(default_factory=set)

    def submit(self, recipes: Sequence[Recipe], seeds: Sequence[int]) -> tuple[set[str], set[Lane]]:
        """Queue what the store lacks of these recipes; returns those that it has, and all lanes that their results
        need."""
        stored = self._whole(recipes, seeds, self.run_ids)
        plan = self.setting.plan(recipes, seeds, self.lrs, self.run_ids, self.halving)
        self.sweep.state.asked += plan.left
        self.sweep.queue(plan.jobs)
        self.run_ids |= {lane_id(lane, self.setting.context(job)) for job in plan.jobs for lane in job.lanes}
        self._seen = -1
        compared = dict.fromkeys([*recipes, Recipe.named(BASELINE).canonical(), *(r.baseline() for r in recipes)])
        return stored, {lane for recipe in compared for lane in self._lanes(recipe, seeds)}

    def is_done(self, lanes: set[Lane]) -> bool:
        """True if none of the lanes waits or runs."""
        if self._seen != self.sweep.events:
            self._seen = self.sweep.events
            mine = [job for job in self.sweep.open_jobs if (job.task, job.preset) == (self.task.name, self.task.preset)]
            self._open = {lane for job in mine for lane in job.lanes}
        return self._open.isdisjoint(lanes)

    def finished(self, recipes: Sequence[Recipe], seeds: Sequence[int]) -> set[str]:
        """Those of which the store has all lanes."""
        return self._whole(recipes, seeds, self.sweep.store.done(pruned=self.halving is not None))

    def _whole(self, recipes: Sequence[Recipe], seeds: Sequence[int], run_ids: set[str]) -> set[str]:
        is_stored = self.setting.stored_in(run_ids)
        return {r.config_id for r in recipes if all(is_stored(self.task, lane) for lane in self._lanes(r, seeds))}

    def _lanes(self, recipe: Recipe, seeds: Sequence[int]) -> list[Lane]:
        lrs = dict.fromkeys(self.lrs or [rate_of(self.task, recipe)])
        return [Lane(recipe, lr, seed) for lr in lrs for seed in seeds]


@dataclass
class Study:
    """The search of one task, step by step: ask the sampler, train, tell it the results. `exhausted`: it has nothing
    new to propose, though it knows all results."""

    proposals: Proposals
    answers: Answers
    trainer: Trainer
    seeds: list[int]
    size: int
    wanted: int
    most_open: int
    filling: Batch | None = None
    batches: deque[Batch] = field(default_factory=deque)
    proposed: int = 0
    trials: int = 0
    stored: int = 0
    replicates: int = 0
    diverged: int = 0
    failed: int = 0
    exhausted: bool = False

    def step(self) -> bool:
        """Ask for one recipe, begin a batch, or take in a finished one. False: there is nothing to do now."""
        if self.filling is not None:
            self.ask(self.filling)
        elif len(self.batches) < self.most_open and self.proposed < self.wanted and not self.exhausted:
            self.filling = Batch(min(self.size, self.wanted - self.proposed))
        elif self.batches and self.trainer.is_done(self.batches[0].lanes):
            batch = self.batches.popleft()
            self._tell(batch, batch.config_ids)
        else:
            return False
        return True

    def ask(self, batch: Batch) -> None:
        """Ask for one more recipe for a batch; submit the batch if it is full, or will never be."""
        if len(batch.config_ids) < batch.size and batch.asks < ASKS * batch.size:
            batch.asks += 1
            batch.config_ids += filter(None, [self.proposals.ask()])
            return
        self.filling = None
        if not batch.config_ids:
            batch.config_ids, batch.replicates = self.proposals.most_repeated(batch.size), True
        if batch.config_ids:
            self.submit(batch)
        else:
            self.exhausted = True

    def submit(self, batch: Batch) -> None:
        """Train a batch. Its recipes have had the same number of seeds so far; they get as many new as at first."""
        had = self.proposals.known.get(batch.config_ids[0], [])
        seeds = [max(had) + 1 + i for i in range(len(self.seeds))] if had else self.seeds
        recipes = [self.proposals.recipes[config_id] for config_id in batch.config_ids]
        for config_id in batch.config_ids:
            self.proposals.known[config_id] = [*had, *seeds]
        batch.stored, batch.lanes = self.trainer.submit(recipes, seeds)
        self.proposed += len(batch.config_ids)
        self.batches.append(batch)

    def _tell(self, batch: Batch, config_ids: Sequence[str]) -> None:
        """Tell the sampler the results of these recipes of a batch."""
        self.answers.read(config_ids)
        for config_id in config_ids:
            state = self.answers.states.get(config_id)
            self.diverged += state == "diverged"
            self.failed += state in (None, "failed")
            self.proposals.tell(config_id, self.answers.values.get(config_id))
        self.trials += len(config_ids)
        self.stored += 0 if batch.replicates else len(batch.stored.intersection(config_ids))
        self.replicates += len(config_ids) if batch.replicates else 0
        self.exhausted = False

    def end(self) -> None:
        """Count the finished recipes of the batches that a stop cut off; the others were not tried."""
        for batch in self.batches:
            recipes = [self.proposals.recipes[config_id] for config_id in batch.config_ids]
            seeds = self.proposals.known[batch.config_ids[0]][-len(self.seeds) :]
            finished = self.trainer.finished(recipes, seeds)
            self._tell(batch, [config_id for config_id in batch.config_ids if config_id in finished])
        self.answers.read(list(self.proposals.known))  # BF16 may have more seeds by now

    def result(self) -> StudyResult:
        """The counts of the study, and the front of its recipes."""
        return StudyResult(
            task=self.trainer.task.name,
            preset=self.trainer.task.preset,
            trials=self.trials,
            trained=self.trials - self.stored - self.replicates,
            stored=self.stored,
            replicates=self.replicates,
            diverged=self.diverged,
            failed=self.failed,
            repeated=self.proposals.repeated,
            rejected=self.proposals.rejected,
            recipes=self.trials - self.replicates,
            front=self.answers.front(list(self.proposals.known)),
            stopped="the sampler proposes nothing new" if self.exhausted else None,
            gap_unit=self.trainer.task.gap_unit,
        )
