"""What is learned: data, models and losses per task, and the engine that trains a population of lanes."""

from fp4dse.tasks.catalogue import ON_DATA, TASKS, get_task
from fp4dse.tasks.engine import train
from fp4dse.tasks.environment import check_device, check_task, diagnose, environment
from fp4dse.tasks.job import Job, JobResult, Lane, LaneResult, Progress
from fp4dse.tasks.task import Problem, Task

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
    "check_device",
    "check_task",
    "diagnose",
    "environment",
    "get_task",
    "train",
]
