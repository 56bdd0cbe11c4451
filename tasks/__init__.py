"""Tasks: their data, models and losses, and the engine that trains a population of lanes.

Names that need torch are imported on first use, so that a driver, which trains nothing, starts without torch.
"""

from typing import TYPE_CHECKING

from fp4dse.dse.program.lazy import lazy
from fp4dse.tasks.environment import check_device, check_task, diagnose, environment
from fp4dse.tasks.facts import TaskFacts, facts_of, find_facts
from fp4dse.tasks.job import Job, JobResult, Lane, LaneResult, Progress

if TYPE_CHECKING:
    from fp4dse.tasks.catalogue import ON_DATA, TASKS, get_task
    from fp4dse.tasks.engine import Pruning, train
    from fp4dse.tasks.task import Problem, Task

__getattr__ = lazy(
    __name__,
    catalogue=("ON_DATA", "TASKS", "get_task"),
    engine=("Pruning", "train"),
    task=("Problem", "Task"),
)

__all__ = [
    "ON_DATA",
    "TASKS",
    "Job",
    "JobResult",
    "Lane",
    "LaneResult",
    "Problem",
    "Progress",
    "Pruning",
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
