"""What is learned: data, models and losses per task, and the engine that trains a population of lanes."""

from fp4dse.dse import ConfigError
from fp4dse.tasks import language, regression, vision
from fp4dse.tasks.engine import train
from fp4dse.tasks.environment import check_device, diagnose, environment
from fp4dse.tasks.job import Job, JobResult, Lane, LaneResult, Progress
from fp4dse.tasks.task import Problem, Task

TASKS: dict[str, dict[str, Task]] = {
    "regression": regression.PRESETS,
    "vision": vision.PRESETS,
    "language": language.PRESETS,
}
"""Task name -> preset name -> task."""


def get_task(name: str, preset: str = "small") -> Task:
    """The task at a preset; ConfigError names the known ones."""
    if name not in TASKS:
        raise ConfigError("task", name, ", ".join(TASKS))
    if preset not in TASKS[name]:
        raise ConfigError(f"preset of {name}", preset, ", ".join(TASKS[name]))
    return TASKS[name][preset]


__all__ = [
    "TASKS",
    "Job",
    "JobResult",
    "Lane",
    "LaneResult",
    "Problem",
    "Progress",
    "Task",
    "check_device",
    "diagnose",
    "environment",
    "get_task",
    "train",
]
