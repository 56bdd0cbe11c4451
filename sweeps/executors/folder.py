"""Leaves jobs in a folder, for a machine that this one cannot reach, and takes in what it brought back.

    fp4dse sweep SPACE --executor folder --option at=DIR --option lanes=64       writes the jobs that are missing
    python -m fp4dse.tasks.worker --folder DIR --budget 3000                     trains them, where DIR was carried to
    fp4dse sweep SPACE --executor folder --option at=DIR --option lanes=64       stores what DIR holds when it is back

DIR is the sweep's folder of jobs (jobfolder.py): finished ones are stored when a sweep begins, as those of a driver
that died are; unfinished ones keep their checkpoints, and what was not begun is planned anew. The other machine needs
torch, msgspec and this package, no store and no network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4dse.dse import ConfigError
from fp4dse.results.text.ratios import counted
from fp4dse.sweeps.executors.outcome import Outcome, Running, check_options, most_lanes
from fp4dse.sweeps.jobs.jobfolder import job_name, part_of, write_job
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.tasks.job import Job

OPTIONS = {"at": "", "lanes": "64"}


@dataclass
class FolderExecutor:
    """Writes every job that it is given, in parts of at most `lanes` lanes; none comes back while the sweep runs."""

    work: Path
    lanes: int
    capacity: int = 1
    trouble: str | None = None
    has_room: bool = True
    running: list[Running] = field(default_factory=list)
    asked: bool = False

    @property
    def elsewhere(self) -> str | None:
        """The jobs that wait in the folder, once all that can be written is written."""
        if not (self.asked and self.running):
            return None
        lanes = sum(len(run.job.lanes) for run in self.running)
        return f"{counted(len(self.running), 'job')} with {counted(lanes, 'lane')} wait in {self.work}"

    def takes(self, _: Job, /) -> bool:
        return True

    def start(self, job: Job, context: dict[str, Any]) -> None:
        """Write a job where a worker finds it."""
        for first in range(0, len(job.lanes), self.lanes):
            part = part_of(job, range(first, min(first + self.lanes, len(job.lanes))))
            folder = self.work / job_name(part)
            write_job(folder, part, context)
            self.running.append(Running(part, folder))

    def poll(self, _wait_s: float) -> list[Outcome]:
        self.asked = True
        return []

    def stop(self) -> list[Outcome]:
        """Nothing ends: the jobs stay in the folder."""
        self.running.clear()
        return []


def folder_of(options: Mapping[str, str]) -> Path:
    """The folder of option `at`. ConfigError without one."""
    if not options.get("at"):
        raise ConfigError("--option at", None, "the folder for the jobs: --option at=DIR")
    return Path(options["at"]).absolute()


def open_folder(
    work: Path, _machine: Machine, _command: tuple[str, ...], _limit_s: float, options: Mapping[str, str]
) -> FolderExecutor:
    """Check the options; the folder itself is `work`."""
    return FolderExecutor(work, most_lanes(check_options("folder", options, OPTIONS)))
