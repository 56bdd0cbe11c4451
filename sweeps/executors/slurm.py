"""Runs jobs as array tasks of SLURM, handed in through submitit. Driver and nodes share a disk, and nothing else.

An array task is a loop over jobs (slurm_task.py). So one trains many jobs, and tasks that the site starts late or kills
cost nothing but their own job. All is files in a folder of this driver, `<jobs>/../slurm/<id>/`:

    queue/000123-NAME      a job that waits, in the order in which the driver started them
    claimed/NAME@123_4     the same file, renamed by the array task 123_4 that runs it: a rename has one winner
    closed                 the driver wants no more; array tasks stop, as they do when the folder is gone
    submitit/              submitit's scripts and logs
    arrays                 ids of the arrays, so that the next driver can cancel what a killed one left

and in a job's own folder (jobfolder.py) `progress.json` and, at its end, `ended.json`. A job whose array task is no
longer in `squeue` and that has not ended is lost; the scheduler tries it again. `sacct` is not asked: many sites run
without it.

    --option partition=… account=… qos=… constraint=… mem=…     as sbatch has them
    --option time=…      minutes an array task may take (default 240)
    --option cpus=… gpus=…    of an array task (default 1; 1 GPU with --device cuda)
    --option array=…     tasks in one array (default: the site's limit)
    --option idle=…      seconds that a task waits for another job before it gives its node back (default 60)
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.dse.reading.files import decode_json
from fp4dse.sweeps.executors.local import GRACE_S
from fp4dse.sweeps.executors.outcome import Outcome, Running, check_options
from fp4dse.sweeps.executors.slurm_task import REPORT_S, ArrayTask, End
from fp4dse.sweeps.jobs.jobfolder import job_name, read_result, write_job
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.tasks.job import Job, Progress

SBATCH = ("partition", "account", "qos", "constraint", "mem")
OPTIONS = dict.fromkeys((*SBATCH, "gpus", "array"), "") | {"time": "240", "cpus": "1", "idle": "60"}
WARN_S = 60
"""SLURM is asked for a signal so long before it ends a task."""
SQUEUE_S = 10.0
MISSES = 3
"""So many looks at squeue must miss an array task before it is taken for gone: shared disks are slow to agree."""


@dataclass
class SlurmRun(Running):
    """A job that waits or runs in the pool."""

    entry: str = ""
    array_task: str | None = None  # the one that claimed it
    misses: int = 0


@dataclass
class SlurmExecutor:
    """`capacity` array tasks at a time; twice as many jobs are held ready, so that no task waits for the driver."""

    work: Path
    capacity: int
    command: tuple[str, ...]
    limit_s: float
    wanted: dict[str, str]
    trouble: str | None = None
    elsewhere: str | None = None
    running: list[SlurmRun] = field(default_factory=list)
    pool: Path = field(init=False)
    _count: int = 0
    _tasks: dict[str, int] = field(default_factory=dict)  # array task -> looks at squeue that missed it
    _checked_at: float = 0.0
    _polled_at: float = 0.0

    def __post_init__(self) -> None:
        pools = self.work.with_name("slurm")
        for old in pools.glob("*"):
            _cancel((old / "arrays").read_text().split() if (old / "arrays").exists() else [])
            shutil.rmtree(old, ignore_errors=True)
        self.pool = pools / secrets.token_hex(4)
        for folder in ("queue", "claimed"):
            (self.pool / folder).mkdir(parents=True)

    @property
    def has_room(self) -> bool:
        return len(self.running) < 2 * self.capacity

    def takes(self, _: Job, /) -> bool:
        return True

    def start(self, job: Job, context: dict[str, Any]) -> None:
        """Put a job where array tasks find it."""
        folder = self.work / job_name(job)
        write_job(folder, job, context)
        self._count += 1
        entry = f"{self._count:08d}-{folder.name}"
        (self.pool / "queue" / entry).touch()
        self.running.append(SlurmRun(job, folder, entry=entry))

    def poll(self, wait_s: float) -> list[Outcome]:
        """The jobs that ended; now and then a look at squeue, and arrays for jobs that wait."""
        time.sleep(max(0.0, min(wait_s, self._polled_at + REPORT_S - time.monotonic())))
        if time.monotonic() - self._polled_at < REPORT_S:
            return []
        self._polled_at = time.monotonic()
        self._read_reports()
        if not self._checked_at or time.monotonic() - self._checked_at >= SQUEUE_S:
            self._check_tasks()
            self._checked_at = time.monotonic()
        return self._collect()

    def stop(self) -> list[Outcome]:
        """Close the pool, wait for the array tasks to save, cancel them."""
        outcomes: list[Outcome] = []
        if not self.pool.exists():
            return outcomes
        (self.pool / "closed").touch()
        for run in [run for run in self.running if (self.pool / "queue" / run.entry).exists()]:
            self.running.remove(run)  # it was never started
        deadline = time.monotonic() + GRACE_S + 3 * REPORT_S
        while self.running and time.monotonic() < deadline:
            time.sleep(0.2)
            outcomes += self._collect()
        _cancel(sorted({task.partition("_")[0] for task in self._tasks}))
        outcomes += [Outcome(run.job, run.folder, "stopped", run.pace(), reason="stopped") for run in self.running]
        self.running = []
        shutil.rmtree(self.pool, ignore_errors=True)
        return outcomes

    def _read_reports(self) -> None:
        owners = dict(name.rsplit("@", 1) for name in os.listdir(self.pool / "claimed"))
        for run in self.running:
            if run.array_task is None and run.folder.name in owners:
                run.array_task, run.started_at = owners[run.folder.name], time.monotonic()
            with contextlib.suppress(OSError, msgspec.DecodeError):
                progress = decode_json((run.folder / "progress.json").read_bytes(), Progress)
                if progress != run.progress:
                    run.report(progress)

    def _check_tasks(self) -> None:
        """Count who is missed, and hand in arrays for the jobs that have no task."""
        there = _squeue()
        self.trouble = None if there is not None else "SLURM's controller does not answer; what runs goes on"
        if there is None:
            return
        self._tasks = {task: 0 if task in there else misses + 1 for task, misses in self._tasks.items()}
        gone = {task for task, misses in self._tasks.items() if misses >= MISSES}
        for run in self.running:
            queued = (self.pool / "queue" / run.entry).exists()
            run.misses = 0 if queued or run.array_task in there else run.misses + 1
        for task in gone:
            del self._tasks[task]
        missing = min(self.capacity, len(self.running)) - len(self._tasks)
        if missing > 0:
            self._submit_arrays(missing)

    def _submit_arrays(self, tasks: int) -> None:
        """Arrays of together `tasks` tasks. OSError with sbatch's words if it refuses."""
        import submitit

        executor = submitit.SlurmExecutor(folder=self.pool / "submitit", max_num_timeout=0)
        executor.update_parameters(
            job_name="fp4dse",
            time=int(self.wanted["time"]),
            cpus_per_task=int(self.wanted["cpus"]),
            array_parallelism=self.capacity,
            signal_delay_s=WARN_S,
            **{name: self.wanted[name] for name in SBATCH if self.wanted[name]},
            **({} if self.wanted["gpus"] == "0" else {"gpus_per_node": int(self.wanted["gpus"])}),
        )
        task = ArrayTask(self.pool, self.work, self.command, self.limit_s, float(self.wanted["idle"]))
        most = int(self.wanted["array"] or _site_limit())
        while tasks > 0:
            part = min(tasks, most)
            try:
                with executor.batch():
                    jobs = [executor.submit(task) for _ in range(part)]
            except submitit.core.utils.FailedJobError as error:
                raise OSError(f"sbatch: {' '.join(str(error).split())}") from None
            with open(self.pool / "arrays", "a") as file:
                file.write(f"{jobs[0].job_id.partition('_')[0]}\n")
            self._tasks.update({job.job_id: 0 for job in jobs})
            tasks -= part

    def _collect(self) -> list[Outcome]:
        outcomes = []
        for run in list(self.running):
            outcome = self._outcome(run)
            if outcome:
                outcomes.append(outcome)
                self.running.remove(run)
                (self.pool / "claimed" / f"{run.folder.name}@{run.array_task}").unlink(missing_ok=True)
        return outcomes

    def _outcome(self, run: SlurmRun) -> Outcome | None:
        try:
            end = decode_json((run.folder / "ended.json").read_bytes(), End)
        except (OSError, msgspec.DecodeError):
            if run.misses < MISSES:
                return None
            end = End("lost", f"its array task {run.array_task} is gone", run.pace())
        result = read_result(run.folder, run.job)
        return Outcome(run.job, run.folder, "done" if result else end.kind, end.pace, result, end.reason)


