"""The loop of a sweep or a search between the executor and the store: jobs out, rows in, whatever happens on the way.

scheduler.py decides what follows from how a job ended; here rows are stored, messages written and the display fed.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from fp4dse.results import Store, open_store, summarize
from fp4dse.results.files import writing
from fp4dse.results.intervals import counted, percent
from fp4dse.results.paired import SETTING
from fp4dse.results.remote import Place
from fp4dse.results.summary import SUMMARIZED
from fp4dse.sweeps.baselines import Baselines
from fp4dse.sweeps.executors import LIMIT_S, WORKER, open_executor
from fp4dse.sweeps.jobfolder import CHECKPOINT, drop, keep_failed
from fp4dse.sweeps.places import stop_requested, withdraw_stop, work_folder
from fp4dse.sweeps.progress import display
from fp4dse.sweeps.resume import go_on, take_in_leftovers
from fp4dse.sweeps.rows import failed_rows, result_rows
from fp4dse.sweeps.scheduler import BACKOFF_S, Scheduler, Verdict
from fp4dse.sweeps.setting import Setting, Tasks, find_setting
from fp4dse.sweeps.signals import stop_signals
from fp4dse.sweeps.sizes import recall_sizes
from fp4dse.sweeps.state import Clock, Failure, SweepState, job_state, write_state
from fp4dse.tasks.job import Job

POLL_S = 0.2
STATE_S = 2.0
"""How often the state is written and a request to stop is looked for."""
COMPACT_FILES = 512
"""So many files are joined while a sweep runs, so that a driver that starts after a kill reads few."""
GO_ON = ("lost", "stopped", "elsewhere")
"""A job that ended so has done nothing wrong and goes on from its checkpoint; after an error it begins anew."""


@contextlib.contextmanager
def open_sweep(
    name: str,
    tasks: Tasks,
    store: str | Path,
    device: str = "cpu",
    jobs: int | None = None,
    *,
    budget_s: float | None = None,
    record: bool = False,
    progress: bool | Callable[[SweepState], None] = False,
    worker: Sequence[str] = WORKER,
    job_limit_s: float = LIMIT_S,
    executor: str = "local",
    options: Mapping[str, str] = {},
    backoff_s: float = BACKOFF_S,
) -> Iterator[Sweep]:
    """A sweep without jobs so far, on a store that is locked and an executor that is started; see `run_sweep`.

    What an earlier driver left is taken in on entering; on leaving the executor is stopped, the state says how it
    ended, and the store is compact.
    """
    begin = time.monotonic()
    setting = find_setting(tasks, device, jobs, local=executor == "local")
    opened = open_store(store, create=True)
    work = work_folder(store)
    with opened.lock(), stop_signals() as signals, display(progress) as show:
        withdraw_stop(opened.path)
        begun = take_in_leftovers(opened, work)
        setting.learn_classes(opened)
        runner = open_executor(executor, work, setting.machine, tuple(worker), job_limit_s, options)
        setting.machine.slots = setting.machine.slots[: runner.capacity]
        recall_sizes(setting)
        state = SweepState(name=name, asked=0, stored=0)
        clock = Clock({(task.name, task.preset): task.steps for task in setting.tasks}, len(setting.machine.slots))
        scheduler = Scheduler(runner, deque(), setting.context, backoff_s=backoff_s)
        ask = _Asked(opened.path)
        why_stop = partial(_reason_to_stop, signals, begin, budget_s, ask)
        baselines = Baselines(setting, set(), record)
        sweep = Sweep(opened, work, scheduler, setting, state, clock, baselines, begun, record, signals, why_stop, show)
        try:
            yield sweep
            state.best = best_gaps(opened, setting)
            state.ended = sweep.stopped or "finished"
        except BaseException as error:
            state.ended = f"{type(error).__name__}: {error}"
            raise
        finally:
            runner.stop()
            sweep.tell()
            withdraw_stop(opened.path)
        opened.compact(minimum=1)  # whatever comes next reads Parquet


@dataclass
class Sweep:
    """The loop between the scheduler and the store. `begun`: jobs that an earlier driver left behind; `settled`: jobs
    of which something became; `stopped`: why lanes are left."""

    store: Store
    work: Path
    scheduler: Scheduler
    setting: Setting
    state: SweepState
    clock: Clock
    baselines: Baselines
    begun: list[Job]
    record: bool
    signals: list[str]
    why_stop: Callable[[], str | None]
    show: Callable[[SweepState], None]
    stopped: str | None = None
    settled: int = 0
    added: int = 0
    written: float = 0.0
    told: float = 0.0
    judge_after: float = 0.0
    begin: float = field(default_factory=time.monotonic)

    def queue(self, jobs: Sequence[Job]) -> None:
        """Take jobs; those that are begun go on from where they are."""
        jobs = go_on(jobs, self.begun)
        self.begun = [job for job in self.begun if job not in jobs]
        self.baselines.expect(jobs)
        self.scheduler.queue.extend(msgspec.structs.replace(job, record=self.record) for job in jobs)

    def run(self, feed: Callable[[], bool] = lambda: False) -> None:
        """Until nothing is left, or there is a reason to stop. `feed` may queue more; True: it wants to go on at
        once."""
        self.add_baselines()
        while (busy := feed()) or not self.scheduler.is_over:
            self.stopped = self.why_stop() or self.scheduler.why_give_up()
            if self.stopped:
                for verdict in self.scheduler.stop():
                    self.settle(verdict)
                return
            self.fill()
            verdicts = self.scheduler.poll(0.0 if busy else POLL_S)
            for verdict in verdicts:
                self.baselines.hear(verdict)
            self.add_baselines()  # first, as the worker that is free now is of the kind that lacks them
            self.fill()  # a worker that waits costs more than a row that waits
            for verdict in verdicts:
                self.settle(verdict)
            self.tell()
        self.stopped = self.scheduler.why_give_up()

    def fill(self) -> None:
        """Start jobs. StoreError if their folders cannot be written."""
        with writing(self.work):
            self.scheduler.fill()

    def add_baselines(self) -> None:
        """Queue those that a kind of device turned out to lack."""
        for job in self.baselines.missing():
            self.scheduler.queue.appendleft(job)
            self.state.asked += len(job.lanes)

    def settle(self, verdict: Verdict) -> None:
        """Store or note. A folder goes last: until then a new driver can take the result in."""
        outcome = verdict.outcome
        job, folder, state = outcome.job, outcome.folder, self.state
        self.settled += 1
        if outcome.result is not None:
            rows = result_rows(job, outcome.result, self.setting.context(job))
            self.add(rows, folder.name)
            state.diverged += sum(row["status"] == "diverged" for row in rows)
            state.done += sum(row["status"] == "done" for row in rows)
            state.pruned += sum(row["status"] == "pruned" for row in rows)
            self.clock.add(job, outcome.pace)
            self.judge()
            drop(folder)
        elif verdict.what == "give up":
            self.add(failed_rows(job, outcome.reason, self.setting.context(job)), folder.name)
            keep_failed(folder)
            state.failed += len(job.lanes)
            state.note_failure(failure(job, folder.name, outcome.reason, str(self.store.path)))
        elif verdict.what == "again":
            state.note_retry(f"{outcome.reason}: {verdict.note}")
            if outcome.kind not in GO_ON and not self.scheduler.holds(folder):
                shutil.rmtree(folder, ignore_errors=True)
        elif not (folder / CHECKPOINT).exists():
            shutil.rmtree(folder, ignore_errors=True)

    def add(self, rows: list[dict], name: str) -> None:
        """Store rows; now and then join the files that this makes."""
        self.store.add(rows, name)
        self.added += 1
        if self.added % COMPACT_FILES == 0:
            self.store.compact()

    def judge(self) -> None:
        """The best gaps so far. On a big store this takes a while: it may use a hundredth of the time."""
        if time.monotonic() >= self.judge_after:
            begin = time.process_time()
            self.state.best = best_gaps(self.store, self.setting)
            self.judge_after = time.monotonic() + 100 * (time.process_time() - begin)

    def tell(self) -> None:
        """Bring the state up to date for the display, and now and then for other processes."""
        state, now = self.state, time.monotonic()
        if not state.ended and now - self.told < POLL_S:
            return
        self.told = now
        waiting, running = self.scheduler.waiting, self.scheduler.executor.running
        state.jobs_waiting = len(waiting)
        state.running = [job_state(run) for run in running]
        state.elapsed_s = now - self.begin
        state.eta_s = state.trials_eta_s if state.trials_asked else self.clock.eta_s(waiting, running)
        if state.ended or now - self.written >= STATE_S:
            write_state(self.store.path, state)
            self.written = now
        self.show(state)


def failure(job: Job, name: str, reason: str, store: str) -> Failure:
    """What there is to say about a job that was given up."""
    labels = list(dict.fromkeys(lane.recipe.label() for lane in job.lanes))
    recipe = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
    again = shlex.join(["fp4dse", "run-one", name, "--store", store])
    return Failure(reason=reason, lanes=len(job.lanes), jobs=1, job=name, recipe=recipe, again=again)


def best_gaps(store: Store, setting: Setting) -> list[str]:
    """Per task, the quantizing recipe with the lowest gap to BF16 in this setting, as a sentence."""
    table = summarize(store.runs(SUMMARIZED))
    shared = [name for name in SETTING if name not in ("device_class", "software_class")]  # the workers' own
    lines = []
    for (task, preset), context in setting.contexts.items():
        here = (table[shared] == [context[name] for name in shared]).all(axis="columns")
        gaps = table[here & table["points"].gt(0) & table["gap"].lt(math.inf)]
        if len(gaps):
            best = gaps.loc[gaps["gap"].idxmin()]
            lines.append(
                f"{task}:{preset} {percent(best['gap'])} % with {best['label']} ({counted(best['pairs'], 'seed')})"
            )
    return lines


@dataclass
class _Asked:
    """Whether someone used `fp4dse stop`, looked up now and then."""

    store: Place
    looked: float = 0.0

    def __call__(self) -> bool:
        if time.monotonic() - self.looked < STATE_S:
            return False
        self.looked = time.monotonic()
        return stop_requested(self.store)


def _reason_to_stop(signals: list[str], begin: float, budget_s: float | None, asked: Callable[[], bool]) -> str | None:
    if signals:
        return f"stopped by {signals[0]}"
    if budget_s is not None and time.monotonic() - begin >= budget_s:
        return f"the budget of {budget_s:g} s is spent"
    return "stopped by `fp4dse stop`" if asked() else None
