"""The loop of a sweep or a search between the executor and the store: jobs out, rows in, whatever happens on the way.

scheduler.py decides what follows from how a job ended; here rows are stored, messages written and the display fed.
"""

from __future__ import annotations

import contextlib
import contextvars
import math
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fp4dse.dse import StoreError
from fp4dse.results import Store, summarize
from fp4dse.results.stats.recipes.summary import SUMMARIZED
from fp4dse.results.store.atomic import writing
from fp4dse.results.store.pricing import PRICED
from fp4dse.results.text.ratios import change, counted, noun, written_in
from fp4dse.sweeps.executors import GRACE_S
from fp4dse.sweeps.jobs.jobfolder import drop, keep_failed
from fp4dse.sweeps.jobs.rows import SHARED, failed_rows, result_rows
from fp4dse.sweeps.planning.setting import Setting
from fp4dse.sweeps.running.baselines import Baselines
from fp4dse.sweeps.running.resume import with_leftovers
from fp4dse.sweeps.running.scheduler import Scheduler, Verdict
from fp4dse.sweeps.running.state import Clock, Failure, SweepState, job_state
from fp4dse.sweeps.running.store_writer import PATIENCE_S, StoreWriter
from fp4dse.tasks.job import CHECKPOINT, Job

POLL_S = 0.2
FIRST_BEST_S = 2.0
"""Seconds after its start from which a sweep looks for the best gaps: a shorter one is over before they are shown."""
BLAMELESS = ("lost", "stopped", "elsewhere")
"""A job that ended so has done nothing wrong and goes on from its checkpoint; after an error it begins anew."""


