"""The interface between a sweep and its executor, and the records that pass between them.

An executor takes jobs and says how each ended. What follows from it (store, split, retry) is decided in
sweeps/running/scheduler.py, so that every executor leads to the same rows.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.tasks.job import Job, JobResult, Progress

Kind = Literal["done", "memory", "large", "lost", "failed", "timeout", "stopped", "elsewhere"]


class Pace(msgspec.Struct, frozen=True):
    """Seconds before training went at full speed (start, data, compiling), then `seconds` for `steps` steps.

    Full speed is taken to begin with the first report of the training phase; without one, all was start.
    """

    start_s: float
    seconds: float
    steps: int


class Outcome(msgspec.Struct, frozen=True):
    """The end of a job.

    kind     done (`result` is there), memory (it did not fit), large (one lane did not fit into a device that it had
             for itself), lost (what ran it went away: a signal, a node), failed (it ended with an error), timeout,
             stopped (by the driver, or because its time was nearly up), elsewhere (it is for another kind of device
             than the worker that it was given to)
    reason   one line for people where it is not done
    pace     what can be learnt from it about the time that others will take
    """

    job: Job
    folder: Path
    kind: Kind
    pace: Pace
    result: JobResult | None = None
    reason: str = ""


@dataclass
class Running:
    """A job that was started, with its last report. Times are time.monotonic()."""

    job: Job
    folder: Path
    started_at: float = field(default_factory=time.monotonic)
    reported_at: float = field(default_factory=time.monotonic)
    progress: Progress | None = None
    full_speed: tuple[float, int] | None = None  # time and step of the first report of the training phase

    def report(self, progress: Progress) -> None:
        """Take a report in."""
        self.progress, self.reported_at = progress, time.monotonic()
        if self.full_speed is None and progress.phase == "train":
            self.full_speed = (self.reported_at, progress.step)

    def pace(self) -> Pace:
        """The pace so far."""
        now = time.monotonic()
        if self.full_speed is None or self.progress is None:
            return Pace(now - self.started_at, 0.0, 0)
        since, step = self.full_speed
        return Pace(since - self.started_at, now - since, self.progress.step - step)


class Executor(Protocol):
    """Takes jobs while it has room; `poll` and `stop` say how jobs ended, each job once."""

    @property
    def running(self) -> Sequence[Running]: ...

    @property
    def capacity(self) -> int:
        """Jobs that run at a time."""

    @property
    def trouble(self) -> str | None:
        """The problem that the sweep waits to be over, in words; None if there is none."""

    @property
    def elsewhere(self) -> str | None:
        """The jobs that wait for a machine that nobody here can ask, in words: the sweep ends; None if none do."""

    @property
    def has_room(self) -> bool: ...

    def takes(self, job: Job, /) -> bool:
        """True if a job that is for one kind of device may be started now, or if only the worker will know."""

    def start(self, job: Job, context: dict[str, Any], /) -> None:
        """Take a job. OSError if its folder cannot be written."""

    def poll(self, wait_s: float) -> list[Outcome]:
        """The jobs that ended; waits for one for up to `wait_s` seconds."""

    def stop(self) -> list[Outcome]:
        """End what runs, asking first; jobs that were just finished come back as done."""


def most_lanes(options: Mapping[str, str]) -> int:
    """Option `lanes`: the most that a job has. ConfigError if it is no number above 0."""
    lanes = options["lanes"]
    if not lanes.isdigit() or not int(lanes):
        raise ConfigError("--option lanes", lanes, "a whole number above 0: most lanes of a job")
    return int(lanes)


def check_options(executor: str, options: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The `--option`s of an executor, with its defaults. ConfigError on one that it does not have."""
    for key in options:
        if key not in known:
            raise ConfigError(f"--option of {executor}", key, ", ".join(known) or "none")
    return {**known, **options}
