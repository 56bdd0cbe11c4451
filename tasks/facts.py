"""Facts of a task that a sweep needs to plan it and to name its rows: numbers and names, no data and no models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fp4dse.dse import Recipe
from fp4dse.dse.tuning import tuning_class
from fp4dse.tasks.remembered import remembered

if TYPE_CHECKING:
    from fp4dse.tasks.task import Task


class TaskFacts(msgspec.Struct, frozen=True):
    """Facts of a task; fields as in Task (task.py). `samples`: their number, None: always more than a batch."""

    name: str
    preset: str
    rev: int
    digest: str
    steps: int
    batch: int
    lr: float
    metric_name: str | None
    better: str | None
    dtype: str
    size: int = 0
    parameters: int | None = None
    tokens: int | None = None
    samples: int | None = None
    origin: tuple[str, ...] = ()
    start: str | None = None
    start_method: str | None = None
    rates: dict[str, float] = {}
    rolls_out: bool = False
    gap_unit: str | None = None
    has_teacher: bool = False
    replays: bool = False
    contents: str | None = None


def rate_of(task: TaskFacts | Task, recipe: Recipe) -> float:
    """The learning rate of a recipe where nobody gives one: the tuned one of its class, else the preset's."""
    return task.rates.get(tuning_class(recipe), task.lr)


def facts_of(task: Task) -> TaskFacts:
    """Facts of a task. Reads its data, for their digest."""
    same = {name: getattr(task, name) for name in TaskFacts.__struct_fields__}
    return TaskFacts(**{**same, "samples": task.samples() if task.samples else None})


def find_facts(*asked: str) -> TaskFacts:
    """Facts of the task that get_task finds for the same arguments; raises its ConfigErrors.

    Those of our own tasks on bundled data follow from the source alone, and are remembered.
    """

    def ask() -> TaskFacts:
        from fp4dse.tasks.catalogue import get_task  # imports torch

        return facts_of(get_task(*asked))

    bundled = len(asked) == 2 and not asked[0].endswith(".py")
    return remembered(f"facts of {':'.join(asked)}", ask, TaskFacts) if bundled else ask()
