"""Runs jobs on this machine, each in a process of its own: whatever happens to one, the others and the driver go on.

A slot has a worker (worker_process.py), started for its first job and kept for the next as long as jobs end well; a
worker whose job ended in any other way is ended with all that it started. A job has a limit on its time and on its
silence; its standard error is kept.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from fp4dse.sweeps.executors.outcome import Kind, Outcome, Running, check_options, most_lanes
from fp4dse.sweeps.executors.worker_process import Worker
from fp4dse.sweeps.jobs.jobfolder import job_name, last_words, read_result, write_job
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.tasks.job import (
    ELSEWHERE,
    JOB,
    NO_ROOM,
    OUT_OF_MEMORY,
    RESULT,
    STDERR,
    STOPPED,
    TOO_LARGE,
    WORKER,
    Ended,
    Job,
    Progress,
)

LIMIT_S = 6 * 3600.0
SILENCE_S = 900.0
"""A job that reports nothing for this long hangs; compiling, the longest silence of a sound one, takes a minute."""
DRIVER_GAP_S = 30.0
"""A driver that did not look at its workers for so long stood still itself (stopped, or its machine was suspended), and
perhaps they with it: that time is nobody's silence."""
GRACE_S = 30.0
"""Seconds that a worker that is asked to stop may take before it is killed."""
MACHINE_FAULT = re.compile(r"CUDA error|CUDNN_STATUS|NCCL error|Xid|\[Errno (5|28|116|122)\]|No space left on device")
"""Last words that blame the machine, not the program: such a job is worth more than one other try."""


@dataclass
class LocalRun(Running):
    """A job in the hands of a worker."""

    slot: int = 0
    worker: Worker = None  # type: ignore[assignment]
    code: int | None = None  # how the job's process ended
    ending: tuple[Literal["timeout", "stopped"], str] | None = None  # why we end it


@dataclass
class LocalExecutor:
    """Runs as many workers at a time as there are `slots`; a slot is a worker's extra environment variables. `kinds`:
    the device class of each, as far as it is known."""

    work: Path
    slots: list[dict[str, str]]
    command: tuple[str, ...] = WORKER
    limit_s: float = LIMIT_S
    silence_s: float = SILENCE_S
    grace_s: float = GRACE_S
    kinds: tuple[str, ...] = ()
    trouble: str | None = None
    elsewhere: str | None = None
    running: list[LocalRun] = field(default_factory=list)
    _idle: dict[int, Worker] = field(default_factory=dict)  # by slot
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    _polled: float = field(default_factory=time.monotonic)

    @property
    def capacity(self) -> int:
        return len(self.slots)

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.capacity

    def takes(self, job: Job) -> bool:
        """True if a free slot is of the kind that the job is for."""
        return any(self._suits(job, slot) for slot in self._free())

    def _free(self) -> list[int]:
        return sorted(set(range(len(self.slots))) - {run.slot for run in self.running})

    def _suits(self, job: Job, slot: int) -> bool:
        kind = job.only_on.get("device_class")
        return not kind or not self.kinds or self.kinds[slot] == kind

    def start(self, job: Job, context: dict[str, Any]) -> None:
        """Give a job to a worker. OSError if its folder cannot be written."""
        folder = self.work / job_name(job)
        write_job(folder, job, context)
        self.start_in(folder, job)

    def start_in(self, folder: Path, job: Job) -> None:
        """Give a job whose folder is written to a worker."""
        slot = min(self._free(), key=lambda slot: not self._suits(job, slot))
        worker = self._idle.pop(slot, None)
        if worker and not worker.alive:
            worker.end()
            worker = None
        if worker is None:
            threads = str(job.threads)
            variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **self.slots[slot]}
            worker = Worker(self.command, variables, folder / STDERR)
        worker.send_job(folder / JOB, folder / RESULT, folder / STDERR)
        run = LocalRun(job, folder, slot=slot, worker=worker)
        self._selector.register(worker.stdout, selectors.EVENT_READ, run)
        self.running.append(run)

    def poll(self, wait_s: float) -> list[Outcome]:
        """Read reports for up to `wait_s` seconds, end what is over its limit, return the jobs that ended."""
        begin = time.monotonic()
        if (gap_s := begin - self._polled) > DRIVER_GAP_S:
            for run in self.running:
                run.started_at = min(begin, run.started_at + gap_s)
                run.reported_at = min(begin, run.reported_at + gap_s)
        for key, _ in self._selector.select(wait_s):
            self._read(key.data)
        self._polled = now = time.monotonic()
        for run in self.running:
            if now - run.started_at > self.limit_s:
                self._kill(run, "timeout", f"no result within {self.limit_s:.0f} s")
            elif now - run.reported_at > self.silence_s:
                self._kill(run, "timeout", f"no report for {self.silence_s:.0f} s")
        return self._collect()

    def stop(self) -> list[Outcome]:
        """Ask all workers to stop and save, kill those that take too long; what was just finished comes as done."""
        for run in self.running:
            run.ending = run.ending or ("stopped", "stopped")
            run.worker.ask_to_stop()
        outcomes = []
        deadline = time.monotonic() + self.grace_s
        while self.running and time.monotonic() < deadline:
            for key, _ in self._selector.select(0.05):
                self._read(key.data)
            outcomes += self._collect()
        for run in self.running:
            self._kill(run, "stopped", "stopped")
            run.worker.process.wait()
        outcomes += self._collect()
        while self._idle:
            self._idle.popitem()[1].end()
        return outcomes

    def _read(self, run: LocalRun) -> None:
        """Take in what a worker says. What is neither a report nor the end is ignored: libraries print what they
        like."""
        lines = run.worker.read_lines()
        if lines is None:
            self._selector.unregister(run.worker.stdout)
            return
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                run.report(msgspec.json.decode(line, type=Progress))
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                run.code = msgspec.json.decode(line, type=Ended).exit

    def _kill(self, run: LocalRun, kind: Literal["timeout", "stopped"], reason: str) -> None:
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
        return [_outcome(run) for run in ended]


