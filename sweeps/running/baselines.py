"""BF16 beside every recipe on every kind of device: losses are compared within a kind, and a sweep may span several.

Where the kinds are known beforehand, as those of this machine's cards, the plan has the baselines of each (plan.py).
Where a cluster hands the workers out, a kind is known from the first job that it brings back. The baselines that it
lacks then become a job for this kind alone; so do those that an earlier driver learned of too late.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fp4dse.dse import Recipe, recipe_from_dict
from fp4dse.results import Store
from fp4dse.results.stats.stages import STAGE, of_stage
from fp4dse.sweeps.jobs.rows import KIND, SHARED, lane_id
from fp4dse.sweeps.planning.plan import Rates
from fp4dse.sweeps.planning.setting import Setting
from fp4dse.sweeps.running.scheduler import Verdict
from fp4dse.tasks import TaskFacts
from fp4dse.tasks.job import Job, Lane

_Where = tuple[str, str, tuple[str, ...]]  # task, preset, kind
_Wanted = set[tuple[Recipe, float, int]]  # baseline, lr, seed


@dataclass
class Baselines:
    """The baselines that are stored (`stored`: run_ids), expected or wanted. A job for a baseline is made once."""

    setting: Setting
    stored: set[str]
    record: bool = False
    rates: Rates | None = None
    """Learning rates of a baseline, where these are not those of each recipe."""
    _wanted: dict[_Where, _Wanted] = field(default_factory=dict)
    _handled: dict[_Where, _Wanted] = field(default_factory=dict)
    _expected: Counter[tuple[str, str, Recipe, float, int]] = field(default_factory=Counter)

    def expect(self, jobs: Iterable[Job]) -> None:
        """Note jobs that will run: a baseline that may still come from the kind that lacks it is not made twice."""
        for job in jobs:
            self._expected.update((job.task, job.preset, *baseline) for baseline in _baselines_in(job))

    def note_stored(self, store: Store) -> None:
        """Want baselines for rows of the sweep's tasks that are stored, where kinds are not known beforehand."""
        if self.setting.machine.kinds:
            return
        names = ["status", "device", "is_baseline", "config_id", "baseline_id", "lr", "seed", STAGE, *KIND]
        rows = store.runs([*names, *SHARED])
        rows = rows[rows["status"].ne("failed") & rows["device"].eq(self.setting.machine.device)]
        rows = rows[~rows["is_baseline"].astype(bool)]
        one_each = rows.drop_duplicates("baseline_id").set_index("config_id")["baseline_id"]
        texts = store.recipe_texts(list(one_each.index))
        recipes = {one_each[key]: recipe_from_dict(json.loads(text)).baseline() for key, text in texts.items()}
        for (task, preset), context in self.setting.contexts.items():
            here = rows[(rows[SHARED] == [context[name] for name in SHARED]).all(axis="columns")]
            here = of_stage(here, context.get(STAGE))
            wanted = here[[*KIND, "baseline_id", "lr", "seed"]].drop_duplicates()
            for *kind, of, lr, seed in wanted.itertuples(index=False):
                baselines = {(recipes[of], rate, seed) for rate in self._rates(task, preset, recipes[of], lr)}
                self._wanted.setdefault((task, preset, tuple(kind)), set()).update(baselines)

    def note(self, verdict: Verdict) -> None:
        """Note the baselines that a job brought back, and those that its recipes want."""
        job, result = verdict.outcome.job, verdict.outcome.result
        if verdict.action == "retry":
            return
        brought = _baselines_in(job)
        self._expected.subtract((job.task, job.preset, *baseline) for baseline in brought)
        if result is not None:
            found = {**self.setting.context(job), **result.environment}
            where = (job.task, job.preset, tuple(str(found[name]) for name in KIND))
            self._handled.setdefault(where, set()).update(brought)
            self._wanted.setdefault(where, set()).update(self._baselines_of(job))

    def missing(self) -> list[Job]:
        """Jobs for the baselines that nothing else will bring, one a task, kind and baseline; each is returned once."""
        jobs = []
        for (task, preset, values), wanted in self._wanted.items():
            kind = dict(zip(KIND, values, strict=True))
            handled = self._handled.setdefault((task, preset, values), set())
            lacking = {one for one in wanted - handled if self._expected[task, preset, *one] <= 0}
            handled.update(lacking)
            wanted -= handled
            context = {**self.setting.contexts[task, preset], **kind}
            for recipe in sorted({recipe for recipe, *_ in lacking}, key=Recipe.label):
                pairs = sorted((lr, seed) for of, lr, seed in lacking if of == recipe)
                lanes = [Lane(recipe, lr, seed) for lr, seed in pairs]
                if lanes := [lane for lane in lanes if lane_id(lane, context) not in self.stored]:
                    jobs.append(self._job(task, preset, lanes, kind))
        return jobs

    def _baselines_of(self, job: Job) -> _Wanted:
        """The baselines that a job's recipes are compared with; plain BF16 has none."""
        found = ((lane.recipe.baseline(), lane) for lane in job.lanes)
        return {
            (baseline, rate, lane.seed)
            for baseline, lane in found
            if lane.recipe != baseline
            for rate in self._rates(job.task, job.preset, baseline, lane.lr)
        }

    def _rates(self, task: str, preset: str, baseline: Recipe, lr: float) -> Sequence[float]:
        """The learning rates of a baseline beside a recipe's at `lr`: the same, unless each recipe has its own."""
        if self.rates is None:
            return [lr]
        return self.rates(self._task(task, preset), baseline)

    def _task(self, name: str, preset: str) -> TaskFacts:
        return next(task for task in self.setting.tasks if (task.name, task.preset) == (name, preset))

    def _job(self, name: str, preset: str, lanes: list[Lane], kind: dict[str, str]) -> Job:
        machine = self.setting.machine
        task = self._task(name, preset)
        digest = task.digest if task.origin else ""
        of = {"device": machine.device, "threads": machine.threads, "origin": task.origin, "digest": digest}
        return Job(name, preset, lanes, record=self.record, only_on=kind, **of)  # type: ignore[arg-type]


def _baselines_in(job: Job) -> _Wanted:
    """The baselines among a job's lanes."""
    return {(lane.recipe, lane.lr, lane.seed) for lane in job.lanes if lane.recipe.is_baseline}
