"""What is learned, as data: a task at a preset is one record with its data, its model and its training numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics


class Problem(msgspec.Struct, frozen=True):
    """Data and initial weights for a list of S seeds.

    train_x, train_y, val_x, val_y: [D, n, …] with D = S where the data are drawn per seed, D = 1 where all seeds share
    them. init: parameter name -> float32 [S, …].
    """

    train_x: Tensor
    train_y: Tensor
    val_x: Tensor
    val_y: Tensor
    init: dict[str, Tensor]


class Task(msgspec.Struct, frozen=True):
    """A task at a preset.

    problem     seeds -> Problem, on the CPU, from counters: the same for every recipe of a seed
    model       (parameters [L, …], numerics) -> module that maps x [L, B, …] to outputs [L, B, …]
    loss        (outputs, y) -> float32 [L, …]; the engine takes the mean over all but the lane axis
    metric      (outputs, y) -> float32 [L, …], higher is better, or None
    digest_of   what identifies the data: hashed into `digest`
    lr          default learning rate; a lane may have another
    decay       share of the steps, at the end, over which the learning rate falls linearly to zero
    """

    name: str
    preset: str
    rev: int
    summary: str
    problem: Callable[[Sequence[int]], Problem]
    model: Callable[[dict[str, Tensor], LaneNumerics], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    digest_of: Callable[[], str]
    steps: int
    batch: int
    lr: float
    metric: Callable[[Tensor, Tensor], Tensor] | None = None
    metric_name: str | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decay: float = 0.0

    def lr_factor(self, step: int) -> float:
        """What the learning rate is multiplied by at a step."""
        return min(1.0, (self.steps - step) / (self.decay * self.steps)) if self.decay else 1.0

    @property
    def digest(self) -> str:
        """16 hex digits that stand for the data set."""
        return self.digest_of()
