"""The setting of a sweep: its tasks, what their rows share, and the machine of its workers (machine.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.dse.cost import DEFAULT_COST, CostTarget
from fp4dse.dse.tuning import CLASSES
from fp4dse.results import Store
from fp4dse.results.stats.stages import STAGE
from fp4dse.results.store.schema import KEY
from fp4dse.sweeps.jobs.machine import Machine, find_machine
from fp4dse.sweeps.jobs.rows import KIND, SHARED, lane_id, task_context
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.sweeps.planning.plan import Plan, Rates, plan
from fp4dse.tasks import TaskFacts, check_task, environment, find_facts
from fp4dse.tasks.job import Job, Lane

UNKNOWN = "unknown"
"""Device class in the rows of jobs that failed before a worker could say."""
SEEDS = (0, 1, 2)
"""Where neither the command nor the space says."""
Tasks = Sequence[tuple[str, ...]]
"""Arguments of get_task: (task, preset), (task, preset, data), or (task, preset, data or an empty text, weights)."""


@dataclass
class Setting:
    """Tasks with their contexts (rows.py) on a machine. `sizes`: most lanes of a job, where that was measured.
    `cost`: whose overheads rungs go by."""

    machine: Machine
    tasks: list[TaskFacts]
    contexts: dict[tuple[str, str], dict[str, Any]]
    classes: list[dict[str, Any]] = field(default_factory=lambda: [{}])
    sizes: dict[tuple[str, str], int] = field(default_factory=dict)
    cost: CostTarget = DEFAULT_COST

    def context(self, job: Job) -> dict[str, Any]:
        """The columns that the rows of a job share."""
        return {**self.contexts[job.task, job.preset], **job.only_on}

    def learn_classes(self, store: Store) -> None:
        """Count what one kind of machine or card has trained for all kinds that workers run on.

        `classes`: the columns in which contexts may differ, one entry a kind of card here, or a kind that the store
        knows where others hand the workers out.
        """
        kinds = dict.fromkeys(self.machine.kinds)
        if kinds:
            self.classes = [{"device_class": kind} for kind in kinds]
            return
        rows = store.runs(["device", *KIND])
        self.classes += rows[rows["device"].eq(self.machine.device)][[*KIND]].drop_duplicates().to_dict("records")

    def seeds_of(
        self, recipes: Space | Sequence[Recipe], given: Sequence[int] | None, store: Store | None, stage: str | None
    ) -> list[int]:
        """The seeds to train: those that are given, else those of the space, else `SEEDS`; each once.

        ConfigError if rows of another stage of the store have one of them: a lane is trained once, so it would be
        missing in this stage, and a seed that chose learning rates or judged candidates can do nothing else.
        """
        own = recipes.lanes.seeds if isinstance(recipes, Space) else None
        seeds = list(dict.fromkeys(given or own or SEEDS))
        if store is not None:
            rows = store.runs([*SHARED, "seed", STAGE])
            rows = rows[rows["seed"].isin(seeds) & ~rows[STAGE].eq(stage) & (rows[STAGE].notna() | (stage is not None))]
            for context in self.contexts.values():
                met = rows[(rows[SHARED] == [context[name] for name in SHARED]).all(axis="columns")]
                if len(met):
                    of = met[STAGE].fillna("sweep").iloc[0]
                    accepted = f"seeds that no row of another stage has, or another store: `{of}` trained this one"
                    raise ConfigError("--seeds", int(met["seed"].iloc[0]), accepted)
        return seeds

    def stored_in(self, stored: set[str]) -> Callable[..., bool]:
        """A function that is true for a lane among the run_ids, trained on one kind of machine, or on any."""
        keys = {
            task: [{name: value for name, value in {**context, **kind}.items() if name in KEY} for kind in self.classes]
            for task, context in self.contexts.items()
        }

        def is_stored(task: TaskFacts, lane: Lane, kind: dict[str, str] | None = None) -> bool:
            if kind:
                return lane_id(lane, {**self.contexts[task.name, task.preset], **kind}) in stored
            return any(lane_id(lane, key) in stored for key in keys[task.name, task.preset])

        return is_stored

    def plan(
        self,
        recipes: Space | Sequence[Recipe],
        seeds: Sequence[int],
        lrs: Sequence[float] | Rates | None,
        stored: set[str],
        halving: Halving | None = None,
    ) -> Plan:
        """Plan what is missing. Without learning rates: those of the space, else the task's rate for each class of
        recipes."""
        if isinstance(recipes, Space):
            lrs = lrs or recipes.lanes.lr
        for task in self.tasks:
            source = "searched" if callable(lrs) else "given" if lrs else None
            of_class = {name: source or ("tuned" if name in task.rates else "preset") for name in CLASSES}
            self.contexts[task.name, task.preset]["lr_source"] = of_class
        return plan(
            recipes.recipes() if isinstance(recipes, Space) else recipes,
            self.tasks,
            seeds=seeds,
            lrs=lrs if callable(lrs) or not lrs else list(dict.fromkeys(lrs)),
            is_stored=self.stored_in(stored),
            machine=self.machine,
            sizes=self.sizes,
            halving=halving,
            cost=self.cost,
        )


def find_setting(
    tasks: Tasks, device: str = "cpu", jobs: int | None = None, local: bool = True, cost: CostTarget = DEFAULT_COST
) -> Setting:
    """Look tasks and machine up. ConfigError on unknown ones. Not `local`: others run the workers, where nothing is
    known of their machines but what their results say."""
    wanted = list(dict.fromkeys(tasks))
    found = [find_facts(*asked) for asked in wanted]
    machine = find_machine(device, jobs, local)
    for task in found:
        if local:
            check_task(task, device)
        same = [asked for asked, t in zip(wanted, found, strict=True) if (t.name, t.preset) == (task.name, task.preset)]
        if len(same) > 1:
            raise _of_same_rows(task, same)
    surroundings = environment(device, machine.threads) if local or device == "cpu" else elsewhere(device)
    return Setting(machine, found, {(t.name, t.preset): task_context(t, surroundings) for t in found}, cost=cost)


def _of_same_rows(task: TaskFacts, asked: Tasks) -> ConfigError:
    """Why tasks whose rows would be the same cannot be trained beside each other. asked: as get_task takes them."""
    typed = list(dict.fromkeys(":".join(pair[:2]) for pair in asked))
    if len(typed) == 1:
        return ConfigError("--task", f"{typed[0]} twice", "tasks that differ in name or preset")
    why = f"they change no bit, so that both are rows of {task.name}:{task.preset}"
    more = "to compare what they keep, give each a --store of its own"
    accepted = f"one of them, with +packed and +recompute or without ({why}; {more})"
    return ConfigError("--task", " and ".join(typed), accepted)


def elsewhere(device: str) -> dict[str, str | int]:
    """The environment of workers on a device that this machine may lack; what they find replaces it in their rows."""
    return {**environment("cpu", 1), "device": device, "device_class": UNKNOWN, "device_name": UNKNOWN}