def run_alone(executor: LocalExecutor, folder: Path, job: Job, on_report: Callable[[Progress | None], bool]) -> Outcome:
    """Run one job on an executor of one slot, to its end. `on_report` is called several times a second with the last
    report; when it returns True, the job is asked to stop."""
    executor.start_in(folder, job)
    while not (outcomes := executor.poll(0.2)):
        if on_report(executor.running[0].progress):
            outcomes = executor.stop()
            break
    return outcomes[0]


def _outcome(run: LocalRun) -> Outcome:
    code = run.code
    assert code is not None
    kind: Kind
    result = read_result(run.folder, run.job)
    if result is not None:  # complete because it is written atomically, however the process ended
        return Outcome(run.job, run.folder, "done", run.pace(), result)
    if run.ending:
        kind, reason = run.ending
    elif code == STOPPED:
        kind, reason = "stopped", "its time was up"
    elif code == ELSEWHERE:
        kind, reason = "elsewhere", last_words(run.folder)
    elif code in (OUT_OF_MEMORY, NO_ROOM, TOO_LARGE):
        kind = "large" if code == TOO_LARGE else "memory"
        reason = last_words(run.folder, 1) or "out of memory"
    elif code == -signal.SIGKILL:
        kind, reason = "memory", "killed by the system, which it does when memory runs out"
    else:
        words = last_words(run.folder)
        how = f"ended by {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"
        kind = "lost" if code < 0 or MACHINE_FAULT.search(words) else "failed"
        reason = f"{how}: {words}" if words else f"{how}, without a result or a word"
    return Outcome(run.job, run.folder, kind, run.pace(), reason=reason)


def open_local(
    work: Path, machine: Machine, command: tuple[str, ...], limit_s: float, options: Mapping[str, str]
) -> LocalExecutor:
    """Check the options: `lanes` is the most that a job has, which planning sees to (opening.py)."""
    if check_options("local", options, {"lanes": ""})["lanes"]:
        most_lanes(options)
    return LocalExecutor(work, machine.slots, command, limit_s, kinds=machine.kinds)
