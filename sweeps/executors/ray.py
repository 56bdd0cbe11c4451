"""Runs jobs on a Ray cluster, one Ray task a job; nothing but Ray connects the machines, no disk is shared.

A task runs its job as the local executor does, in a worker process of its own with the same limits, and brings the
result back, or the checkpoint of a job that was stopped. The driver puts it into the job's folder, so that what came
back is safe even if the driver dies, and is the only one who writes to the store. Ray's own retries are off: a task
that is lost with its worker or node is tried again by the scheduler, with a pause, like any other loss.

    --option address=…    a cluster: auto, host:port, ray://host:port. Default: a local one, on loopback alone
    --option gpus=…       GPUs a job, may be a fraction. Default: 1 with --device cuda, else 0
    --option cpus=…       CPUs a job. Default: 1
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.sweeps.executors.local import GRACE_S, SILENCE_S, LocalExecutor, run_alone
from fp4dse.sweeps.executors.outcome import Kind, Outcome, Pace, Running
from fp4dse.sweeps.jobfolder import CHECKPOINT, job_name, read_result, write_job, write_result
from fp4dse.tasks.job import Job, Progress

if TYPE_CHECKING:
    from fp4dse.sweeps.setting import Machine

OPTIONS = {"address": "", "gpus": "", "cpus": "1"}
REPORT_S = 1.0


class Brought(msgspec.Struct, frozen=True):
    """What a task brings back: an Outcome without paths, the worker's result as it wrote it, its standard error."""

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
    name, told = job_name(found), time.monotonic()

    def tell(progress: Progress | None) -> bool:
        nonlocal told
        if time.monotonic() - told < REPORT_S:
            return False
        told = time.monotonic()
        return ray.get(mailbox.put.remote(name, progress and msgspec.json.encode(progress)))

    executor = _executor_here(tuple(command), limit_s, silence_s)
    folder = executor.work / name
    write_job(folder, found, {})
    if checkpoint:
        (folder / CHECKPOINT).write_bytes(checkpoint)
    outcome = run_alone(executor, folder, found, tell)
    out = (folder / "out.json").read_bytes() if outcome.result else None
    saved = None if outcome.result else _read(folder / CHECKPOINT)
    stderr = (folder / "stderr.txt").read_bytes()[-100_000:]
    shutil.rmtree(folder, ignore_errors=True)
    return msgspec.msgpack.encode(Brought(outcome.kind, outcome.pace, outcome.reason, out, stderr, saved))


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


_here: dict[str | None, LocalExecutor] = {}
"""The executor of this Ray worker, whose warm process the next task finds, by the GPUs that Ray gave it."""


def _executor_here(command: tuple[str, ...], limit_s: float, silence_s: float) -> LocalExecutor:
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    if cards not in _here or _here[cards].command != command:
        for executor in _here.values():
            executor.stop()
        _here.clear()
        folder = Path(tempfile.mkdtemp(prefix="fp4dse-ray-"))
        _here[cards] = LocalExecutor(folder, [{}], command, limit_s, silence_s)
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


@dataclass
class RayRun(Running):
    """A job in the hands of Ray."""

    ref: Any = None


