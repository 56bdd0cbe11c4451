"""The task that Ray runs on a machine of its choice: one job, run as the local executor does.

Nothing stays behind. A job's folder is deleted with its task; that of a task that was killed is deleted by the next one
on the machine, or by the driver of a cluster of our own. Whose task lives is told by a lock that ends with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.sweeps.executors.local import LocalExecutor, run_alone
from fp4dse.sweeps.executors.outcome import Kind, Pace
from fp4dse.sweeps.jobs.jobfolder import job_name, write_job
from fp4dse.tasks.job import CHECKPOINT, RESULT, STDERR, Job, Progress

REPORT_S = 1.0
PREFIX = "fp4dse-ray-"
YOUNG_S = 60.0
"""A folder that is younger may not be locked yet."""


class TaskResult(msgspec.Struct, frozen=True):
    """The return value of a task: an Outcome without paths, the worker's result as it wrote it, its standard error."""

    kind: Kind
    pace: Pace
    reason: str
    out: bytes | None
    stderr: bytes
    checkpoint: bytes | None


def work(
    job: bytes, checkpoint: bytes | None, command: tuple[str, ...], limit_s: float, silence_s: float, mailbox: Any
) -> bytes:
    """The task: runs on the machine that Ray chose, on the main thread of a Ray worker."""
    import ray

    found = msgspec.json.decode(job, type=Job)
    name, reported_at = job_name(found), time.monotonic()

    def on_report(progress: Progress | None) -> bool:
        nonlocal reported_at
        if time.monotonic() - reported_at < REPORT_S:
            return False
        reported_at = time.monotonic()
        with contextlib.suppress(ray.exceptions.RayError):  # a report that is lost harms nothing
            return bool(ray.get(mailbox.put.remote(name, progress and msgspec.json.encode(progress))))
        return False

    executor = _executor_here(tuple(command), limit_s, silence_s)
    with folder_of_task() as folder:
        write_job(folder / name, found, {})
        if checkpoint:
            (folder / name / CHECKPOINT).write_bytes(checkpoint)
        outcome = run_alone(executor, folder / name, found, on_report)
        out = read_if_there(folder / name / RESULT) if outcome.result else None
        saved = None if outcome.result else read_if_there(folder / name / CHECKPOINT)
        stderr = (folder / name / STDERR).read_bytes()[-100_000:]
    return msgspec.msgpack.encode(TaskResult(outcome.kind, outcome.pace, outcome.reason, out, stderr, saved))


@contextlib.contextmanager
def folder_of_task() -> Iterator[Path]:
    """A fresh folder for the time of a task; those of tasks that were killed are deleted."""
    clear_folders()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def clear_folders(young_s: float = YOUNG_S) -> None:
    """Delete the folders of tasks that no longer live."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # it is another user's, or locked, or has just gone
            lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime >= young_s:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def read_if_there(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


_here: dict[str | None, LocalExecutor] = {}
"""The executor of this Ray worker, whose warm process the next task finds, by the GPUs that Ray gave it."""


def _executor_here(command: tuple[str, ...], limit_s: float, silence_s: float) -> LocalExecutor:
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cards not in _here or _here[cards].command != command:
        for executor in _here.values():
            executor.stop()
        _here.clear()
        _here[cards] = LocalExecutor(Path(), [{}], command, limit_s, silence_s)
    return _here[cards]


class Mailbox:
    """An actor: the last report of every job, and whether the driver wants them to stop."""

    def __init__(self) -> None:
        self.reports: dict[str, bytes] = {}
        self.stopping = False

    def put(self, name: str, report: bytes | None) -> bool:
        """A report comes in, the wish to stop goes back."""
        if report:
            self.reports[name] = report
        return self.stopping

    def take(self) -> dict[str, bytes]:
        """The reports since the last call."""
        taken, self.reports = self.reports, {}
        return taken

    def stop(self) -> None:
        self.stopping = True
