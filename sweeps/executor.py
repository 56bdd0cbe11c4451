"""Runs jobs on this machine, each in a process of its own: whatever happens to one, the others and the driver go on.

A slot has a worker (worker.py) that is started for its first job and kept for the next as long as jobs end well; a
worker whose job ended in any other way is ended with all that it started. A job has a limit on its time and on its
silence; its standard error is kept.
The executor says how a job ended. What follows from it (store, split, retry) is decided in sweep.py.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from fp4dse.sweeps.jobfolder import job_name, last_words, read_result, write_job
from fp4dse.sweeps.worker import Worker
from fp4dse.tasks.job import OUT_OF_MEMORY, Ended, Job, JobResult, Progress

WORKER = (sys.executable, "-P", "-m", "fp4dse.tasks.worker")
"""Command of a worker; tasks/worker.py says how to speak with it. -P: the working directory is no place to import
from."""
LIMIT_S = 6 * 3600.0
SILENCE_S = 900.0
"""A job that reports nothing for this long hangs; compiling, the longest silence of a sound one, takes a minute."""


class Pace(msgspec.Struct, frozen=True):
    """Seconds before training went at full speed (start, data, compiling), then `seconds` for `steps` steps.

    Full speed is taken to begin with the first report of the training phase; without one, all was start.
    """

    start_s: float
    seconds: float
    steps: int


class Outcome(msgspec.Struct, frozen=True):
    """How a job ended.

    kind     done (`result` is there), memory (it did not fit), failed, timeout, stopped (by the driver)
    reason   one line for people where it is not done
    pace     what can be learnt from it about the time that others will take
    """

    job: Job
    folder: Path
    kind: Literal["done", "memory", "failed", "timeout", "stopped"]
    pace: Pace
    result: JobResult | None = None
    reason: str = ""


@dataclass
class Running:
    """A job in the hands of a worker, with its last report. Times are time.monotonic()."""

    job: Job
    folder: Path
    slot: int
    worker: Worker
    started: float
    heard: float
    progress: Progress | None = None
    full_speed: tuple[float, int] | None = None  # time and step of the first report of the training phase
    code: int | None = None  # how the job's process ended
    ending: tuple[Literal["timeout", "stopped"], str] | None = None  # why we killed it

    def pace(self) -> Pace:
        """So far."""
        now = time.monotonic()
        if self.full_speed is None or self.progress is None:
            return Pace(now - self.started, 0.0, 0)
        since, step = self.full_speed
        return Pace(since - self.started, now - since, self.progress.step - step)


@dataclass
class Executor:
    """As many workers at a time as there are `slots`; a slot is a worker's extra environment variables."""

    work: Path
    slots: list[dict[str, str]]
    command: tuple[str, ...] = WORKER
    limit_s: float = LIMIT_S
    silence_s: float = SILENCE_S
    running: list[Running] = field(default_factory=list)
    _idle: dict[int, Worker] = field(default_factory=dict)  # by slot
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    @property
    def has_room(self) -> bool:
        return len(self.running) < len(self.slots)

    def start(self, job: Job, context: dict) -> None:
        """Give a job to a worker. OSError if its folder cannot be written."""
        slot = min(set(range(len(self.slots))) - {run.slot for run in self.running})
        folder = self.work / job_name(job)
        write_job(folder, job, context)
        worker = self._idle.pop(slot, None)
        if worker and not worker.alive:
            worker.end()
            worker = None
        if worker is None:
            threads = str(job.threads)
            variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **self.slots[slot]}
            worker = Worker(self.command, variables, folder / "stderr.txt")
        worker.give(folder / "job.json", folder / "out.json", folder / "stderr.txt")
        now = time.monotonic()
        run = Running(job, folder, slot, worker, started=now, heard=now)
        self._selector.register(worker.stdout, selectors.EVENT_READ, run)
        self.running.append(run)

    def poll(self, wait_s: float) -> list[Outcome]:
        """Read reports for up to `wait_s` seconds, end what is over its limit, return the jobs that ended."""
        for key, _ in self._selector.select(wait_s):
            self._read(key.data)
        now = time.monotonic()
        for run in self.running:
            if now - run.started > self.limit_s:
                self._kill(run, "timeout", f"no result within {self.limit_s:.0f} s")
            elif now - run.heard > self.silence_s:
                self._kill(run, "timeout", f"no report for {self.silence_s:.0f} s")
        return self._collect()

    def stop(self) -> list[Outcome]:
        """End all workers; jobs that were just finished come back as done."""
        for run in self.running:
            self._kill(run, "stopped", "stopped")
        for run in self.running:
            run.worker.process.wait()
        outcomes = self._collect()
        while self._idle:
            self._idle.popitem()[1].end()
        return outcomes

    def _read(self, run: Running) -> None:
        """Take in what a worker says. What is neither a report nor the end is ignored: libraries print what they
        like."""
        lines = run.worker.hear()
        if lines is None:
            self._selector.unregister(run.worker.stdout)
            return
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                run.progress = msgspec.json.decode(line, type=Progress)
                run.heard = time.monotonic()
                if run.full_speed is None and run.progress.phase == "train":
                    run.full_speed = (run.heard, run.progress.step)
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                run.code = msgspec.json.decode(line, type=Ended).exit

    def _kill(self, run: Running, kind: Literal["timeout", "stopped"], reason: str) -> None:
        run.ending = run.ending or (kind, reason)
        run.worker.kill()

    def _collect(self) -> list[Outcome]:
        ended = [run for run in self.running if run.code is not None or not run.worker.alive]
        for run in ended:
            self.running.remove(run)
            if run.worker.stdout in self._selector.get_map():
                self._selector.unregister(run.worker.stdout)
            if run.code == 0 and not run.ending:
                self._idle[run.slot] = run.worker
            else:
                died = run.worker.end()
                run.code = died if run.code is None else run.code
        return [_judge(run) for run in ended]


def _judge(run: Running) -> Outcome:
    code = run.code
    assert code is not None
    kind: Literal["memory", "failed", "timeout", "stopped"]
    result = read_result(run.folder, run.job)
    if result is not None:  # complete because it is written atomically, however the process ended
        return Outcome(run.job, run.folder, "done", run.pace(), result)
    if run.ending:
        kind, reason = run.ending
    elif code == OUT_OF_MEMORY:
        kind, reason = "memory", "out of memory"
    elif code == -signal.SIGKILL:
        kind, reason = "memory", "killed by the system, which it does when memory runs out"
    else:
        words = last_words(run.folder)
        how = f"ended by {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
        kind, reason = "failed", f"{how}: {words}" if words else f"{how}, without a result or a word"
    return Outcome(run.job, run.folder, kind, run.pace(), reason=reason)
