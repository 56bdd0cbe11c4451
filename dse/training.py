"""The training side of a recipe, as data: optimizer, its numbers, loss scale, gradient accumulation.

What is None is the task's own. The kind of the optimizer and the number of parts of a batch are structure; every
other number is a lane's. tasks/optimizers computes it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fp4dse.dse.record import Part

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class AdamW(Part, frozen=True, tag_field="kind", tag="adamw"):
    """Adam with decoupled weight decay (1711.05101)."""


class SGD(Part, frozen=True, tag_field="kind", tag="sgd"):
    """buffer <- momentum · buffer + gradient + weight decay · weight; the weight moves by -lr · buffer."""

    momentum: NotNegative = 0.9


class StableSPAM(Part, frozen=True, tag_field="kind", tag="stable-spam"):
    """Adam on gradients that are clipped and normalised per tensor, with its momenta reset (2502.17055).

    theta   share of the past in the running maximum that entries are clipped to (AdaClip)
    gamma1  that of the running norm, and gamma2 of its square, by which a gradient is normalised (AdaGN)
    reset   steps between resets of the momenta (MoRet)
    """

    theta: Positive = 0.999
    gamma1: Positive = 0.7
    gamma2: Positive = 0.9
    reset: Annotated[int, msgspec.Meta(ge=1)] = 1000


Optimizer = AdamW | SGD | StableSPAM | None
OPTIMIZER_NAMES: dict[str, AdamW | SGD | StableSPAM] = {"adamw": AdamW(), "sgd": SGD(), "stable-spam": StableSPAM()}


class Training(Part, frozen=True):
    """How weights follow from gradients.

    weight_decay   on the weights of products alone: not on biases, norms, positions or tables
    beta1, beta2   of Adam
    clip           of the gradient's norm over the whole model
    loss_scale     the loss is multiplied by it, and gradients are divided by it before they are used
    accumulate     equal parts into which a batch is cut, one after the other; their gradients are averaged
    schedule       of the learning rate after a warm-up: constant, or down to its floor at the last step, linearly or by
                   half a cosine (1608.03983); None for the task's, with its own warm-up
    warmup         share of the steps over which it rises linearly; floor: share of it that is left at the end
    """

    optimizer: Optimizer = None
    weight_decay: NotNegative | None = None
    beta1: NotNegative | None = None
    beta2: NotNegative | None = None
    clip: Positive | None = None
    loss_scale: Positive = 1.0
    accumulate: Literal[1, 2, 4, 8, 16, 32, 64] = 1
    schedule: Literal["constant", "linear", "cosine"] | None = None
    warmup: Share | None = None
    floor: Share = 0.0

    def canonical(self) -> Training:
        """SGD has no betas, the task's schedule no warm-up of ours, and nothing falls that is constant."""
        idle: dict[str, float | None] = {}
        if isinstance(self.optimizer, SGD):
            idle |= {"beta1": None, "beta2": None}
        if self.schedule is None:
            idle |= {"warmup": None}
        if self.schedule in (None, "constant"):
            idle |= {"floor": 0.0}
        return msgspec.structs.replace(self, **idle) if idle else self

    @property
    def kind(self) -> str:
        """Of the optimizer: `task`, `adamw`, `sgd`, `stable-spam`."""
        return "task" if self.optimizer is None else str(self.optimizer.__struct_config__.tag)

    def label(self) -> str:
        """What is not the task's own, in words; empty if nothing is."""
        words = [] if self.optimizer is None else [optimizer_name(self.optimizer)]
        for name in self.__struct_fields__[1:]:
            if (value := getattr(self, name)) != getattr(DEFAULT, name):
                words.append(f"{name.replace('_', ' ')} {value}".removesuffix(".0"))
        return ", ".join(words)


DEFAULT = Training()


def optimizer_name(optimizer: AdamW | SGD | StableSPAM | None) -> str:
    """The key in OPTIMIZER_NAMES, or the kind with its numbers, in full; `task` for none."""
    if optimizer is None:
        return "task"
    name = next((name for name, known in OPTIMIZER_NAMES.items() if known == optimizer), None)
    numbers = [f"{field}={getattr(optimizer, field)!r}".removesuffix(".0") for field in optimizer.__struct_fields__]
    return name or " ".join([str(optimizer.__struct_config__.tag), *numbers])
