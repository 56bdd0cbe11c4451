"""Runs jobs on this machine, each in a fresh process: whatever happens to one, the others and the driver go on.

A worker has a session of its own, so that a stop reaches everything it started and Ctrl-C reaches the driver alone;
it dies with the driver (leash.py); it has a limit on its time and on its silence; its standard error is kept.
The executor says how a job ended. What follows from it (store, split, retry) is decided in sweep.py.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

import msgspec

from fp4dse.sweeps.jobfolder import job_name, last_words, read_result, write_job
from fp4dse.tasks.job import OUT_OF_MEMORY, Job, JobResult, Progress

WORKER = (sys.executable, "-P", "-m", "fp4dse.tasks.worker")
"""Command that is given `JOB.json OUT.json`. -P: the working directory is no place to import from."""
LIMIT_S = 6 * 3600.0
SILENCE_S = 900.0
"""A worker that reports nothing for this long hangs; compiling, the longest silence of a sound one, takes a minute."""

_MAX_LINE = 1 << 20
_LEASH = (sys.executable, "-I", "-S", str(Path(__file__).with_name("leash.py")))


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
    process: subprocess.Popen
    started: float
    heard: float
    progress: Progress | None = None
    full_speed: tuple[float, int] | None = None  # time and step of the first report of the training phase
    buffer: bytes = b""
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
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    @property
    def has_room(self) -> bool:
        return len(self.running) < len(self.slots)

    def start(self, job: Job, context: dict) -> None:
        """Give a job to a worker. OSError if its folder cannot be written."""
        slot = min(set(range(len(self.slots))) - {run.slot for run in self.running})
        folder = self.work / job_name(job)
        write_job(folder, job, context)
        driver = (*_LEASH, str(os.getpid()))
        threads = str(job.threads)
        with open(folder / "stderr.txt", "wb") as stderr:
            process = subprocess.Popen(
                [*driver, *self.command, str(folder / "job.json"), str(folder / "out.json")],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **self.slots[slot]},
            )
        now = time.monotonic()
        run = Running(job, folder, slot, process, started=now, heard=now)
        os.set_blocking(_stdout(run).fileno(), False)
        self._selector.register(_stdout(run), selectors.EVENT_READ, run)
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
        """Kill all workers; jobs that were just finished come back as done."""
        for run in self.running:
            self._kill(run, "stopped", "stopped")
        for run in self.running:
            run.process.wait()
        return self._collect()

    def _read(self, run: Running) -> None:
        """Take in a worker's reports. What is no report is ignored: libraries print what they like."""
        data = _stdout(run).read(_MAX_LINE)
        if data is None:
            return
        if data == b"":
            self._selector.unregister(_stdout(run))
            return
        *lines, run.buffer = (run.buffer + data).split(b"\n")
        run.buffer = run.buffer[-_MAX_LINE:]
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                run.progress = msgspec.json.decode(line, type=Progress)
                run.heard = time.monotonic()
                if run.full_speed is None and run.progress.phase == "train":
                    run.full_speed = (run.heard, run.progress.step)

    def _kill(self, run: Running, kind: Literal["timeout", "stopped"], reason: str) -> None:
        run.ending = run.ending or (kind, reason)
        kill_group(run.process.pid)

    def _collect(self) -> list[Outcome]:
        ended = [run for run in self.running if run.process.poll() is not None]
        for run in ended:
            kill_group(run.process.pid)  # compilers and such that a dead worker left behind
            if _stdout(run) in self._selector.get_map():
                self._selector.unregister(_stdout(run))
            _stdout(run).close()
            self.running.remove(run)
        return [_judge(run) for run in ended]


def kill_group(pid: int) -> None:
    """SIGKILL to the process group that `pid` leads, if there is anyone left in it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _stdout(run: Running) -> IO[bytes]:
    assert run.process.stdout is not None
    return run.process.stdout


def _judge(run: Running) -> Outcome:
    code = run.process.returncode
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
