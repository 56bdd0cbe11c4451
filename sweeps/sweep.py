"""Runs a sweep from end to end: plan what is missing, train it, store it (opening.py, driver.py).

Failed lanes are missing as far as planning goes: the same command tries them again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse import Recipe, Space
from fp4dse.results import open_store
from fp4dse.results.store.remote import locate
from fp4dse.sweeps.executors import LIMIT_S, Running, check_executor
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.sweeps.planning.job_sizes import explain_sizes, plan_measured, recall_sizes
from fp4dse.sweeps.planning.plan import Plan, Rates, checked_cost, class_rates
from fp4dse.sweeps.planning.setting import Tasks, find_setting
from fp4dse.sweeps.running.opening import Request, open_sweep
from fp4dse.sweeps.running.scheduler import BACKOFF_S
from fp4dse.sweeps.running.state import Failure, SweepState, job_state
from fp4dse.tasks.job import WORKER, Job


class SweepResult(msgspec.Struct, frozen=True):
    """Counts are lanes: `asked` = `stored` before + `done` + `diverged` + `pruned` + `failed` + `left`.

    `stopped` says why lanes are left, None if none are. `failures`: by reason.
    """

    store: str
    asked: int
    stored: int
    done: int
    diverged: int
    pruned: int
    failed: int
    failures: list[Failure]
    stopped: str | None
    interrupted: bool
    wall_s: float

    @property
    def left(self) -> int:
        return self.asked - self.stored - self.done - self.diverged - self.pruned - self.failed

    def facts(self) -> dict[str, Any]:
        """For scripts."""
        return {**msgspec.to_builtins(self), "left": self.left}

    @property
    def exit_code(self) -> int:
        """130 if interrupted, 1 if lanes failed, else 0."""
        return 130 if self.interrupted else int(self.failed > 0)


def plan_sweep(
    space: Space | Sequence[Recipe],
    *,
    tasks: Tasks = (("regression", "small"),),
    seeds: Sequence[int] | None = None,
    lrs: Sequence[float] | None = None,
    store: str | Path | None = None,
    device: str = "cpu",
    jobs: int | None = None,
    executor: str = "local",
    halving: Halving | None = None,
    measure: bool = False,
) -> Plan:
    """Plan what `run_sweep` with these arguments would train. store: None is an empty one, or what `rerun` makes of
    any.

    Writes nothing, but for what is measured with `measure`: how many lanes a job had best (job_sizes.py), which a large
    sweep does when it starts.
    """
    check_executor(executor)
    setting = find_setting(tasks, device, jobs, local=executor == "local", cost=checked_cost(space))
    stored: set[str] = set()
    opened = None
    if store is not None and (locate(store) / "store.json").exists():
        opened = open_store(store)
        stored = opened.done(pruned=halving is not None)
        setting.learn_classes(opened)
    recall_sizes(setting)
    asked = setting.seeds_of(space, seeds, opened, None)
    planned = plan_measured(setting, partial(setting.plan, space, asked, lrs, stored, halving), measure)
    return msgspec.structs.replace(planned, sizes=explain_sizes(setting, planned))


def run_sweep(
    space: Space | Sequence[Recipe],
    *,
    tasks: Tasks = (("regression", "small"),),
    seeds: Sequence[int] | None = None,
    lrs: Sequence[float] | Rates | None = None,
    store: str | Path,
    device: str = "cpu",
    jobs: int | None = None,
    budget_s: float | None = None,
    rerun: bool = False,
    halving: Halving | None = None,
    record: bool = False,
    stage: str | None = None,
    progress: bool | Callable[[SweepState], None] = False,
    worker: Sequence[str] = WORKER,
    job_limit_s: float = LIMIT_S,
    executor: str = "local",
    options: Mapping[str, str] = {},
    backoff_s: float = BACKOFF_S,
) -> SweepResult:
    """Train every lane of the space that the store lacks; store what comes of it.

    seeds      None: the space's, else 0, 1, 2
    lrs        learning rates, the same for all; None: the space's, else each task's own for the recipe's class. A
               function of (task, recipe) gives each recipe its own, BF16 included
    jobs       workers at a time
    budget_s   seconds after which the sweep stops; all that was finished is stored
    rerun      train again what the store has
    halving    drop the worse lanes of a population at rungs on the way; what was dropped in a sweep with rungs counts
               as stored for another one
    stage      what the rows say they are of; `confirm`: fresh seeds of candidates (confirming.py)
    record     store gradient norms and what slots lose at log-spaced steps, too (tasks/engine/recorder.py)
    progress   True shows it on standard error; a function is called with the state a few times a second
    store      a folder, or a URL: s3://bucket/folder
    worker     command of a worker process
    executor   local, ray, slurm or folder; `options` are its own (see executors/)
    backoff_s  pause before a job is tried again

    SIGINT and SIGTERM stop the sweep cleanly. ConfigError on wrong input; StoreError if the store cannot be written,
    and then finished jobs that were not stored are taken in by the next sweep.
    """
    begin = time.monotonic()
    request = Request(
        tasks=tasks,
        store=store,
        device=device,
        jobs=jobs,
        executor=executor,
        options=options,
        worker=worker,
        budget_s=budget_s,
        job_limit_s=job_limit_s,
        backoff_s=backoff_s,
        record=record,
        stage=stage,
        progress=progress,
    )
    with open_sweep(space, request) as sweep:
        setting, state, baselines = sweep.setting, sweep.state, sweep.baselines
        if not (lrs or (isinstance(space, Space) and space.lanes.lr)):
            baselines.rates = class_rates
        elif callable(lrs):
            baselines.rates = lrs
        baselines.stored = set() if rerun else sweep.store.done(pruned=halving is not None)
        asked = setting.seeds_of(space, seeds, sweep.store, stage)

        def plan() -> Plan:
            found = setting.plan(space, asked, lrs, baselines.stored, halving)
            state.asked, state.stored = found.asked, found.stored
            return found

        def show_measuring(job: Job) -> None:
            first = job_state(Running(job, Path()))
            state.running = [msgspec.structs.replace(first, phase="measuring how many lanes are fastest")]
            sweep.show(state)

        todo = plan_measured(setting, plan, tuple(worker) == WORKER, show_measuring)
        sweep.queue(todo.jobs)
        if not rerun:
            baselines.note_stored(sweep.store)
        sweep.run()
    return SweepResult(
        store=str(store),
        asked=state.asked,
        stored=todo.stored,
        done=state.done,
        diverged=state.diverged,
        pruned=state.pruned,
        failed=state.failed,
        failures=list(state.failures.values()),
        stopped=sweep.stopped,
        interrupted=bool(sweep.signals),
        wall_s=time.monotonic() - begin,
    )
