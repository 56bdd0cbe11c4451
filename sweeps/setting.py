"""What a sweep runs on and what it trains: the machine shared out among workers, the tasks, what their rows share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.sweeps.plan import Plan, plan
from fp4dse.sweeps.rows import lane_id, task_context
from fp4dse.sweeps.rungs import Halving
from fp4dse.tasks import Task, check_device, environment, get_task

SEEDS = (0, 1, 2)
"""Where neither the command nor the space says."""
Tasks = Sequence[tuple[str, str]]
"""(task, preset) pairs."""


@dataclass
class Machine:
    """What the workers run on. `slots`: a worker's extra environment variables, one entry a worker."""

    device: str
    threads: int
    slots: list[dict[str, str]]


@dataclass
class Setting:
    """Tasks with their contexts (rows.py) on a machine."""

    machine: Machine
    tasks: list[Task]
    contexts: dict[tuple[str, str], dict]

    def plan(
        self,
        recipes: Space | Sequence[Recipe],
        seeds: Sequence[int] | None,
        lrs: Sequence[float] | None,
        stored: set[str],
        halving: Halving | None = None,
    ) -> Plan:
        """What is missing. Without seeds or learning rates: those of the space, else `SEEDS` and each task's own."""
        if isinstance(recipes, Space):
            seeds = seeds or recipes.lanes.seeds
            lrs = lrs or recipes.lanes.lr
        return plan(
            recipes.recipes() if isinstance(recipes, Space) else recipes,
            self.tasks,
            seeds=list(dict.fromkeys(seeds or SEEDS)),
            lrs=lrs and list(dict.fromkeys(lrs)),
            is_stored=lambda task, lane: lane_id(lane, self.contexts[task.name, task.preset]) in stored,
            device=self.machine.device,
            threads=self.machine.threads,
            workers=len(self.machine.slots),
            rungs=halving.rungs if halving else lambda _: [],
        )


def find_machine(device: str, jobs: int | None = None) -> Machine:
    """How many workers run at a time and on what; `jobs = None` chooses. ConfigError on a device that is not there.

    On a CPU a worker a core, with one thread each whatever `jobs` is: results depend on the number of threads, and what
    is stored must be found again by a sweep with more or fewer workers and on a machine with more or fewer cores.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError("--jobs", jobs, "a whole number above 0")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device == "cpu":
        return Machine(device, 1, [{"CUDA_VISIBLE_DEVICES": ""}] * (jobs or cores))
    if device != "cuda":
        raise ConfigError("--device", device, "cpu, cuda")
    check_device(device)
    import torch

    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    cards = listed.split(",") if listed else [str(i) for i in range(torch.cuda.device_count())]
    workers = jobs or len(cards)
    slots = [{"CUDA_VISIBLE_DEVICES": cards[i % len(cards)]} for i in range(workers)]
    return Machine(device, max(1, cores // workers), slots)


def find_setting(tasks: Tasks, device: str = "cpu", jobs: int | None = None) -> Setting:
    """Look tasks and machine up. ConfigError on unknown ones."""
    found = [get_task(name, preset) for name, preset in dict.fromkeys(tasks)]
    machine = find_machine(device, jobs)
    surroundings = environment(device, machine.threads)
    return Setting(machine, found, {(t.name, t.preset): task_context(t, surroundings) for t in found})
