"""Chooses the next job, and decides what follows from the end of one. Knows nothing of rows and stores, so that a
simulation can run it against a clock of its own.

    a job that …                       what follows
    comes back                         it is stored
    does not fit into memory           is cut in halves, down to one lane, and so are those like it before they start
    … alone, on a device of its own    is given up
    is lost (a signal, a node)         is tried again, up to RETRIES["lost"] times, each after a longer pause
    ends with an error                 is tried once more after a pause, then given up
    is over its time                   is given up
    is stopped by the driver           its lanes are missing, and the same command trains them later
    stops because its time was up      is tried again at once, up to RETRIES["stopped"] times
    is for another kind of device      is given to the next worker after a pause, up to RETRIES["elsewhere"] times

Divergence is a result and comes back like any other. The first `GIVE_UP_JOBS` different jobs that are given up with the
same error, while none came back, are a fault that all jobs share: the sweep ends.
"""

from __future__ import annotations

import heapq
import re
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from fp4dse.dse import Signature
from fp4dse.sweeps.executors.outcome import Executor, Outcome
from fp4dse.sweeps.jobs.jobfolder import job_name, part_of
from fp4dse.tasks.job import Job

Kind = tuple[str, str, bool, Signature]

RETRIES = {"lost": 3, "memory": 3, "failed": 1, "stopped": 3, "elsewhere": 200}
"""Number of times that a job is tried again. Memory: a population of one lane, which cannot be cut."""
BACKOFF_S = 1.0
"""The pause before the first new try; each further one is four times as long. One that waits for a kind of device is
tried more often: LONGEST_WAIT pauses at most."""
LONGEST_WAIT = 16
GIVE_UP_JOBS = 3


class Verdict(msgspec.Struct, frozen=True):
    """The action that follows from an outcome. `note`: how it is tried again."""

    outcome: Outcome
    action: Literal["store", "retry", "give up", "leave"]
    note: str = ""


@dataclass
class Scheduler:
    """The queue between the plan and an executor. `context`: what the executor is to keep beside a job (rows.py)."""

    executor: Executor
    queue: deque[Job]
    context: Callable[[Job], dict[str, Any]] = lambda _: {}
    now: Callable[[], float] = time.monotonic
    backoff_s: float = BACKOFF_S
    any_done: bool = False
    stopping: bool = False
    _tries: Counter[str] = field(default_factory=Counter)  # by job and kind
    _errors: dict[str, str] = field(default_factory=dict)  # job -> error, of those given up
    _too_large: dict[Kind, int] = field(default_factory=dict)  # the fewest lanes of a kind of job that did not fit
    _delayed: list[tuple[float, int, Job]] = field(default_factory=list)  # a heap: when, tie-break, what
    _count: int = 0

    @property
    def waiting(self) -> list[Job]:
        """Jobs that are not started."""
        return [*self.queue, *(job for *_, job in self._delayed)]

    @property
    def is_over(self) -> bool:
        return not (self.queue or self._delayed or self.executor.running)

    def fill(self) -> None:
        """Start jobs while there is room; those whose pause is over come first."""
        while self._delayed and self._delayed[0][0] <= self.now():
            self.queue.appendleft(heapq.heappop(self._delayed)[-1])
        while self.queue and self.executor.has_room:
            index = next((index for index, job in enumerate(self.queue) if self.executor.takes(job)), None)
            if index is None and self.executor.running:  # a worker of the right kind may become free
                break
            job = self.queue[index or 0]
            del self.queue[index or 0]
            while self._too_large and 1 < len(job.lanes) >= self._too_large.get(_kind(job), len(job.lanes) + 1):
                job, rest = _halves(job)
                self.queue.appendleft(rest)
            self.executor.start(job, self.context(job))

    def poll(self, wait_s: float) -> list[Verdict]:
        """The verdicts on the jobs that ended within `wait_s` seconds."""
        return [self.decide(outcome) for outcome in self.executor.poll(wait_s)]

    def stop(self) -> list[Verdict]:
        """End what runs."""
        self.stopping = True
        return [self.decide(outcome) for outcome in self.executor.stop()]

    def decide(self, outcome: Outcome) -> Verdict:
        """Decide, and queue what is to be tried again."""
        job, kind = outcome.job, outcome.kind
        if kind == "done":
            self.any_done = True
            return Verdict(outcome, "store")
        if self.stopping:
            return Verdict(outcome, "leave")
        if kind == "memory" and len(job.lanes) > 1:
            self._too_large[_kind(job)] = min(len(job.lanes), self._too_large.get(_kind(job), len(job.lanes)))
            self.queue.extendleft(_halves(job)[::-1])
            return Verdict(outcome, "retry", "cut in halves")
        tried = self._tries[f"{job_name(job)} {kind}"]
        if tried < RETRIES.get(kind, 0):
            self._tries[f"{job_name(job)} {kind}"] += 1
            longer = min(4**tried, LONGEST_WAIT) if kind == "elsewhere" else 4**tried
            pause_s = 0.0 if kind == "stopped" else self.backoff_s * longer
            self._count += 1
            heapq.heappush(self._delayed, (self.now() + pause_s, self._count, job))
            return Verdict(outcome, "retry", f"tried again {f'after {pause_s:g} s' if pause_s else 'at once'}")
        self._errors[job_name(job)] = outcome.reason
        return Verdict(outcome, "give up")

    def runs_in(self, folder: Path) -> bool:
        """True if a job runs in that folder: one that was tried again may have been started meanwhile."""
        return any(run.folder == folder for run in self.executor.running)

    def why_give_up(self) -> str | None:
        """The fault that all jobs seem to share."""
        if self.any_done or len(self._errors) < GIVE_UP_JOBS:
            return None
        first = list(self._errors.values())[:GIVE_UP_JOBS]
        if len(set(map(error_kind, first))) > 1:
            return None
        return f"given up: the first {GIVE_UP_JOBS} jobs all failed with the same error: {first[0]}"


def _halves(job: Job) -> tuple[Job, Job]:
    lanes = range(len(job.lanes))
    half = len(lanes) // 2
    return part_of(job, lanes[:half]), part_of(job, lanes[half:])


def _kind(job: Job) -> Kind:
    """The key that jobs share whose lanes take about as much memory."""
    return job.task, job.preset, job.record, job.lanes[0].recipe.signature()


def error_kind(reason: str) -> str:
    """A reason without what differs between two jobs with the same fault: numbers, addresses, paths."""
    return re.sub(r"0x[0-9a-f]+|(/[\w.+-]+)+|\d+", "#", reason)