@dataclass
class Sweep:
    """The loop between the scheduler and the store. `leftovers`: jobs that an earlier driver began;
    `events` counts jobs that ended and jobs that were stored; `stopped`: why lanes are left."""

    store: Store
    work: Path
    scheduler: Scheduler
    setting: Setting
    state: SweepState
    leftovers: list[Job]
    record: bool
    signals: list[str]
    why_stop: Callable[[], str | None]
    show: Callable[[SweepState], None]
    stopped: str | None = None
    events: int = 0
    shown_at: float = 0.0
    idle_since: float = math.inf
    begin: float = field(default_factory=time.monotonic)
    next_best_at: float = field(init=False)
    clock: Clock = field(init=False)
    baselines: Baselines = field(init=False)
    writer: StoreWriter[Verdict] = field(init=False)
    best_thread: threading.Thread = field(default_factory=threading.Thread)

    def __post_init__(self) -> None:
        steps = {(task.name, task.preset): task.steps for task in self.setting.tasks}
        self.next_best_at = self.begin + FIRST_BEST_S
        self.clock = Clock(steps, len(self.setting.machine.slots))
        self.baselines = Baselines(self.setting, set(), self.record)
        self.writer = StoreWriter(self.store)

    @property
    def open_jobs(self) -> list[Job]:
        """Jobs that wait, run, or are not stored yet."""
        storing = [verdict.outcome.job for verdict, *_ in list(self.writer.waiting)]
        return [*self.scheduler.waiting, *(run.job for run in self.scheduler.executor.running), *storing]

    def queue(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; those that an earlier driver began go on from their checkpoints."""
        jobs = with_leftovers(jobs, self.leftovers)
        self.leftovers = [job for job in self.leftovers if job not in jobs]
        self.baselines.expect(jobs)
        self.scheduler.queue.extend(msgspec.structs.replace(job, record=self.record) for job in jobs)

    def run(self, feed: Callable[[], bool] = lambda: False) -> None:
        """Run until nothing is left, or there is a reason to stop. `feed` may queue more; True: it wants to go on at
        once."""
        self.add_baselines()
        while (busy := feed()) or not self.is_over():
            self.stopped = self.why_stop() or self.scheduler.why_give_up()
            if self.stopped:
                for verdict in self.scheduler.stop():
                    self.handle(verdict)
                break
            self.start_jobs()
            verdicts = self.scheduler.poll(0.0 if busy or self.scheduler.is_over else POLL_S)
            for verdict in verdicts:
                self.baselines.note(verdict)
            self.add_baselines()  # first, as the worker that is free now is of the kind that lacks them
            self.start_jobs()  # a worker that waits costs more than a row that waits
            for verdict in verdicts:
                self.handle(verdict)
            if verdicts:
                self.writer.finish(POLL_S)  # most often it takes milliseconds, and a search goes on at once
            self.note_stored()
            self.refresh()
        self.stopped = self.stopped or self.scheduler.why_give_up()
        self.writer.last_try(GRACE_S)
        while self.note_stored():
            pass
        if self.writer.waiting:
            raise self.writer.refusal(self.work)

    def close(self) -> None:
        """Stop the workers, and wait for the threads."""
        self.scheduler.executor.stop()
        self.writer.close()
        if self.best_thread.ident:
            self.best_thread.join(GRACE_S)

    def is_over(self) -> bool:
        """Nothing waits or runs, and all is stored, or cannot be. Waits a little for the last rows."""
        if not self.scheduler.is_over:
            self.idle_since = math.inf
            return False
        self.idle_since = min(self.idle_since, time.monotonic())
        self.writer.finish(POLL_S)
        if self.note_stored():  # `feed` does not know of them yet
            return False
        return not self.writer.waiting or time.monotonic() - self.idle_since > PATIENCE_S

    def start_jobs(self) -> None:
        """Start jobs. StoreError if their folders cannot be written."""
        with writing(self.work):
            self.scheduler.fill()

    def add_baselines(self) -> None:
        """Queue baselines that a kind of device turned out to lack."""
        for job in self.baselines.missing():
            self.scheduler.queue.appendleft(job)
            self.state.asked += len(job.lanes)

    def handle(self, verdict: Verdict) -> None:
        """Act on a verdict. A folder is deleted last: until then a new driver can take the result in."""
        outcome = verdict.outcome
        job, folder = outcome.job, outcome.folder
        self.events += 1
        if outcome.result is not None:
            self.writer.put(verdict, result_rows(job, outcome.result, self.setting.context(job)), folder.name)
            self.clock.add(job, outcome.pace)
        elif verdict.action == "give up":
            self.writer.put(verdict, failed_rows(job, outcome.reason, self.setting.context(job)), folder.name)
        elif verdict.action == "retry":
            self.state.note_retry(f"{outcome.reason}: {verdict.note}")
            if outcome.kind not in BLAMELESS and not self.scheduler.runs_in(folder):
                shutil.rmtree(folder, ignore_errors=True)
        elif not (folder / CHECKPOINT).exists():
            shutil.rmtree(folder, ignore_errors=True)

    def note_stored(self) -> int:
        """Count what the store has taken, and let go of its folders; returns how many jobs. StoreError if it takes no
        more."""
        state = self.state
        stored = self.writer.stored()
        for verdict in stored:
            outcome, folder = verdict.outcome, verdict.outcome.folder
            self.events += 1
            if outcome.result is None:
                keep_failed(folder)
                state.failed += len(outcome.job.lanes)
                state.note_failure(failure(outcome.job, folder.name, outcome.reason, str(self.store.path)))
                continue
            statuses = [lane.status for lane in outcome.result.lanes]
            state.done += statuses.count("done")
            state.diverged += statuses.count("diverged")
            state.pruned += statuses.count("pruned")
            drop(folder)
        if stored and time.monotonic() >= self.next_best_at and not self.best_thread.is_alive():
            here = contextvars.copy_context()
            self.best_thread = threading.Thread(target=here.run, args=(self.find_best,), name="best", daemon=True)
            self.best_thread.start()
        return len(stored)

    def find_best(self) -> None:
        """Find the best gaps so far, on a thread of its own. On a big store this takes a while: it may use a hundredth
        of the time. A store that cannot be read now is read next time."""
        begin = time.thread_time()
        with contextlib.suppress(OSError, StoreError):
            self.state.best = best_gaps(self.store, self.setting)
        self.next_best_at = time.monotonic() + 100 * (time.thread_time() - begin)

    def refresh(self) -> None:
        """Bring the state up to date, for the display and for the heartbeat."""
        state, now = self.state, time.monotonic()
        if not state.ended and now - self.shown_at < POLL_S:
            return
        self.shown_at = now
        waiting, running = self.scheduler.waiting, self.scheduler.executor.running
        state.jobs_waiting = len(waiting)
        state.running = [job_state(run) for run in running]
        state.elapsed_s = now - self.begin
        state.eta_s = state.trials_eta_s if state.trials_asked else self.clock.eta_s(waiting, running)
        state.trouble = self.writer.trouble() or self.scheduler.executor.trouble
        self.show(state)


def failure(job: Job, name: str, reason: str, store: str) -> Failure:
    """The record of a job that was given up, for the state and for people."""
    labels = list(dict.fromkeys(lane.recipe.label() for lane in job.lanes))
    recipe = labels[0] if len(labels) == 1 else f"{labels[0]} and {len(labels) - 1} more"
    command = shlex.join(["fp4dse", "run-one", name, "--store", store])
    return Failure(reason=reason, lanes=len(job.lanes), jobs=1, job=name, recipe=recipe, command=command)


_READ = [name for name in SUMMARIZED if name not in PRICED]


def best_gaps(store: Store, setting: Setting) -> list[str]:
    """Per task, the quantizing recipe with the lowest gap to BF16 in this setting, as a sentence."""
    table = summarize(store.runs(_READ), "points")  # overheads would take the recipes
    lines = []
    for (task, preset), context in setting.contexts.items():
        here = (table[SHARED] == [context[name] for name in SHARED]).all(axis="columns")
        gaps = table[here & table["points"].gt(0) & table["gap"].lt(math.inf)]
        if len(gaps):
            best = gaps.loc[gaps["gap"].idxmin()]
            with written_in(context.get("gap_unit")):
                lines.append(
                    f"{task}:{preset} {change(best['gap'])} in {noun()} against BF16 with {best['label']} "
                    f"({counted(best['pairs'], 'seed')})"
                )
    return lines
