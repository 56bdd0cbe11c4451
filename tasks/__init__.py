"""What is learned: data, models and losses per task, and the engine that trains a population of lanes.

What needs torch is imported when it is asked for, so that a driver, which trains nothing, starts without.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fp4dse.tasks.environment import check_device, check_task, diagnose, environment
from fp4dse.tasks.facts import TaskFacts, facts_of, find_facts
from fp4dse.tasks.job import Job, JobResult, Lane, LaneResult, Progress

if TYPE_CHECKING:
    from fp4dse.tasks.catalogue import ON_DATA, TASKS, get_task
    from fp4dse.tasks.engine import train
    from fp4dse.tasks.task import Problem, Task

_WITH_TORCH = {
    "ON_DATA": "catalogue",
    "TASKS": "catalogue",
    "get_task": "catalogue",
    "train": "engine",
    "Problem": "task",
    "Task": "task",
}


def __getattr__(name: str) -> object:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)


__all__ = [
    "ON_DATA",
    "TASKS",
    "Job",
    "JobResult",
    "Lane",
    "LaneResult",
    "Problem",
    "Progress",
    "Task",
    "TaskFacts",
    "check_device",
    "check_task",
    "diagnose",
    "environment",
    "facts_of",
    "find_facts",
    "get_task",
    "train",
]
