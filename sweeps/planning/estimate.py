"""Estimates the time of a plan and the memory of a worker, before anything is trained for good.

    seconds of a job  =  fixed  +  lanes × steps × rate

What the store knows of this kind of device counts first: the median `lane_s` of rows of the same task and structural
signature, or of the task where the signature is new. Where it knows nothing, one small population is trained for
CALIBRATION_STEPS steps in a process of its own, and again for a few, so that the difference is training alone; its
memory is split into what a process needs anyway and a part per lane by training two lanes first. Times do not depend on
what weights say: a task that starts from a base of its own is calibrated from initial weights, and no base is trained.
Lanes that learn from samples of their own take seconds for each rollout, and most of a minute to solve what is held
out: of these fewer lanes and steps are trained, and a part of the held-out problems is solved.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from fp4dse.dse import ConfigError
from fp4dse.dse.program.terminal import duration
from fp4dse.results import Store, open_store
from fp4dse.results.store.schema import recipe_columns
from fp4dse.sweeps.planning.plan import Plan
from fp4dse.sweeps.planning.setting import Setting
from fp4dse.tasks.job import Job

if TYPE_CHECKING:
    from torch import Tensor

    from fp4dse.tasks import Problem, Task

CALIBRATION_LANES = 8
CALIBRATION_STEPS = 24
FEW_STEPS = 4
SAMPLING_LANES, SAMPLING_STEPS, SAMPLING_HELD_OUT = 2, 12, 256
"""The same, and held-out problems, of a task that learns from samples of its own."""
KNOWN = ["task", "preset", "device_class", "signature", "lane_s", "setup_s", "lanes", "peak_memory_bytes", "status"]


class Pace(msgspec.Struct, frozen=True):
    """Of the jobs of one task: seconds before and after training, seconds per lane, bytes of a process and per lane."""

    fixed_s: float
    lane_s: float
    base_bytes: float
    lane_bytes: float
    source: str


class Estimate(msgspec.Struct, frozen=True):
    """`seconds` with all workers, `worker_seconds` in sum; `memory_bytes` of the largest worker; where it is from."""

    seconds: float
    worker_seconds: float
    memory_bytes: float
    sources: dict[str, str]

    def facts(self) -> dict[str, Any]:
        """For people and scripts."""
        gib = f"{self.memory_bytes / 2**30:.2f} GiB a worker"
        time = f"{duration(self.seconds)} of training; workers start in seconds"
        return {"estimated_time": time, "estimated_memory": gib, "estimated_from": self.sources}


def estimate(
    plan: Plan, setting: Setting, store: str | Path | None = None, report: Callable[[str], None] = lambda _: None
) -> Estimate:
    """Time and memory of a plan in its setting. Trains briefly unless the store has rows of the same kind of device;
    report: called with a sentence before it does."""
    known = _known(open_store(store), setting) if store and Path(store).exists() else pd.DataFrame(columns=KNOWN)
    steps = {(task.name, task.preset): task.steps for task in setting.tasks}
    paces: dict[tuple[str, str], dict[str, Pace]] = {}
    total, longest, memory = 0.0, 0.0, 0.0
    for job in sorted(plan.jobs, key=lambda job: -len(job.lanes)):
        task = (job.task, job.preset)
        of_task = paces.setdefault(task, {})
        signature = str(recipe_columns(job.lanes[0].recipe)["signature"])
        pace = of_task.get(signature) or _from_store(known, task, signature) or of_task.get("")
        if pace is None:
            report(f"{':'.join(task)}: nothing is stored of it here; a few lanes are trained briefly")
            pace = of_task[""] = calibrate(job, steps[task])
        of_task[signature] = pace
        seconds = pace.fixed_s + len(job.lanes) * pace.lane_s
        total += seconds
        longest = max(longest, seconds)
        memory = max(memory, pace.base_bytes + len(job.lanes) * pace.lane_bytes)
    workers = max(1, min(len(setting.machine.slots), len(plan.jobs)))
    sources = {
        ":".join(task): ", ".join(dict.fromkeys(p.source for p in found.values())) for task, found in paces.items()
    }
    return Estimate(max(longest, total / workers), total, memory, sources)


def _known(store: Store, setting: Setting) -> pd.DataFrame:
    runs = store.runs(KNOWN)
    (device_class,) = {context["device_class"] for context in setting.contexts.values()}
    return runs[runs["device_class"].eq(device_class) & runs["status"].isin(["done", "diverged"])]


def _from_store(known: pd.DataFrame, task: tuple[str, str], signature: str) -> Pace | None:
    rows = known[known["task"].eq(task[0]) & known["preset"].eq(task[1])]
    alike = rows[rows["signature"].eq(signature)]
    rows = alike if len(alike) else rows
    if not len(rows):
        return None
    peak = float(rows["peak_memory_bytes"].max())
    return Pace(
        fixed_s=float(rows["setup_s"].median()),
        lane_s=float(rows["lane_s"].median()),
        base_bytes=peak,  # of populations about as large: what is stored does not tell them from the process
        lane_bytes=0.0,
        source=f"{len(rows)} stored runs" if len(alike) else f"{len(rows)} stored runs of other signatures",
    )


def calibrate(job: Job, steps: int) -> Pace:
    """Train some of the job's lanes briefly, in a process of its own; `steps` are the task's. ConfigError if not even
    one fits into the device's memory."""
    from fp4dse.tasks.worker import task_of

    task = task_of(job)
    most, many = (SAMPLING_LANES, SAMPLING_STEPS) if task.rolls_out else (CALIBRATION_LANES, CALIBRATION_STEPS)
    lanes = job.lanes[:most]
    while isinstance(found := _in_a_process(msgspec.structs.replace(job, lanes=lanes)), str):
        if len(lanes) == 1:
            raise ConfigError("--task", f"{job.task}:{job.preset}", f"what fits ({found})")
        lanes = lanes[: len(lanes) // 2]
    two, short, long = found
    rate = max(long[1] - short[1], 0.0) / (many - FEW_STEPS) / len(lanes)
    after = max(short[1] - FEW_STEPS * rate * len(lanes), 0.0) * _held_out(task)
    base = "; not in it: the base of each seed, trained once and kept" if task.pretrain else ""
    few = min(2, len(lanes))
    lane_bytes = max(long[2] - two[2], 0) / max(len(lanes) - few, 1)
    return Pace(
        fixed_s=short[0] + after,
        lane_s=rate * steps,
        base_bytes=max(two[2] - few * lane_bytes, 0),
        lane_bytes=lane_bytes,
        source=f"a calibration of {len(lanes)} lanes, {many} steps{base}",
    )


def _in_a_process(job: Job) -> list[tuple[float, float, int]] | str:
    """The result of `_measure` in a process of its own, whose end by the system counts as a lack of memory."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, job).result()
        except BrokenProcessPool:
            lanes = f"{len(job.lanes)} lane{'s' * (len(job.lanes) > 1)}"
            return f"the system ended a process that trained {lanes}, as it does when memory is short"


def brief(task: Task) -> Task:
    """The task from initial weights where it has a base that another trains first, and with few held-out problems where
    it learns from samples of its own."""

    def initial(seeds: Sequence[int], _device: str) -> dict[str, Tensor]:
        return task.problem(seeds).init

    def few(seeds: Sequence[int]) -> Problem:
        found = task.problem(seeds)
        cut = {name: getattr(found, name)[:, :SAMPLING_HELD_OUT] for name in ("val_x", "val_y")}
        return msgspec.structs.replace(found, **cut)

    problem = few if task.rolls_out else task.problem
    return msgspec.structs.replace(task, problem=problem, pretrain=initial if task.pretrain else None)


def _held_out(task: Task) -> float:
    """All held-out problems over those that `brief` leaves."""
    return max(task.problem([0]).val_x.shape[1] / SAMPLING_HELD_OUT, 1.0) if task.rolls_out else 1.0


def _measure(job: Job) -> list[tuple[float, float, int]] | str:
    """(setup_s, train_s, peak bytes so far) of two lanes at most, of all for a few steps, and of all for some more; or
    why they do not fit into memory."""
    import torch

    from fp4dse.tasks import train
    from fp4dse.tasks.engine.lane_counts import why_not_fit
    from fp4dse.tasks.threads import torch_threads
    from fp4dse.tasks.worker import task_of

    measured = []
    with torch_threads(job.threads):
        whole = task_of(job)
        task, many = brief(whole), SAMPLING_STEPS if whole.rolls_out else CALIBRATION_STEPS
        for lanes, steps in ((job.lanes[:2], 1), (job.lanes, FEW_STEPS), (job.lanes, many)):
            try:
                result = train(msgspec.structs.replace(task, steps=steps), lanes, job.device)
            except (MemoryError, torch.OutOfMemoryError):
                return why_not_fit(task, lanes, job.device)
            measured.append((result.setup_s, result.train_s, result.peak_memory_bytes))
    return measured
