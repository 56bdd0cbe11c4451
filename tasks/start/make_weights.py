"""Training of a single lane for its weights."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fp4dse.dse import ConfigError
from fp4dse.kernels.factors import with_whole_weights
from fp4dse.tasks.engine.run import Run
from fp4dse.tasks.job import Lane, LaneResult, Progress
from fp4dse.tasks.task import Task


def make_weights(
    task: Task, lane: Lane, device: str = "cpu", report: Callable[[Progress], None] = lambda _: None
) -> tuple[dict[str, Tensor], LaneResult]:
    """Train the lane as any population would, and return its weights, on the CPU under the names of the model's
    `state_dict`, with its result. ConfigError if it diverges. `report` is called a hundred times."""
    run = Run(task, [lane], device)
    while not run.over:
        run.advance()
        if run.progress.done % -(-task.steps // 100) == 0:
            report(Progress("train", run.progress.done, task.steps, run.losses()))
    state = with_whole_weights(run.population.model.state_dict())
    weights = {name: value[0].to("cpu", copy=True) for name, value in state.items()}
    [result] = run.results()
    if result.status != "done":
        what = f"{lane.recipe.label()} at --lr {lane.lr:g} and seed {lane.seed} on {task.name}:{task.preset}"
        raise ConfigError("weights", what, f"a lane that trains to its end (diverged at step {result.diverged_step})")
    return weights, result
