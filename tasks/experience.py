"""A task that learns from what its own model does: batches are made by the model, every few steps, and not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.inject import inject_name
from fp4dse.dse.noise import noise_name
from fp4dse.dse.rollout import rollout_name

if TYPE_CHECKING:
    from torch import Tensor

    from fp4dse.tasks.facts import TaskFacts
    from fp4dse.tasks.task import Task


def check_rollout(recipe: Recipe, task: TaskFacts | Task) -> None:
    """ConfigError for a rollout, a correction for one, a hold on its policy, or noise in it, with a task that does not
    learn from samples of its own; and for the replay of its router with a policy that has none."""
    training = recipe.training
    found: dict[str, object] = {"tis": training.tis, "kl": training.kl}
    found["rollout"] = None if training.rollout is None else rollout_name(training.rollout)
    found["inject"] = None if training.inject is None else inject_name(training.inject)
    found["noise"] = None if training.noise is None else noise_name(training.noise)
    for field, value in found.items():
        if value is not None and not task.rolls_out:
            accepted = f"nothing with {task.name}, which does not learn from samples of its own"
            raise ConfigError(f"training.{field}", value, accepted)
    if training.replay != "none" and not task.replays:
        accepted = f"none with {task.name}:{task.preset}, whose model has no experts that a rollout chooses"
        raise ConfigError("training.replay", training.replay, accepted)


class Experience(Protocol):
    """The samples of a population's lanes, made anew every `every` steps and learned from in between.

    error      float32 [L], the share of the last samples that failed: it stands where other tasks have a training loss
    recorded   name -> float32 [L], statistics of the last samples
    observes   names of what `observed` has
    fallbacks  sentences for paths that were wanted and not taken, beside those of the training's own

    What `recorded` and `observes` name costs next to nothing beside training, and is recorded at every step. Tensors
    keep their place, so that captured steps find them.
    """

    every: int
    error: Tensor
    recorded: dict[str, Tensor]
    observes: tuple[str, ...]
    fallbacks: tuple[str, ...]

    def collect(self) -> None:
        """Make new samples at the present step."""

    def batch(self) -> tuple[Any, Any]:
        """Inputs and targets of the present step."""

    def in_bf16(self) -> tuple[Any, Any]:
        """The batch of the present step for a pass of BF16 products, each sample with the weight that it has in the
        trainer's own pass: the two gradients differ by what products make of them alone."""

    def observed(self, out: Any, targets: Any) -> dict[str, Tensor]:
        """Name -> float32 [L], of outputs and targets of a batch, or a part of one, that is learned from now. A batch
        in parts has the mean of its parts."""

    def statistics(self) -> dict[str, Tensor]:
        """Name -> float64 [L], of the present samples and step, for the record: what takes passes of its own."""

    def examine(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of held-out samples x, y, [L, n] each, as the numerics stand."""

    def state(self) -> dict[str, Tensor]:
        """All that later steps depend on: name -> the tensor itself, the lane axis first."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from copies of what `state` returned."""
