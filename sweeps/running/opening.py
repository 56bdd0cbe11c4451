"""Opens a sweep or a search around its loop (driver.py): a locked store, an executor, signals and a display.

All of it is given back however the loop ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fp4dse.dse import Recipe, Space, StoreError
from fp4dse.dse.program.urls import redacted
from fp4dse.results import Store
from fp4dse.results.stats.stages import STAGE
from fp4dse.results.store.locks import birth
from fp4dse.results.store.retries import stop_waiting_when
from fp4dse.results.store.spaces import record_space
from fp4dse.sweeps.executors import LIMIT_S, Executor, check_executor, open_executor
from fp4dse.sweeps.executors.folder import folder_of
from fp4dse.sweeps.executors.outcome import most_lanes
from fp4dse.sweeps.planning.job_sizes import recall_sizes
from fp4dse.sweeps.planning.plan import checked_cost
from fp4dse.sweeps.planning.setting import Tasks, find_setting
from fp4dse.sweeps.running.driver import Sweep
from fp4dse.sweeps.running.progress import display
from fp4dse.sweeps.running.resume import store_leftovers
from fp4dse.sweeps.running.scheduler import BACKOFF_S, Scheduler
from fp4dse.sweeps.running.state import SweepState
from fp4dse.sweeps.running.stopping import heartbeat, is_refused, state_kept_if_refused, stop_signals
from fp4dse.sweeps.stores import open_swept, work_folder
from fp4dse.tasks.job import WORKER

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of a sweep or a search beside its recipes; `run_sweep` says what each field means."""

    tasks: Tasks = (("regression", "small"),)
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
    stage: str | None = None
    progress: bool | Callable[[SweepState], None] = False


@contextlib.contextmanager
def open_sweep(space: Space | Sequence[Recipe], request: Request) -> Iterator[Sweep]:
    """A sweep without jobs so far, on a store that is locked and an executor that is started.

    What an earlier driver left is taken in on entering; on leaving the executor is stopped, the state says how it
    ended, and the store is compact. ConfigError and StoreError as of `run_sweep`.
    """
    begin = time.monotonic()
    check_executor(request.executor)
    cost = checked_cost(space)
    setting = find_setting(request.tasks, request.device, request.jobs, request.executor == "local", cost)
    for context in setting.contexts.values():
        context[STAGE] = request.stage
    store = open_swept(request.store, cost)
    work = folder_of(request.options) if request.executor == "folder" else work_folder(request.store)
    state = SweepState(
        name=space.name if isinstance(space, Space) else request.stage or "recipes",
        asked=0,
        stored=0,
        born=birth(os.getpid()),
    )
    with (
        store.lock(),
        stop_signals() as signals,
        display(request.progress) as show,
        state_kept_if_refused(store.path, state),
        heartbeat(store.path, state) as is_asked,
        _ending(state, show),
    ):
        leftovers = store_leftovers(store, work)
        setting.learn_classes(store)
        command = tuple(request.worker)
        runner = open_executor(request.executor, work, setting.machine, command, request.job_limit_s, request.options)
        setting.machine.slots = setting.machine.slots[: runner.capacity]
        recall_sizes(setting)
        if request.executor == "local" and "lanes" in request.options:
            setting.sizes = dict.fromkeys(setting.contexts, most_lanes(request.options))
        scheduler = Scheduler(runner, deque(), setting.context, backoff_s=request.backoff_s)
        why_stop = partial(_reason_to_stop, runner, signals, begin, request.budget_s, is_asked)
        sweep = Sweep(store, work, scheduler, setting, state, leftovers, request.record, signals, why_stop, show)
        over = threading.Event()
        try:
            with stop_waiting_when(over.is_set):
                if isinstance(space, Space):
                    record_space(store, space)
                yield sweep
        finally:
            over.set()
            sweep.close()
        sweep.find_best()
        _make_compact(store)
        state.ended = sweep.stopped or "finished"
        sweep.refresh()


def _make_compact(store: Store) -> None:
    """Whatever comes next reads Parquet; if the server is away, whoever writes next joins what is there."""
    try:
        store.compact(minimum=1)
    except (OSError, StoreError) as error:
        if isinstance(store.path, Path):
            raise
        log.warning("%s; all rows are stored, but not joined into parts yet", redacted(error))


@contextlib.contextmanager
def _ending(state: SweepState, show: Callable[[SweepState], None]) -> Iterator[None]:
    """The state says which error ended the sweep; a refused one shows nothing: its caller prints the error."""
    try:
        yield
    except BaseException as error:
        state.ended, state.running = f"{type(error).__name__}: {error}", []
        if not is_refused(error, state):
            show(state)
        raise


def _reason_to_stop(
    runner: Executor, signals: list[str], begin: float, budget_s: float | None, is_asked: Callable[[], bool]
) -> str | None:
    if signals:
        return f"stopped by {signals[0]}"
    if budget_s is not None and time.monotonic() - begin >= budget_s:
        return f"the budget of {budget_s:g} s is spent"
    return "stopped by `fp4dse stop`" if is_asked() else runner.elsewhere
