"""Runs jobs on a Ray cluster, one Ray task a job; nothing but Ray connects the machines, no disk is shared.

A task runs its job as the local executor does, in a worker process of its own with the same limits, and brings the
result back, or the checkpoint of a job that was stopped. The driver puts it into the job's folder, so that what came
back is safe even if the driver dies, and is the only one who writes to the store. Ray's own retries are off: a task
that is lost with its worker or node is tried again by the scheduler, with a pause, like any other loss.

A cluster that dies whole is no job's fault. One of our own is started again, and what ran on it begins anew there; with
any other the sweep ends, and the same command continues it.

    --option address=…    a cluster: auto, host:port, ray://host:port. Default: a local one, on loopback alone
    --option gpus=…       GPUs a job, may be a fraction. Default: 1 with --device cuda, else 0
    --option cpus=…       CPUs a job. Default: 1
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.sweeps.executors.local import GRACE_S, SILENCE_S
from fp4dse.sweeps.executors.outcome import Kind, Outcome, Running, check_options
from fp4dse.sweeps.executors.ray_cluster import connect
from fp4dse.sweeps.executors.ray_task import REPORT_S, Mailbox, TaskResult, clear_folders, read_if_there, work
from fp4dse.sweeps.jobs.jobfolder import job_name, read_result, write_job, write_result
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.tasks.job import CHECKPOINT, STDERR, Job, Progress

log = logging.getLogger(__name__)

OPTIONS = {"address": "", "gpus": "", "cpus": "1"}
LOOK_S = 5.0
"""Seconds after which the cluster is looked for again."""
RESTARTS = 3
"""So often a cluster of our own is started again before a job has come back from it."""


@dataclass
class RayRun(Running):
    """A job in the hands of Ray."""

    ref: Any = None


@dataclass
class RayExecutor:
    """Runs as many tasks at a time as the cluster has room for, `most` at most."""

    work: Path
    most: int
    command: tuple[str, ...]
    limit_s: float
    resources: dict[str, float]
    owns_cluster: bool
    silence_s: float = SILENCE_S
    trouble: str | None = None
    elsewhere: str | None = None
    running: list[RayRun] = field(default_factory=list)
    _reports_read_at: float = 0.0
    _checked_at: float = field(default_factory=time.monotonic)
    _restarts: int = 0
    _node: str = ""
    _task: Any = None
    _mailbox: Any = None

    def __post_init__(self) -> None:
        self._prepare()

    def _prepare(self) -> None:
        """Hand the task and the mailbox to the cluster that we are connected to."""
        import ray

        self._node = ray.get_runtime_context().get_node_id()
        # max_calls=0: Ray would end its worker after each GPU task, but no worker of Ray ever touches a GPU
        decorator: Any = ray.remote(max_retries=0, max_calls=0, **self.resources)  # type: ignore[call-overload]
        self._task = decorator(work)
        self._mailbox = ray.remote(num_cpus=0, max_restarts=-1)(Mailbox).remote()

    @property
    def capacity(self) -> int:
        import ray

        total = ray.cluster_resources()
        of = {"num_cpus": "CPU", "num_gpus": "GPU"}
        room = [int(total.get(of[name], 0) / wanted) for name, wanted in self.resources.items() if wanted]
        return max(1, min([self.most, *room]))

    @property
    def has_room(self) -> bool:
        return len(self.running) < self.capacity

    def takes(self, _: Job, /) -> bool:
        return True

    def start(self, job: Job, context: dict[str, Any]) -> None:
        """Give a job to Ray."""
        folder = self.work / job_name(job)
        write_job(folder, job, context)
        self._submit(job, folder)

    def _submit(self, job: Job, folder: Path) -> None:
        data = msgspec.json.encode(job)
        # one that is for another kind of device than its node comes back: then it is another node's turn
        task = self._task.options(scheduling_strategy="SPREAD") if job.only_on else self._task
        saved = read_if_there(folder / CHECKPOINT)
        ref = task.remote(data, saved, self.command, self.limit_s, self.silence_s, self._mailbox)
        self.running.append(RayRun(job, folder, ref=ref))

    def poll(self, wait_s: float) -> list[Outcome]:
        """The tasks that ended. OSError if a cluster that is not ours is gone, or ours does not stay."""
        import ray

        if not self.running:
            time.sleep(wait_s)
            return []
        if time.monotonic() - self._checked_at >= LOOK_S:
            self._checked_at = time.monotonic()
            if self._is_gone():
                self._restart_cluster()
        refs = [run.ref for run in self.running]
        ray.wait(refs, timeout=wait_s)
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        self._read_reports()
        ended = [run for run in self.running if run.ref in ready]
        outcomes = [outcome for run in ended if (outcome := self._outcome(run))]
        judged = {outcome.folder for outcome in outcomes}
        self.running = [run for run in self.running if run.folder not in judged]
        if len(judged) < len(ended):
            self._restart_cluster()
        return outcomes

    def _is_gone(self) -> bool:
        """True if the node through which we speak to the cluster is dead: then nothing that we ask is answered."""
        import ray

        try:
            return self._node not in {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        except Exception:  # nobody is there whom it could ask
            return True

    def _restart_cluster(self) -> None:
        """Start a cluster of our own again, with all that ran on it."""
        import ray

        if not self.owns_cluster:
            raise OSError("the Ray cluster is gone, as seen from here; the same command continues when it is back")
        self._restarts += 1
        if self._restarts > RESTARTS:
            raise OSError(f"Ray's processes on this machine died {self._restarts} times before a job came back")
        log.warning("Ray's processes on this machine died; they are started again, with the jobs that they ran")
        ray.shutdown()
        connect("")
        self._prepare()
        self._checked_at = time.monotonic()
        lost, self.running = self.running, []
        for run in lost:
            self._submit(run.job, run.folder)

    def stop(self) -> list[Outcome]:
        """Ask all tasks to stop, cancel those that take too long, end a cluster of our own."""
        import ray

        outcomes: list[Outcome] = []
        if not ray.is_initialized():
            return outcomes
        if not self._is_gone():
            self._mailbox.stop.remote()
            deadline = time.monotonic() + GRACE_S + 2 * REPORT_S
            with contextlib.suppress(OSError):  # it is gone meanwhile
                while self.running and time.monotonic() < deadline:
                    outcomes += self.poll(0.2)
        for run in self.running:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.cancel(run.ref, force=True)
            outcomes.append(Outcome(run.job, run.folder, "stopped", run.pace(), reason="stopped"))
        self.running = []
        if self.owns_cluster:
            ray.shutdown()
            clear_folders(young_s=0.0)
        return outcomes

    def _read_reports(self) -> None:
        import ray

        if time.monotonic() - self._reports_read_at < REPORT_S:
            return
        self._reports_read_at = time.monotonic()
        with contextlib.suppress(ray.exceptions.RayError):
            reports = ray.get(self._mailbox.take.remote(), timeout=10)
            for run in self.running:
                if report := reports.get(run.folder.name):
                    run.report(msgspec.json.decode(report, type=Progress))

    def _outcome(self, run: RayRun) -> Outcome | None:
        """The end of a job; None if only the cluster of our own ended, and the job with it."""
        import ray

        try:
            returned = msgspec.msgpack.decode(ray.get(run.ref), type=TaskResult)
        except ray.exceptions.RayTaskError as error:
            reason = " ".join(str(error.cause).split())[:300]
            kind: Kind = "lost" if isinstance(error.cause, OSError) else "failed"  # a full disk is not the job's fault
            return Outcome(run.job, run.folder, kind, run.pace(), reason=f"on its node: {reason}")
        except (ray.exceptions.RayError, RuntimeError) as error:
            of_cluster = (ray.exceptions.LocalRayletDiedError, ray.exceptions.NodeDiedError)
            if self.owns_cluster and (isinstance(error, of_cluster) or self._is_gone()):
                return None
            reason = f"Ray lost it ({type(error).__name__})"
            return Outcome(run.job, run.folder, "lost", run.pace(), reason=reason)
        self._restarts = 0
        (run.folder / STDERR).write_bytes(returned.stderr)
        if returned.checkpoint is not None:
            (run.folder / CHECKPOINT).write_bytes(returned.checkpoint)
        if returned.out is not None:
            write_result(run.folder, returned.out)
        result = read_result(run.folder, run.job)
        return Outcome(run.job, run.folder, returned.kind, returned.pace, result, returned.reason)


def open_ray(
    work: Path, machine: Machine, command: tuple[str, ...], limit_s: float, options: Mapping[str, str]
) -> RayExecutor:
    """Connect to a cluster, or start one here. ConfigError if Ray is not installed, does not answer, or an option is
    wrong."""
    wanted = check_options("ray", options, OPTIONS)
    gpus = wanted["gpus"] or ("1" if machine.device == "cuda" else "0")
    try:
        resources = {"num_cpus": float(wanted["cpus"]), "num_gpus": float(gpus)}
    except ValueError:
        raise ConfigError("--option of ray", f"cpus={wanted['cpus']} gpus={gpus}", "numbers") from None
    owns = connect(wanted["address"])
    return RayExecutor(work, len(machine.slots), command, limit_s, resources, owns)
