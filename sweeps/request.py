"""What a sweep or a search is asked for beside its recipes: `run_sweep` says what each field means."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fp4dse.sweeps.executors import LIMIT_S, WORKER
from fp4dse.sweeps.scheduler import BACKOFF_S
from fp4dse.sweeps.setting import Tasks
from fp4dse.sweeps.state import SweepState


@dataclass(frozen=True, kw_only=True)
class Request:
    """Which tasks, into which store, by which workers, within which limits, and what is shown and stored on the way."""

    tasks: Tasks
    store: str | Path
    device: str = "cpu"
    jobs: int | None = None
    executor: str = "local"
    options: Mapping[str, str] = field(default_factory=dict)
    worker: Sequence[str] = WORKER
    budget_s: float | None = None
    job_limit_s: float = LIMIT_S
    backoff_s: float = BACKOFF_S
    record: bool = False
    progress: bool | Callable[[SweepState], None] = False
