"""Estimates the time of a plan and the memory of a worker, before anything is trained for good.

    seconds of a job  =  fixed  +  lanes × steps × rate

What the store knows of this kind of device counts first: the median `lane_s` of rows of the same task and structural
signature, or of the task where the signature is new. Where it knows nothing, one small population is trained for
CALIBRATION_STEPS steps in a process of its own, and again for a few, so that the difference is training alone; its
memory is split into what a process needs anyway and a part per lane by training two lanes first.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from fp4dse.dse import ConfigError
from fp4dse.results import Store, open_store
from fp4dse.results.store.schema import recipe_columns
from fp4dse.sweeps.plan import Plan
from fp4dse.sweeps.progress import duration
from fp4dse.sweeps.setting import Setting
from fp4dse.tasks.job import Job

CALIBRATION_LANES = 8
CALIBRATION_STEPS = 24
FEW_STEPS = 4
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


def estimate(plan: Plan, setting: Setting, store: str | Path | None = None) -> Estimate:
    """Time and memory of a plan in its setting. Trains briefly unless the store has rows of the same kind of device."""
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
    lanes = job.lanes[:CALIBRATION_LANES]
    while isinstance(found := _in_a_process(msgspec.structs.replace(job, lanes=lanes)), str):
        if len(lanes) == 1:
            raise ConfigError("--task", f"{job.task}:{job.preset}", f"what fits ({found})")
        lanes = lanes[: len(lanes) // 2]
    two, short, long = found
    rate = max(long[1] - short[1], 0.0) / (CALIBRATION_STEPS - FEW_STEPS) / len(lanes)
    after = max(short[1] - FEW_STEPS * rate * len(lanes), 0.0)
    few = min(2, len(lanes))
    lane_bytes = max(long[2] - two[2], 0) / max(len(lanes) - few, 1)
    return Pace(
        fixed_s=short[0] + after,
        lane_s=rate * steps,
        base_bytes=max(two[2] - few * lane_bytes, 0),
        lane_bytes=lane_bytes,
        source=f"a calibration of {len(lanes)} lanes, {CALIBRATION_STEPS} steps",
    )


def _in_a_process(job: Job) -> list[tuple[float, float, int]] | str:
    """The result of `_measure` in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, job).result()


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
        task = task_of(job)
        for lanes, steps in ((job.lanes[:2], 1), (job.lanes, FEW_STEPS), (job.lanes, CALIBRATION_STEPS)):
            try:
                result = train(msgspec.structs.replace(task, steps=steps), lanes, job.device)
            except (MemoryError, torch.OutOfMemoryError):
                return why_not_fit(task, lanes, job.device)
            measured.append((result.setup_s, result.train_s, result.peak_memory_bytes))
    return measured
