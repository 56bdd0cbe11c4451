"""A sweep without training: the real plan and the real scheduler on workers that only wait, on a clock of their own.

What is drawn: a job takes a start and a time per lane that differs from job to job (lognormal), one in a hundred
straggles, some are lost half-way with their worker. The driver is busy with every job that ends, for a while and for
each of its rows, and starts no other meanwhile; that is why workers idle.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.sweeps.arguments import find_space
from fp4dse.sweeps.executors.outcome import Outcome, Pace, Running
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.sweeps.planning.plan import plan
from fp4dse.sweeps.running.driver import POLL_S
from fp4dse.sweeps.running.scheduler import Scheduler
from fp4dse.tasks import find_facts
from fp4dse.tasks.job import Job, JobResult


class Draw(msgspec.Struct, frozen=True):
    """The distributions, in seconds and shares. The defaults are those of small tasks on a GPU."""

    start_s: float = 20.0
    lane_s: float = 0.3
    spread: float = 0.3  # sigma of the logarithm
    stragglers: float = 0.01
    straggle: float = 5.0  # times as long
    losses: float = 0.005
    driver_s: float = 0.02
    row_s: float = 0.0005


class Simulated(msgspec.Struct, frozen=True):
    """The result of a simulation. Shares are of the time of all workers; `worst_idle` is that of the worker that idled
    most.

    `idle` counts until the last job of the plan was started, those that are tried again aside; `idle_all` until the
    last one ended.
    """

    lanes: int
    jobs: int
    retried: int
    hours: float
    idle: float
    worst_idle: float
    idle_all: float


@dataclass
class SimulatedExecutor:
    """Workers that wait. Has no folders and no results to speak of."""

    capacity: int
    draw: Draw
    chance: random.Random
    now: float = 0.0
    trouble: str | None = None
    elsewhere: str | None = None
    running: list[Running] = field(default_factory=list)
    starts: int = 0
    last_start: float = 0.0  # of a job that was not tried before
    last_end: float = 0.0
    idle: dict[int, float] = field(default_factory=dict)  # worker -> seconds without a job until its last start
    before: dict[int, float] = field(default_factory=dict)  # the same until `last_start`
    _started: set[int] = field(default_factory=set)
    free: dict[int, float] = field(default_factory=dict)  # worker -> since when
    _events: list[tuple[float, int, int, bool, Running]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.free = dict.fromkeys(range(self.capacity), 0.0)
        self.idle = dict.fromkeys(range(self.capacity), 0.0)

    @property
    def has_room(self) -> bool:
        return bool(self.free)

    def takes(self, _: Job, /) -> bool:
        return True

    def start(self, job: Job, _: dict[str, Any], /) -> None:
        """Draw how long it takes and how it ends."""
        worker = next(iter(self.free))
        self.idle[worker] += self.now - self.free.pop(worker)
        seconds = self.draw.start_s + self.draw.lane_s * len(job.lanes) * self.chance.lognormvariate(
            0, self.draw.spread
        )
        seconds *= self.draw.straggle if self.chance.random() < self.draw.stragglers else 1.0
        lost = self.chance.random() < self.draw.losses
        seconds *= self.chance.random() if lost else 1.0
        run = Running(job, Path(str(self.starts)), self.now, self.now)
        self.starts += 1
        if id(job) not in self._started:
            self._started.add(id(job))
            self.last_start, self.before = self.now, dict(self.idle)
        heapq.heappush(self._events, (self.now + seconds, self.starts, worker, lost, run))
        self.running.append(run)

    def poll(self, wait_s: float) -> list[Outcome]:
        """Let time pass until a job ends."""
        self.now = min(self.now + wait_s, max(self.now, self._events[0][0] if self._events else self.now + wait_s))
        outcomes = []
        while self._events and self._events[0][0] <= self.now:
            ended, _, worker, lost, run = heapq.heappop(self._events)
            self.free[worker] = self.last_end = ended
            self.running.remove(run)
            outcome = Outcome(run.job, run.folder, "lost" if lost else "done", Pace(0, 0, 0), None if lost else NOTHING)
            outcomes.append(outcome)
        return outcomes

    def stop(self) -> list[Outcome]:
        return []


NOTHING: Any = JobResult([], 0.0, 0.0, "", "", [], 0)


def simulate(jobs: Sequence[Job], workers: int, draw: Draw = Draw()) -> Simulated:  # noqa: B008
    """Run the jobs of a plan to their end, as driver.py does."""
    executor = SimulatedExecutor(workers, draw, random.Random(0))
    scheduler = Scheduler(executor, deque(jobs), now=lambda: executor.now)
    lanes = retried = 0
    while not scheduler.is_over:
        scheduler.fill()
        verdicts = scheduler.poll(POLL_S)
        scheduler.fill()
        for verdict in verdicts:
            executor.now += draw.driver_s + draw.row_s * len(verdict.outcome.job.lanes)  # its rows are stored
            retried += verdict.action == "retry"
            lanes += len(verdict.outcome.job.lanes) if verdict.action == "store" else 0
    before = {worker: seconds / executor.last_start for worker, seconds in executor.before.items()}
    after = sum(executor.last_end - since for since in executor.free.values())
    total = workers * executor.last_end
    return Simulated(
        lanes=lanes,
        jobs=len(jobs),
        retried=retried,
        hours=executor.last_end / 3600,
        idle=sum(before.values()) / workers,
        worst_idle=max(before.values()),
        idle_all=(sum(executor.idle.values()) + after) / total,
    )


def many_jobs(lanes: int, workers: int) -> list[Job]:
    """The plan of a sweep of so many lanes on GPUs: the shipped zoo, learning rates × seeds."""
    recipes = list(find_space("zoo").recipes())
    seeds = range(200)
    lrs = [1e-4 * 1.01**i for i in range(-(-lanes // (len(recipes) * len(seeds))))]
    task = find_facts("regression", "small")
    machine = Machine("cuda", 1, [{}] * workers)
    planned = plan(recipes, [task], seeds=seeds, lrs=lrs, is_stored=lambda *_: False, machine=machine)
    return list(itertools.islice(planned.jobs, len(planned.jobs)))