def open_slurm(
    work: Path, machine: Machine, command: tuple[str, ...], limit_s: float, options: Mapping[str, str]
) -> SlurmExecutor:
    """ConfigError if submitit or SLURM's commands are missing or an option is wrong; OSError without a controller."""
    wanted = check_options("slurm", options, OPTIONS)
    wanted["gpus"] = wanted["gpus"] or ("1" if machine.device == "cuda" else "0")
    for name in ("time", "cpus", "gpus", "idle", "array"):
        if not (wanted[name] or "0").isdigit():
            raise ConfigError("--option of slurm", f"{name}={wanted[name]}", "a whole number")
    reason = why_not()
    if reason:
        raise ConfigError("--executor", "slurm", reason)
    if _squeue() is None:
        raise OSError("SLURM's controller does not answer (squeue --me fails): nothing can be handed in")
    return SlurmExecutor(work, len(machine.slots), command, limit_s, wanted)


def why_not() -> str | None:
    """The part that sweeps on SLURM lack on this machine, in words; None if they can run."""
    try:
        import submitit  # noqa: F401
    except ImportError:
        return "an installed submitit: pip install 'fp4dse[slurm]'"
    missing = [name for name in ("sbatch", "squeue", "scancel", "srun") if not shutil.which(name)]
    return f"a machine with SLURM's commands ({', '.join(missing)} not found)" if missing else None


def _site_limit() -> int:
    """MaxArraySize of the site; 1000, SLURM's own default less one, if it does not say."""
    done = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        if line.startswith("MaxArraySize"):
            return max(1, int(line.partition("=")[2]) - 1)
    return 1000


def _squeue() -> set[str] | None:
    """The array tasks of this user that wait or run, but not those that are being cleaned up, which can take a minute;
    None if squeue fails."""
    states = "PENDING,CONFIGURING,RUNNING,SUSPENDED,SIGNALING,REQUEUED"
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i", f"--states={states}"]
    done = subprocess.run(command, capture_output=True, text=True)
    return set(done.stdout.split()) if done.returncode == 0 else None


def _cancel(arrays: list[str]) -> None:
    if arrays:
        subprocess.run(["scancel", "--quiet", *arrays], capture_output=True)
