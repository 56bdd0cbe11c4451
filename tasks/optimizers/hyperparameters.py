"""The numbers that an update takes: those of the recipe where it has some, else the task's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, assert_never

import msgspec
import torch
from torch import Tensor

from fp4dse.dse.optimizer import SGD, AdamW, Muon, StableSPAM
from fp4dse.dse.schedule import Constant, Cosine, Linear, Triangle
from fp4dse.dse.training import Training

if TYPE_CHECKING:
    from fp4dse.tasks.task import Task


class Tensors(NamedTuple):
    """Layout of a model's parameter tensors within the flat one.

    sizes     number of elements of each
    matrices  (outputs, inputs) of each that is the weight of a hidden layer, None for the others
    """

    sizes: Sequence[int]
    matrices: Sequence[tuple[int, int] | None]

    def per_element(self, x: Tensor) -> Tensor:
        """For each element the number of its tensor: x [L, T] -> [L, P]. Without an index of the elements, which would
        take twice the weights' memory."""
        of_each = zip(x.split(1, dim=1), self.sizes, strict=True)
        return torch.cat([number.expand(-1, size) for number, size in of_each], dim=1)


class Numbers(msgspec.Struct, frozen=True):
    """Hyperparameters of one lane. clip: inf for none. schedule: None for the task's. growth: of the loss scale, in
    steps, 0 for none. ramps: the steps between updates of a weight may be more than one (ramped.py). trains: as in
    Training."""

    optimizer: AdamW | SGD | StableSPAM | Muon
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip: float
    loss_scale: float
    schedule: Constant | Linear | Cosine | Triangle | None = None
    growth: int = 0
    ramps: bool = False
    trains: Literal["all", "learned", "none"] = "all"


def numbers_of(training: Training, task: Task) -> Numbers:
    """Hyperparameters of a recipe; those that are None in `training` are the task's, whose optimizer is AdamW."""

    def own(value: float | None, other: float | None) -> float:
        return value if value is not None else math.inf if other is None else other

    return Numbers(
        optimizer=training.optimizer or AdamW(),
        weight_decay=own(training.weight_decay, task.weight_decay) if training.trains == "all" else 0.0,
        beta1=own(training.beta1, task.betas[0]),
        beta2=own(training.beta2, task.betas[1]),
        eps=task.eps,
        clip=own(training.clip, task.clip),
        loss_scale=training.loss_scale,
        schedule=training.schedule,
        growth=training.loss_scale_growth or 0,
        ramps=training.ramping is not None,
        trains=training.trains,
    )


def schedule_factor(schedule: Constant | Linear | Cosine | Triangle, step: int, steps: int) -> float:
    """Factor of the learning rate at a step, by a schedule of the recipe.

        warm-up     (s + 1) / (w · steps)                                over the first w · steps steps s
        after that  constant    1
                    linear      floor + (1 - floor) · (1 - t)
                    cosine      floor + (1 - floor) · (1 + cos(π t)) / 2        (arXiv 1608.03983)

                    triangle    cosine over the steps but the last T = round(share · steps), of which step s, counted
                                from 1, has floor + (peak - floor) · (1 - |2s/T - 1|): peak in the middle, floor in
                                the last

    where t runs from 0 at the end of the warm-up to 1 after the last step. Computed on the host in float64 and rounded
    once, so that factors are the same on every device.
    """
    if isinstance(schedule, Triangle):
        last = round(schedule.share * steps)
        if step < steps - last:
            return schedule_factor(Cosine(schedule.warmup, schedule.floor), step, steps - last)
        place = 2 * (step + 1 - (steps - last)) / last - 1
        return schedule.floor + (schedule.peak - schedule.floor) * (1 - abs(place))
    rise = schedule.warmup * steps
    if step + 1 < rise:
        return (step + 1) / rise
    if isinstance(schedule, Constant):
        return 1.0
    top = max(rise, 1.0)  # the step after which it falls
    t = max(0.0, (step + 1 - top) / (steps + 1 - top))
    if isinstance(schedule, Linear):
        left = 1.0 - t
    elif isinstance(schedule, Cosine):
        left = (1.0 + math.cos(math.pi * t)) / 2.0
    else:
        assert_never(schedule)
    return schedule.floor + (1.0 - schedule.floor) * left
