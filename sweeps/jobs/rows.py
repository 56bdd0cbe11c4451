"""A lane and what became of it, as a row of the store. The driver alone writes rows; workers know nothing of them.

What every lane of a task shares is its *context*: the task's identity, where each class of recipes has its learning
rate from, and the environment in which it is expected to be trained. Where a worker says what environment it had, that
stands in the row.
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from fp4dse.dse import Recipe
from fp4dse.dse.tuning import tuning_class
from fp4dse.results.stats.paired import SETTING
from fp4dse.results.store.schema import recipe_columns, run_id
from fp4dse.tasks.job import Job, JobResult, Lane, LaneResult

if TYPE_CHECKING:
    from fp4dse.tasks import TaskFacts

KIND = ("device_class", "software_class")
"""The columns that tell kinds of workers apart."""
SHARED = [name for name in SETTING if name not in KIND]
"""The columns of a setting that are known before a worker says what it is."""


def task_context(task: TaskFacts, environment: dict[str, Any]) -> dict[str, Any]:
    """The columns that all lanes of a task in an environment share."""
    return {
        **environment,
        "task": task.name,
        "preset": task.preset,
        "dataset_digest": task.digest,
        "dataset_contents": task.contents,
        "rev_task": task.rev,
        "dtype": task.dtype,
        "metric_name": task.metric_name,
        "metric_better": task.better,
        "gap_unit": task.gap_unit,
        "steps": task.steps,
        "parameters": task.parameters,
        "tokens": task.tokens,
        "start_digest": task.start,
        "start_method": task.start_method,
    }


def lane_id(lane: Lane, context: dict[str, Any]) -> str:
    """The run_id that the lane's row has."""
    return run_id({**context, "config_id": _config_id(lane.recipe), "lr": lane.lr, "seed": lane.seed})


@lru_cache(maxsize=65536)
def _config_id(recipe: Recipe) -> str:
    """Cached for the lanes of a recipe, which come one after the other."""
    return recipe.config_id


def result_rows(job: Job, result: JobResult, context: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per lane of a job that came back. What the population took stands in each of its rows."""
    shared = {
        **result.environment,
        "train_s": result.train_s,
        "setup_s": result.setup_s,
        "lane_s": result.train_s / len(job.lanes),
        "tokens_per_s": _tokens_per_s(job, result, context),
        "peak_memory_bytes": result.peak_memory_bytes,
        "kept_bytes": result.kept_bytes,
        "quantizer_backend": result.quantizer_backend,
        "gemm_backend": result.gemm_backend,
        "fallbacks": result.fallbacks,
    }
    pairs = zip(job.lanes, result.lanes, strict=True)
    now = datetime.now(UTC)
    return [{**_row(lane, job, context, now), **shared, **_outcome(outcome, context)} for lane, outcome in pairs]


def _tokens_per_s(job: Job, result: JobResult, context: dict[str, Any]) -> float | None:
    """Of all lanes together, if each read all that the task has."""
    tokens = context.get("tokens")
    whole = all(lane.status == "done" for lane in result.lanes)
    return len(job.lanes) * tokens / result.train_s if tokens and whole and result.train_s else None


def failed_rows(job: Job, reason: str, context: dict[str, Any]) -> list[dict[str, Any]]:
    """One row per lane of a job that was given up. They share their time of writing, by which `failed_jobs` joins them
    again."""
    now = datetime.now(UTC)
    return [{**_row(lane, job, context, now), "status": "failed", "failure": reason} for lane in job.lanes]


def _outcome(outcome: LaneResult, context: dict[str, Any]) -> dict[str, Any]:
    """The lane's own columns; the task's first metric has one to itself."""
    first = context.get("metric_name")
    return {**msgspec.structs.asdict(outcome), "val_metric": outcome.metrics.get(first) if first else None}


def _row(lane: Lane, job: Job, context: dict[str, Any], now: datetime) -> dict[str, Any]:
    return {
        **context,
        "lr_source": context.get("lr_source", {}).get(tuning_class(lane.recipe)),
        **recipe_columns(lane.recipe),
        "lr": lane.lr,
        "seed": lane.seed,
        "lanes": len(job.lanes),
        "created_at": now,
    }
