"""BF16 beside every recipe on every kind of device: losses are compared within a kind, and a sweep may span several.

Where the kinds are known beforehand, as those of this machine's cards, the plan has the baselines of each (plan.py).
Where a cluster hands the workers out, a kind is known from the first job that it brings back. The baselines that it
lacks then become a job for this kind alone; so do those that an earlier driver learned of too late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fp4dse.dse import Recipe
from fp4dse.results import Store
from fp4dse.results.stats.stages import STAGE, fresh, screened
from fp4dse.sweeps.plan import BASELINE
from fp4dse.sweeps.rows import KIND, SHARED, lane_id
from fp4dse.sweeps.scheduler import Verdict
from fp4dse.sweeps.setting import Setting
from fp4dse.tasks.job import Job, Lane

_Where = tuple[str, str, tuple[str, ...]]  # task, preset, kind


@dataclass
class Baselines:
    """The baselines that are stored (`stored`: run_ids), expected or wanted. A job for a baseline is made once."""

    setting: Setting
    stored: set[str]
    record: bool = False
    rates: dict[tuple[str, str], Sequence[float]] = field(default_factory=dict)
    """Learning rates of a task's baselines, where these are not those of each recipe."""
    _wanted: dict[_Where, set[tuple[float, int]]] = field(default_factory=dict)  # (lr, seed) of recipes
    _handled: dict[_Where, set[tuple[float, int]]] = field(default_factory=dict)  # of baselines
    _expected: Counter[tuple[str, str, float, int]] = field(default_factory=Counter)

    def expect(self, jobs: Iterable[Job]) -> None:
        """Note jobs that will run: a baseline that may still come from the kind that lacks it is not made twice."""
        for job in jobs:
            if _is_baseline(job):
                self._expected.update((job.task, job.preset, lane.lr, lane.seed) for lane in job.lanes)

    def note_stored(self, store: Store) -> None:
        """Want baselines for rows of the sweep's tasks that are stored, where kinds are not known beforehand."""
        if self.setting.machine.kinds:
            return
        names = ["status", "device", "is_baseline", "lr", "seed", STAGE, *KIND]
        rows = store.runs([*names, *SHARED])
        rows = rows[rows["status"].ne("failed") & rows["device"].eq(self.setting.machine.device)]
        rows = rows[~rows["is_baseline"].astype(bool)]
        for (task, preset), context in self.setting.contexts.items():
            here = rows[(rows[SHARED] == [context[name] for name in SHARED]).all(axis="columns")]
            here = fresh(here) if context.get(STAGE) else screened(here)
            for *kind, lr, seed in here[[*KIND, "lr", "seed"]].drop_duplicates().itertuples(index=False):
                pairs = {(rate, seed) for rate in self.rates.get((task, preset), [lr])}
                self._wanted.setdefault((task, preset, tuple(kind)), set()).update(pairs)

    def note(self, verdict: Verdict) -> None:
        """Note the baselines that a job brought back, and those that its recipes want."""
        job, result = verdict.outcome.job, verdict.outcome.result
        if verdict.action == "retry":
            return
        pairs = {(lane.lr, lane.seed) for lane in job.lanes}
        if _is_baseline(job):
            self._expected.subtract((job.task, job.preset, *pair) for pair in pairs)
        if result is not None:
            found = {**self.setting.context(job), **result.environment}
            where = (job.task, job.preset, tuple(str(found[name]) for name in KIND))
            if _is_baseline(job):
                self._handled.setdefault(where, set()).update(pairs)
                return
            rates = self.rates.get((job.task, job.preset))
            wanted = {(rate, lane.seed) for rate in rates for lane in job.lanes} if rates is not None else pairs
            self._wanted.setdefault(where, set()).update(wanted)

    def missing(self) -> list[Job]:
        """Jobs for the baselines that nothing else will bring, one a task and kind; each is returned once."""
        jobs = []
        for (task, preset, values), wanted in self._wanted.items():
            kind = dict(zip(KIND, values, strict=True))
            handled = self._handled.setdefault((task, preset, values), set())
            lacking = [pair for pair in sorted(wanted - handled) if self._expected[task, preset, *pair] <= 0]
            handled.update(lacking)
            wanted -= handled
            context = {**self.setting.contexts[task, preset], **kind}
            lanes = [Lane(_RECIPE, lr, seed) for lr, seed in lacking]
            if lanes := [lane for lane in lanes if lane_id(lane, context) not in self.stored]:
                jobs.append(self._job(task, preset, lanes, kind))
        return jobs

    def _job(self, name: str, preset: str, lanes: list[Lane], kind: dict[str, str]) -> Job:
        machine = self.setting.machine
        task = next(task for task in self.setting.tasks if (task.name, task.preset) == (name, preset))
        digest = task.digest if task.origin else ""
        of = {"device": machine.device, "threads": machine.threads, "origin": task.origin, "digest": digest}
        return Job(name, preset, lanes, record=self.record, only_on=kind, **of)  # type: ignore[arg-type]


_RECIPE = Recipe.named(BASELINE).canonical()


def _is_baseline(job: Job) -> bool:
    return job.lanes[0].recipe == _RECIPE
