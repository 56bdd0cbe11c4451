"""One job again, in the foreground, in this process: whatever it says and however it ends is seen at once.

A job is found by its file, by its name among those that were given up, or in the store: rows of a failed job share the
time at which they were written, and together they are the job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from fp4dse.dse import ConfigError, StoreError, recipe_from_dict
from fp4dse.dse.tuning import tuning_class
from fp4dse.results import Store
from fp4dse.results.stats.stages import STAGE
from fp4dse.results.store.schema import KEY
from fp4dse.sweeps.jobs.jobfolder import drop, failed_folder, job_name, read_job
from fp4dse.sweeps.jobs.rows import result_rows
from fp4dse.sweeps.stores import work_folder
from fp4dse.tasks import environment, train
from fp4dse.tasks.engine.lane_counts import why_not_fit
from fp4dse.tasks.job import JOB, Job, Lane, LaneResult, Progress
from fp4dse.tasks.threads import torch_threads
from fp4dse.tasks.worker import task_of

CONTEXT = [name for name in KEY if name not in ("config_id", "lr", "seed")] + [
    "metric_name",
    "metric_better",
    "gap_unit",
    "steps",
    STAGE,
]
ENVIRONMENT = ["device", "device_name", "threads", "dtype", "torch_version", "python_version", "host"]
ENVIRONMENT += ["fp4dse_version", "git_commit"]


def find_job(text: str, store: Store) -> tuple[Job, dict[str, Any]]:
    """A job and its context, by the path of a job folder or job.json, the name of a failed job, or the run_id of a
    failed lane. ConfigError names the failed jobs that there are."""
    path = Path(text)
    for folder in (path, path.parent, failed_folder(work_folder(store.path)) / text):
        if (folder / JOB).is_file() and (folder != path.parent or path.name == JOB):
            try:
                return read_job(folder)
            except (OSError, msgspec.DecodeError) as error:
                raise StoreError(f"{folder}: holds no job that can be read ({error})") from None
    known = []
    for job, context, run_ids in failed_jobs(store):
        known.append(job_name(job))
        if text == known[-1]:
            return job, context
        if text in run_ids:
            lane = job.lanes[run_ids.index(text)]
            return msgspec.structs.replace(job, lanes=[lane]), context
    some = ", ".join(known[:5]) + (f" and {len(known) - 5} more" if len(known) > 5 else "")
    raise ConfigError("job", text, f"a job.json, or a failed job of {store.path}: {some or 'there is none'}")


def failed_jobs(store: Store) -> Iterator[tuple[Job, dict[str, Any], list[str]]]:
    """The jobs behind the failed rows of a store, with their contexts and the run_ids of their lanes."""
    columns = ["run_id", "status", "created_at", "recipe", "lr", "lr_source", "seed", *CONTEXT, *ENVIRONMENT]
    rows = store.runs(columns)
    rows = rows[rows["status"] == "failed"]
    for _, members in rows.groupby(["created_at", "task", "preset"]):
        first = members.iloc[0].to_dict()
        lanes = [
            Lane(recipe_from_dict(msgspec.json.decode(recipe)), float(lr), int(seed))
            for recipe, lr, seed in zip(members["recipe"], members["lr"], members["seed"], strict=True)
        ]
        of = (first["task"], first["preset"])
        where = {"device": first["device"], "threads": int(first["threads"])}
        job = Job(*of, lanes, **where, origin=of, digest=first["dataset_digest"])
        source = {tuning_class(lane.recipe): of for lane, of in zip(lanes, members["lr_source"], strict=True)}
        context = {name: first[name] for name in [*CONTEXT, *ENVIRONMENT]} | {"lr_source": source}
        yield job, context, list(members["run_id"])


def run_one(job: Job, context: dict[str, Any], store: Store, report: Callable[[Progress], None]) -> list[LaneResult]:
    """Train the job here and store its rows. ConfigError if it does not fit into memory; whatever else training raises
    comes out as it is."""
    begin = time.monotonic()
    task, name = task_of(job), job_name(job)
    try:
        with torch_threads(job.threads):
            result = train(task, job.lanes, job.device, report)
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ConfigError("job", name, f"one that fits ({why_not_fit(task, job.lanes, job.device)})") from error
    result.environment = environment(job.device, job.threads)
    try:
        store.add(result_rows(job, result, context), name)
    except StoreError as error:
        raise StoreError(f"trained in {time.monotonic() - begin:.0f} s, but not stored: {error}") from error
    drop(work_folder(store.path) / name)
    return result.lanes