@dataclass
class RayExecutor:
    """As many tasks at a time as the cluster has room for, `most` at most."""

    work: Path
    most: int
    command: tuple[str, ...]
    limit_s: float
    resources: dict[str, float]
    owns_cluster: bool
    silence_s: float = SILENCE_S
    running: list[RayRun] = field(default_factory=list)
    _heard: float = 0.0
    _task: Any = None
    _mailbox: Any = None

    def __post_init__(self) -> None:
        import ray

        # max_calls=0: Ray would end its worker after each GPU task, but no worker of Ray ever touches a GPU
        decorator: Any = ray.remote(max_retries=0, max_calls=0, **self.resources)  # type: ignore[call-overload]
        self._task = decorator(work)
        self._mailbox = ray.remote(num_cpus=0)(Mailbox).remote()

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

    def takes(self, job: Job) -> bool:
        return True

    def start(self, job: Job, context: dict) -> None:
        """Give a job to Ray."""
        folder = self.work / job_name(job)
        write_job(folder, job, context)
        data = msgspec.json.encode(job)
        # one that is for another kind of device than its node comes back: then it is another node's turn
        task = self._task.options(scheduling_strategy="SPREAD") if job.only_on else self._task
        ref = task.remote(data, _read(folder / CHECKPOINT), self.command, self.limit_s, self.silence_s, self._mailbox)
        self.running.append(RayRun(job, folder, ref=ref))

    def poll(self, wait_s: float) -> list[Outcome]:
        """The tasks that ended."""
        import ray

        if not self.running:
            time.sleep(wait_s)
            return []
        refs = [run.ref for run in self.running]
        ray.wait(refs, timeout=wait_s)
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0])
        self._hear()
        ended = [run for run in self.running if run.ref in ready]
        self.running = [run for run in self.running if run.ref not in ready]
        return [self._judge(run) for run in ended]

    def stop(self) -> list[Outcome]:
        """Ask all tasks to stop, cancel those that take too long, end a cluster of our own."""
        import ray

        outcomes: list[Outcome] = []
        if not ray.is_initialized():
            return outcomes
        self._mailbox.stop.remote()
        deadline = time.monotonic() + GRACE_S + 2 * REPORT_S
        while self.running and time.monotonic() < deadline:
            outcomes += self.poll(0.2)
        for run in self.running:
            ray.cancel(run.ref, force=True)
            outcomes.append(Outcome(run.job, run.folder, "stopped", run.pace(), reason="stopped"))
        self.running = []
        if self.owns_cluster:
            ray.shutdown()
        return outcomes

    def _hear(self) -> None:
        import ray

        if time.monotonic() - self._heard < REPORT_S:
            return
        self._heard = time.monotonic()
        with contextlib.suppress(ray.exceptions.RayError):
            reports = ray.get(self._mailbox.take.remote(), timeout=10)
            for run in self.running:
                if report := reports.get(run.folder.name):
                    run.report(msgspec.json.decode(report, type=Progress))

    def _judge(self, run: RayRun) -> Outcome:
        import ray

        try:
            brought = msgspec.msgpack.decode(ray.get(run.ref), type=Brought)
        except ray.exceptions.RayTaskError as error:
            reason = " ".join(str(error.cause).split())[:300]
            return Outcome(run.job, run.folder, "failed", run.pace(), reason=f"on its node: {reason}")
        except ray.exceptions.RayError as error:
            reason = f"Ray lost it ({type(error).__name__})"
            return Outcome(run.job, run.folder, "lost", run.pace(), reason=reason)
        (run.folder / "stderr.txt").write_bytes(brought.stderr)
        if brought.checkpoint is not None:
            (run.folder / CHECKPOINT).write_bytes(brought.checkpoint)
        if brought.out is not None:
            write_result(run.folder, brought.out)
        result = read_result(run.folder, run.job)
        return Outcome(run.job, run.folder, brought.kind, brought.pace, result, brought.reason)


def open_ray(
    work: Path, machine: Machine, command: tuple[str, ...], limit_s: float, options: Mapping[str, str]
) -> RayExecutor:
    """Connect to a cluster, or start one here. ConfigError if Ray is not installed, does not answer, or an option is
    wrong."""
    from fp4dse.sweeps.executors import check_options

    wanted = check_options("ray", options, OPTIONS)
    gpus = wanted["gpus"] or ("1" if machine.device == "cuda" else "0")
    try:
        resources = {"num_cpus": float(wanted["cpus"]), "num_gpus": float(gpus)}
    except ValueError:
        raise ConfigError("--option of ray", f"cpus={wanted['cpus']} gpus={gpus}", "numbers") from None
    owns = connect(wanted["address"])
    return RayExecutor(work, len(machine.slots), command, limit_s, resources, owns)


def connect(address: str) -> bool:
    """Make Ray usable; True if that started a cluster, which then is ours to end.

    A cluster of our own listens on loopback alone: Ray does so by itself where it takes the machine for a personal one,
    which the variable says as long as Ray is not imported. Without it `127.0.0.1` is replaced by the address that
    others see.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if not address:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
    except ImportError:
        raise ConfigError("--executor", "ray", "an installed Ray: pip install 'fp4dse[ray]'") from None
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": "warning", "log_to_driver": False}
    try:
        if address:
            ray.init(address, **quiet)
        else:
            ray.init(include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        accepted = f"the address of a Ray cluster that answers ({' '.join(str(error).split())[:200]})"
        raise ConfigError("--option address", address, accepted) from None
    if not address and ray.util.get_node_ip_address() != "127.0.0.1":
        ray.shutdown()
        raise ConfigError("--executor", "ray", "a process that has not imported Ray before, or --option address=…")
    return not address
