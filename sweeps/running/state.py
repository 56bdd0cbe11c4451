"""The state of a sweep: one record, rewritten in `<store>/state.json` while it runs, shown by `fp4dse status`.

The same record feeds the live display, so both say the same.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse import StoreError
from fp4dse.dse.reading.files import decode_json
from fp4dse.results.store.locks import is_alive
from fp4dse.results.store.remote import AnyPath, RemotePath, locate, without_retries
from fp4dse.sweeps.executors import Pace, Running
from fp4dse.tasks.job import Job

STALE_S = 30.0
"""A driver on another host that has not written its state for this long is looked at twice."""
HEARTBEAT_S = 2.0
"""Seconds after which a driver writes its state again."""
WATCH_S = 2.5 * HEARTBEAT_S


class JobState(msgspec.Struct, frozen=True):
    """A running job. `loss`: median training loss of the lanes that are alive, None before the first report."""

    task: str
    preset: str
    lanes: int
    phase: str
    step: int
    steps: int
    alive: int
    loss: float | None


class Failure(msgspec.Struct):
    """Jobs that were given up for the same reason: how many, and the first of them with the command that runs it
    again."""

    reason: str
    lanes: int
    jobs: int
    job: str
    recipe: str
    command: str = msgspec.field(name="again")

    def sentence(self) -> str:
        """For people."""
        first = f"{self.jobs} jobs ({self.lanes} lanes), the first {self.job}" if self.jobs > 1 else f"job {self.job}"
        return f"{first} ({self.recipe}) failed: {self.reason}; run it in the foreground: {self.command}"


class SweepState(msgspec.Struct):
    """Counts are lanes; of a search, `asked` are those that had to be trained so far, and it counts trials as well.
    `ended`: None while running, else why it ended; `born`: the driver's, see results/store/locks.py. Times are
    seconds since 1970, but for `elapsed_s`, which no clock that jumps disturbs."""

    name: str
    asked: int
    stored: int
    jobs_waiting: int = 0
    done: int = 0
    diverged: int = 0
    pruned: int = 0
    failed: int = 0
    failures: dict[str, Failure] = {}  # by reason
    retries: dict[str, int] = {}  # reason and what was done -> jobs
    running: list[JobState] = []
    best: list[str] = []  # one sentence per task
    trials_asked: int = 0  # of a search; trials: of them told; trials_stored: of these answered from the store
    trials: int = 0
    trials_stored: int = 0
    eta_s: float | None = None
    trouble: str | None = None  # what a sweep that goes on waits for
    ended: str | None = None
    host: str = msgspec.field(default_factory=socket.gethostname)
    pid: int = msgspec.field(default_factory=os.getpid)
    born: int | None = None
    elapsed_s: float = 0.0
    started: float = msgspec.field(default_factory=time.time)
    updated: float = msgspec.field(default_factory=time.time)

    @property
    def finished(self) -> int:
        """Lanes with a result, those from earlier sweeps included."""
        return self.stored + self.done + self.diverged + self.pruned

    @property
    def lanes_per_minute(self) -> float:
        return 60 * (self.done + self.diverged + self.pruned) / max(self.elapsed_s, 1e-9)

    @property
    def trials_eta_s(self) -> float | None:
        """Seconds until a search has its trials, at the pace of those that were trained."""
        trained = self.trials - self.trials_stored
        return self.elapsed_s / trained * (self.trials_asked - self.trials) if trained else None

    def note_failure(self, failure: Failure) -> None:
        """Count a job that was given up."""
        known = self.failures.setdefault(failure.reason, failure)
        if known is not failure:
            known.jobs += failure.jobs
            known.lanes += failure.lanes

    def note_retry(self, what: str) -> None:
        """Count a job that is tried again."""
        self.retries[what] = self.retries.get(what, 0) + 1

    @property
    def driver_is_alive(self) -> bool:
        """The driver neither ended nor died. On this host the kernel knows; of another host its last sign of life
        tells, which `read_state` has put into our time."""
        if self.ended is not None:
            return False
        if self.host == socket.gethostname():
            return is_alive(self.pid, self.born)
        return abs(time.time() - self.updated) <= STALE_S

    def facts(self) -> dict[str, Any]:
        """For scripts."""
        more = {"finished": self.finished, "lanes_per_minute": self.lanes_per_minute, "alive": self.driver_is_alive}
        return {**msgspec.to_builtins(self), **more}


def job_state(run: Running) -> JobState:
    """The state of a running job."""
    progress = run.progress
    losses = [loss for loss in progress.losses if loss is not None] if progress else []
    return JobState(
        task=run.job.task,
        preset=run.job.preset,
        lanes=len(run.job.lanes),
        phase=progress.phase if progress else "start",
        step=progress.step if progress else 0,
        steps=progress.steps if progress else 0,
        alive=len(losses),
        loss=statistics.median(losses) if losses else None,
    )


def write_state(store: AnyPath, state: SweepState) -> None:
    """Replace `<store>/state.json`. A disk that takes nothing is reported where results are written, not here."""
    state.updated = time.time()
    data = msgspec.json.format(msgspec.json.encode(state))
    with contextlib.suppress(OSError):
        _replace(store, data)


def _replace(store: AnyPath, data: bytes) -> None:
    if isinstance(store, RemotePath):
        (without_retries(store) / "state.json").write_bytes(data)  # a sweep does not wait for it
    else:
        hidden = store / ".state.json"
        hidden.write_bytes(data)
        hidden.replace(store / "state.json")


def keep_bytes(store: AnyPath) -> Callable[[], None]:
    """A function that makes `<store>/state.json` what it is now; on a disk also as old, for the latest store is found
    by that."""
    data, times = None, None
    try:
        data = (without_retries(store) / "state.json").read_bytes()
        times = (store / "state.json").stat() if isinstance(store, Path) else None
    except FileNotFoundError:
        pass
    except OSError:
        return lambda: None

    def put_back() -> None:
        with contextlib.suppress(OSError):
            if data is None:
                (without_retries(store) / "state.json").unlink(missing_ok=True)
            else:
                _replace(store, data)
            if times:
                os.utime(store / "state.json", ns=(times.st_atime_ns, times.st_mtime_ns))  # type: ignore[arg-type]

    return put_back


def read_state(store: str | AnyPath) -> SweepState:
    """The state of the last sweep into a store, with `updated` as our clock has it. StoreError if there is none.

    Clocks of two hosts may differ. A driver elsewhere that seems to have written nothing for long is watched for as
    long as two of its beats take: if it writes, it lives.
    """
    store = locate(store)
    state = _read(store)
    seems_dead = state.ended is None and state.host != socket.gethostname() and not state.driver_is_alive
    if seems_dead:
        time.sleep(WATCH_S)
        before, state = state.updated, _read(store)
        if state.updated != before:
            state.updated = time.time()
    return state


def _read(store: AnyPath) -> SweepState:
    try:
        state: SweepState = decode_json((store / "state.json").read_bytes(), SweepState)
        return state
    except FileNotFoundError:
        raise StoreError(f"{store}: no sweep was run into it, it has no state.json") from None
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{store / 'state.json'}: cannot be read ({error})") from None


class Clock:
    """Estimates the time left from the pace of jobs so far: start seconds, seconds per lane and step."""

    def __init__(self, steps: dict[tuple[str, str], int], workers: int) -> None:
        self.steps, self.workers = steps, workers
        self.seen: list[tuple[Job, Pace]] = []

    def add(self, job: Job, pace: Pace) -> None:
        """Learn from a finished job."""
        self.seen.append((job, pace))

    def eta_s(self, waiting: Sequence[Job], running: Sequence[Running]) -> float | None:
        """Seconds until all are done, None as long as the speed of a task that is left is unknown."""
        now = [(run.job, run.pace()) for run in running]
        sums: dict[tuple[str, str], list[float]] = {}
        for job, pace in [*self.seen, *now]:
            total = sums.setdefault((job.task, job.preset), [0.0, 0.0])
            total[0] += pace.seconds
            total[1] += pace.steps * len(job.lanes)
        rates = {task: seconds / size for task, (seconds, size) in sums.items() if size}
        if not {(job.task, job.preset) for job in [*waiting, *(job for job, _ in now)]} <= set(rates):
            return None
        # the middle one: a worker's first job waits for what the next ones find ready
        start_s = statistics.median([pace.start_s for _, pace in self.seen or now] or [0.0])
        last = 0.0
        total_s = sum(start_s + self._full_s(job, rates) for job in waiting)
        for job, pace in now:
            left_s = max(start_s - pace.start_s, 0.0) if not pace.steps else 0.0
            left_s += self._full_s(job, rates) * (1 - pace.steps / self.steps[job.task, job.preset])
            last = max(last, left_s)
            total_s += left_s
        return max(last, total_s / self.workers)

    def _full_s(self, job: Job, rates: dict[tuple[str, str], float]) -> float:
        return rates[job.task, job.preset] * len(job.lanes) * self.steps[job.task, job.preset]
