"""A sweep from end to end: plan what is missing, train it, store it, whatever happens on the way.

    a job that …                what follows
    comes back                  its rows are stored, then its folder is deleted
    does not fit into memory    is cut in halves, down to one lane
    crashes                     is tried once more, then its lanes are stored as failed, with the reason
    is over its time            its lanes are stored as failed
    is stopped                  its lanes are missing, and the same command trains them later

Failed lanes are missing too as far as planning goes: the same command tries them again.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fp4dse.dse import Recipe, Space
from fp4dse.results import Store, open_store, summarize
from fp4dse.results.stats import SETTING, SUMMARIZED, percent
from fp4dse.sweeps.executor import LIMIT_S, WORKER, Executor, Outcome
from fp4dse.sweeps.jobfolder import job_name, keep_stderr, leftovers
from fp4dse.sweeps.plan import Plan
from fp4dse.sweeps.progress import display
from fp4dse.sweeps.rows import failed_rows, result_rows
from fp4dse.sweeps.setting import Setting, Tasks, find_setting
from fp4dse.sweeps.signals import stop_signals
from fp4dse.sweeps.state import Clock, SweepState, job_state, write_state
from fp4dse.tasks.job import Job

POLL_S = 0.2
STATE_S = 2.0
"""How often `state.json` is rewritten."""
GIVE_UP_JOBS = 3
"""So many failed jobs, and none that came back, are a fault that all jobs share: the sweep ends."""


class SweepResult(msgspec.Struct, frozen=True):
    """Counts are lanes: `asked` = `stored` before + `done` + `diverged` + `failed` + `left`.

    `stopped` says why lanes are left, None if none are. `failures`: reason -> lanes.
    """

    store: str
    asked: int
    stored: int
    done: int
    diverged: int
    failed: int
    failures: dict[str, int]
    stopped: str | None
    interrupted: bool
    wall_s: float

    @property
    def left(self) -> int:
        return self.asked - self.stored - self.done - self.diverged - self.failed

    def facts(self) -> dict:
        """For scripts."""
        return {**msgspec.to_builtins(self), "left": self.left}

    @property
    def exit_code(self) -> int:
        """130 if interrupted, 1 if lanes failed, else 0."""
        return 130 if self.interrupted else int(self.failed > 0)


def plan_sweep(
    space: Space | Sequence[Recipe],
    *,
    tasks: Tasks = (("regression", "small"),),
    seeds: Sequence[int] = (0, 1, 2),
    lrs: Sequence[float] | None = None,
    store: str | Path,
    device: str = "cpu",
    jobs: int | None = None,
    rerun: bool = False,
) -> Plan:
    """What `run_sweep` with these arguments would train. Writes nothing."""
    setting = find_setting(tasks, device, jobs)
    stored = open_store(store).done() if Path(store).exists() and not rerun else set()
    return setting.plan(space, seeds, lrs, stored)


def run_sweep(
    space: Space | Sequence[Recipe],
    *,
    tasks: Tasks = (("regression", "small"),),
    seeds: Sequence[int] = (0, 1, 2),
    lrs: Sequence[float] | None = None,
    store: str | Path,
    device: str = "cpu",
    jobs: int | None = None,
    budget_s: float | None = None,
    rerun: bool = False,
    record: bool = False,
    progress: bool | Callable[[SweepState], None] = False,
    worker: Sequence[str] = WORKER,
    job_limit_s: float = LIMIT_S,
) -> SweepResult:
    """Train every lane of the space that the store lacks; store what comes of it.

    lrs        learning rates, the same for all tasks; None: each task's own
    jobs       workers at a time
    budget_s   seconds after which the sweep stops; all that was finished is stored
    rerun      train again what the store has
    record     store gradient norms and what slots lose at log-spaced steps, too (tasks/recorder.py)
    progress   True shows it on standard error; a function is called with the state a few times a second
    worker     command of a worker process

    SIGINT and SIGTERM stop the sweep cleanly. ConfigError on wrong input; StoreError if the store cannot be written,
    and then finished jobs that were not stored are taken in by the next sweep.
    """
    begin = time.monotonic()
    setting = find_setting(tasks, device, jobs)
    opened = open_store(store, create=True)
    work = Path(store) / "jobs"
    with opened.lock(), stop_signals() as signals, display(progress) as show:
        _take_in_leftovers(opened, work)
        todo = setting.plan(space, seeds, lrs, set() if rerun else opened.done())
        executor = Executor(work, setting.machine.slots, tuple(worker), job_limit_s)
        name = space.name if isinstance(space, Space) else "recipes"
        state = SweepState(name=name, asked=todo.asked, stored=todo.stored)
        steps = {(task.name, task.preset): task.steps for task in setting.tasks}
        queue = deque(msgspec.structs.replace(job, record=record) for job in todo.jobs)
        sweep = _Sweep(opened, executor, setting, state, queue, Clock(steps, len(setting.machine.slots)))
        try:
            stopped = sweep.run(lambda: _reason_to_stop(signals, begin, budget_s, state), show)
            state.best = best_gaps(opened, setting)
            state.ended = stopped or "finished"
        except BaseException as error:
            state.ended = f"{type(error).__name__}: {error}"
            raise
        finally:
            executor.stop()
            sweep.tell(show)
        opened.compact()
    return SweepResult(
        store=str(store),
        asked=todo.asked,
        stored=todo.stored,
        done=state.done,
        diverged=state.diverged,
        failed=state.failed,
        failures=state.failures,
        stopped=stopped,
        interrupted=bool(signals),
        wall_s=time.monotonic() - begin,
    )


@dataclass
class _Sweep:
    """The loop between the queue, the workers and the store."""

    store: Store
    executor: Executor
    setting: Setting
    state: SweepState
    queue: deque[Job]
    clock: Clock
    retried: set[str] = field(default_factory=set)
    written: float = 0.0
    judge_after: float = 0.0

    def run(self, stop: Callable[[], str | None], show: Callable[[SweepState], None]) -> str | None:
        """Until nothing is left, or `stop` gives a reason, which is returned."""
        while self.queue or self.executor.running:
            reason = stop()
            if reason:
                for outcome in self.executor.stop():
                    self.settle(outcome)
                return reason
            while self.queue and self.executor.has_room:
                job = self.queue.popleft()
                self.executor.start(job, self.context(job))
            for outcome in self.executor.poll(POLL_S):
                self.settle(outcome)
            self.tell(show)
        return None

    def settle(self, outcome: Outcome) -> None:
        """Store, split, retry or give up. The folder goes last: until then a new driver can take the result in."""
        job, folder = outcome.job, outcome.folder
        if outcome.result is not None:
            rows = result_rows(job, outcome.result, self.context(job))
            self.store.add(rows, folder.name)
            self.state.diverged += sum(row["status"] == "diverged" for row in rows)
            self.state.done += sum(row["status"] == "done" for row in rows)
            self.clock.add(job, outcome.pace)
            self.judge()
        elif outcome.kind == "memory" and len(job.lanes) > 1:
            half = len(job.lanes) // 2
            parts = (job.lanes[:half], job.lanes[half:])
            self.queue.extendleft(msgspec.structs.replace(job, lanes=lanes) for lanes in reversed(parts))
            self.note_retry(f"{outcome.reason}: cut in halves")
        elif outcome.kind in ("memory", "failed") and job_name(job) not in self.retried:
            self.retried.add(job_name(job))
            self.queue.appendleft(job)
            self.note_retry(f"{outcome.reason}: tried once more")
        elif outcome.kind != "stopped":
            self.store.add(failed_rows(job, outcome.reason, self.context(job)), folder.name)
            keep_stderr(folder, self.executor.work.parent / "stderr")
            self.state.failed += len(job.lanes)
            self.state.failed_jobs += 1
            self.state.failures[outcome.reason] = self.state.failures.get(outcome.reason, 0) + len(job.lanes)
        shutil.rmtree(folder, ignore_errors=True)

    def judge(self) -> None:
        """The best gaps so far. On a big store this takes a while, so it is left out until 20 times that has passed."""
        begin = time.monotonic()
        if begin >= self.judge_after:
            self.state.best = best_gaps(self.store, self.setting)
            self.judge_after = time.monotonic() + 20 * (time.monotonic() - begin)

    def note_retry(self, what: str) -> None:
        self.state.retries[what] = self.state.retries.get(what, 0) + 1

    def context(self, job: Job) -> dict:
        return self.setting.contexts[job.task, job.preset]

    def tell(self, show: Callable[[SweepState], None]) -> None:
        """Bring the state up to date for the display, and now and then for other processes."""
        state = self.state
        state.jobs_waiting = len(self.queue)
        state.running = [job_state(run) for run in self.executor.running]
        state.eta_s = self.clock.eta_s(self.queue, self.executor.running)
        if state.ended or time.monotonic() - self.written >= STATE_S:
            write_state(self.store.path, state)
            self.written = time.monotonic()
        show(state)


def best_gaps(store: Store, setting: Setting) -> list[str]:
    """Per task, the quantizing recipe with the lowest gap to BF16 in this setting, as a sentence."""
    table = summarize(store.runs(SUMMARIZED))
    lines = []
    for (task, preset), context in setting.contexts.items():
        here = (table[list(SETTING)] == [context[name] for name in SETTING]).all(axis="columns")
        gaps = table[here & table["points"].gt(0) & table["gap"].lt(math.inf)]
        if len(gaps):
            best = gaps.loc[gaps["gap"].idxmin()]
            lines.append(f"{task}:{preset} {percent(best['gap'])} % with {best['label']} ({best['pairs']} seeds)")
    return lines


def _take_in_leftovers(store: Store, work: Path) -> None:
    """Store the jobs that workers finished and a driver that died did not store."""
    for folder, job, context, result in leftovers(work):
        store.add(result_rows(job, result, context), folder.name)
        shutil.rmtree(folder, ignore_errors=True)


def _reason_to_stop(signals: list[str], begin: float, budget_s: float | None, state: SweepState) -> str | None:
    if signals:
        return f"stopped by {signals[0]}"
    if budget_s is not None and time.monotonic() - begin >= budget_s:
        return f"the budget of {budget_s:g} s is spent"
    if state.failed_jobs >= GIVE_UP_JOBS and not state.done + state.diverged:
        return f"given up: the first {GIVE_UP_JOBS} jobs all failed"
    return None
