"""The program of an array task of SLURM: a loop that claims the next job that waits, and runs it as the local executor
does, until there is none or its time is nearly up. It knows the driver only by the files that slurm.py lists.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from fp4dse.dse.program.whole_file import whole_file
from fp4dse.sweeps.executors.local import LocalExecutor, run_alone
from fp4dse.sweeps.executors.outcome import Kind, Pace
from fp4dse.sweeps.jobs.jobfolder import read_job
from fp4dse.tasks.job import Progress

REPORT_S = 1.0
"""Between reports of a job's progress, and looks of the driver at them."""


class End(msgspec.Struct, frozen=True):
    """`ended.json`: an Outcome without job and result, which lie beside it."""

    kind: Kind
    reason: str
    pace: Pace


@dataclass
class ArrayTask:
    """The program of an array task: a loop over jobs."""

    pool: Path
    work: Path
    command: tuple[str, ...]
    limit_s: float
    idle_s: float
    warned: bool = False
    reported_at: float = 0.0

    def __call__(self) -> None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, self._warn)
        executor = LocalExecutor(self.work, [{}], self.command, self.limit_s)
        last = time.monotonic()
        while not self._is_over() and time.monotonic() - last < self.idle_s:
            folder = claim(self.pool, self.work, this_array_task())
            if folder is None:
                time.sleep(0.5)
                continue
            with contextlib.suppress(OSError, msgspec.DecodeError):  # the driver took the job back
                job, _ = read_job(folder)
                outcome = run_alone(executor, folder, job, partial(self._report, folder))
                end = End(outcome.kind, outcome.reason, outcome.pace)
                if self.warned:  # SLURM's signal reaches the worker too, and a program that does not expect it dies
                    end = End("stopped", "stopped, as its time was nearly up", outcome.pace)
                _write(folder / "ended.json", end)
            last = time.monotonic()
        executor.stop()

    def _warn(self, *_: object) -> None:
        self.warned = True

    def _is_over(self) -> bool:
        return self.warned or (self.pool / "closed").exists() or not self.pool.exists()

    def _report(self, folder: Path, progress: Progress | None) -> bool:
        if time.monotonic() - self.reported_at < REPORT_S:
            return self.warned
        self.reported_at = time.monotonic()
        if progress:
            with contextlib.suppress(OSError):
                _write(folder / "progress.json", progress)
        return self._is_over()


def this_array_task() -> str:
    """The name under which squeue lists the task that this process is."""
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array else os.environ.get("SLURM_JOB_ID", "none")


def claim(pool: Path, work: Path, task_id: str) -> Path | None:
    """The folder of the next job that waits, now ours; None if there is none."""
    try:
        waiting = sorted(os.listdir(pool / "queue"))
    except FileNotFoundError:
        return None
    for entry in waiting:
        name = entry.partition("-")[2]
        with contextlib.suppress(FileNotFoundError):  # another was quicker
            os.rename(pool / "queue" / entry, pool / "claimed" / f"{name}@{task_id}")
            return work / name
    return None


def _write(path: Path, record: msgspec.Struct) -> None:
    with whole_file(path) as hidden:
        hidden.write_bytes(msgspec.json.encode(record))
