"""Tasks that have a teacher for recipes that want one (tasks/teacher.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.training import coreset_name, distill_name

if TYPE_CHECKING:
    from fp4dse.tasks.facts import TaskFacts
    from fp4dse.tasks.task import Task


def check_distill(recipe: Recipe, task: TaskFacts | Task) -> None:
    """ConfigError for a teacher, or a coreset that one chooses, with a task that has none."""
    training = recipe.training
    found = {"distill": distill_name(training.distill), "coreset": coreset_name(training.coreset)}
    for field, name in found.items():
        if name != "none" and not task.has_teacher:
            why = "learns from samples of its own" if task.rolls_out else "starts from no trained model with logits"
            accepted = f"none with {task.name}:{task.preset}, which {why}"
            raise ConfigError(f"training.{field}", name, accepted)
