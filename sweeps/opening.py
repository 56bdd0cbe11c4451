"""What stands around the loop of a sweep or a search (driver.py): a locked store, an executor, signals and a display.

All of it is given back however the loop ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from fp4dse.dse import Recipe, Space, StoreError
from fp4dse.dse.cost import DEFAULT_COST, CostTarget
from fp4dse.dse.urls import redacted
from fp4dse.results import Store, open_store
from fp4dse.results.store.locks import birth
from fp4dse.results.store.remote import locate
from fp4dse.results.store.retries import stop_waiting_when
from fp4dse.results.store.spaces import record_space
from fp4dse.sweeps.driver import Sweep
from fp4dse.sweeps.executors import open_executor
from fp4dse.sweeps.heartbeat import heartbeat
from fp4dse.sweeps.places import BESIDE, work_folder
from fp4dse.sweeps.plan import check_space
from fp4dse.sweeps.progress import display
from fp4dse.sweeps.request import Request
from fp4dse.sweeps.resume import take_in_leftovers
from fp4dse.sweeps.scheduler import Scheduler
from fp4dse.sweeps.setting import find_setting
from fp4dse.sweeps.signals import stop_signals
from fp4dse.sweeps.sizes import recall_sizes
from fp4dse.sweeps.state import SweepState

log = logging.getLogger(__name__)


@contextlib.contextmanager
def open_sweep(space: Space | Sequence[Recipe], request: Request) -> Iterator[Sweep]:
    """A sweep without jobs so far, on a store that is locked and an executor that is started.

    What an earlier driver left is taken in on entering; on leaving the executor is stopped, the state says how it
    ended, and the store is compact. ConfigError and StoreError as of `run_sweep`.
    """
    begin = time.monotonic()
    name, cost = "recipes", DEFAULT_COST
    if isinstance(space, Space):
        check_space(space)
        name, cost = space.name, space.cost
    setting = find_setting(request.tasks, request.device, request.jobs, local=request.executor == "local")
    setting.cost = cost
    store = open_swept(request.store, cost)
    work = work_folder(request.store)
    state = SweepState(name=name, asked=0, stored=0, born=birth(os.getpid()))
    with (
        store.lock(),
        stop_signals() as signals,
        display(request.progress) as show,
        heartbeat(store.path, state) as is_asked,
        _ending(state, show),
    ):
        begun = take_in_leftovers(store, work)
        setting.learn_classes(store)
        command = tuple(request.worker)
        runner = open_executor(request.executor, work, setting.machine, command, request.job_limit_s, request.options)
        setting.machine.slots = setting.machine.slots[: runner.capacity]
        recall_sizes(setting)
        scheduler = Scheduler(runner, deque(), setting.context, backoff_s=request.backoff_s)
        why_stop = partial(_reason_to_stop, signals, begin, request.budget_s, is_asked)
        sweep = Sweep(store, work, scheduler, setting, state, begun, request.record, signals, why_stop, show)
        over = threading.Event()
        try:
            with stop_waiting_when(over.is_set):
                if isinstance(space, Space):
                    record_space(store, space)
                yield sweep
        finally:
            over.set()
            sweep.close()
        sweep.judge()
        _make_compact(store)
        state.ended = sweep.stopped or "finished"
        sweep.tell()


def open_swept(store: str | Path, cost: CostTarget = DEFAULT_COST) -> Store:
    """The store to sweep into, made if it is not there. One that was deleted while a sweep ran is made anew, and said
    to be: the job folders that were written since are taken in."""
    place = locate(store)
    left = sorted(BESIDE & {entry.name for entry in place.iterdir()}) if place.is_dir() else []
    if left and not (place / "store.json").exists():
        log.warning("%s: the store is gone, but for %s; it is begun anew with what they hold", place, ", ".join(left))
    return open_store(store, create=True, beside=BESIDE, cost=cost)


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
    """The state says which error ended the sweep."""
    try:
        yield
    except BaseException as error:
        state.ended, state.running = f"{type(error).__name__}: {error}", []
        show(state)
        raise


def _reason_to_stop(
    signals: list[str], begin: float, budget_s: float | None, is_asked: Callable[[], bool]
) -> str | None:
    if signals:
        return f"stopped by {signals[0]}"
    if budget_s is not None and time.monotonic() - begin >= budget_s:
        return f"the budget of {budget_s:g} s is spent"
    return "stopped by `fp4dse stop`" if is_asked() else None
