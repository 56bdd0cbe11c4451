"""The training side of a recipe, as data: the optimizer and its numbers, loss scale, gradient accumulation, schedule of
the learning rate, and what a run learns from.

What is None is the task's own. The kind of the optimizer and the number of parts of a batch are structure; every
other number is a lane's. tasks/optimizers computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from fp4dse.dse.inject import Inject, inject_name
from fp4dse.dse.noise import Noise, noise_name
from fp4dse.dse.optimizer import SGD, AdamW, Optimizer, optimizer_name
from fp4dse.dse.oscillation import Ramping, Reset, ramping_name, reset_name
from fp4dse.dse.record import NotNegative, Part, Positive, Share, name_in
from fp4dse.dse.rollout import Rollout, rollout_name
from fp4dse.dse.schedule import Schedule, schedule_name

Growth = Annotated[int, msgspec.Meta(ge=1)] | None


class Distill(Part, frozen=True):
    """The loss is in part the distance from a teacher: the model that training starts from, in BF16 (QAD: LLM-QAT,
    2305.17888; 2601.20088).

    loss <- (1 - weight) · loss + weight · temperature² · KL(teacher, student), of softmax(logits / temperature)

    The square keeps gradients alike at all temperatures (1503.02531). Both papers have no other loss.
    """

    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    temperature: Positive = 1.0


DISTILL_NAMES: dict[str, Distill] = {"qad": Distill()}


class Coreset(Part, frozen=True):
    """A share of the training samples is read, over and over, in as many steps as all would be (ACS, 2306.07215).

    by          `acs`: those that the model gets wrong or that quantization moves (tasks/engine/coresets.py has the
                score); `random`: drawn once
    selections  times that ACS chooses, the first before the first step; each reads all samples once
    """

    by: Literal["acs", "random"] = "acs"
    share: Share = 0.1
    selections: Annotated[int, msgspec.Meta(ge=1)] = 4

    def count(self, samples: int) -> int:
        """The number of these samples that it has, one at least."""
        return max(1, round(self.share * samples))

    def canonical(self) -> Coreset | None:
        """All samples are no coreset, and what is drawn once is not chosen again."""
        if self.share == 1:
            return None
        return msgspec.structs.replace(self, selections=Coreset().selections) if self.by == "random" else self


CORESET_NAMES: dict[str, Coreset] = {"acs": Coreset(), "random": Coreset(by="random")}


class Training(Part, frozen=True):
    """The update of weights from gradients.

    weight_decay   on the weights of products alone: not on biases, norms, positions or tables
    beta1, beta2   of Adam, also of the part of Muon's that is AdamW
    clip           of the gradient's norm over the whole model
    loss_scale     the loss is multiplied by it, and gradients are divided by it before they are used
    accumulate     equal parts into which a batch is cut, one after the other; their gradients are averaged
    schedule       of the learning rate
    reset          of oscillating weights
    rollout        the forward pass that samples come from, where a task learns from its own; None: the trainer's
    tis            bound of a sample's weight π_trainer / π_rollout, by which a task that learns from its own samples
                   corrects for the difference of the two (truncated importance sampling); None: no such weight
    loss_scale_growth   steps in a row with finite gradients after which the loss scale doubles; where gradients are not
                   finite it halves, and the step is left out (1710.03740); None: the scale stays
    ramping        of the steps between updates of oscillating weights
    noise          on parameters of the policy that samples, where a task learns from its own
    distill        a teacher, where a task starts from trained weights; None: the task's loss alone
    replay         `router`: in the trainer's forward pass a token goes to the experts that the rollout's router chose,
                   with the weights of the trainer's own (2510.11370), where a policy that learns from its own samples
                   has experts
    inject         parts of a quantizer's error that weights have where a policy samples, which is else in BF16
    coreset        of the training samples, where a task starts from trained weights; None: all of them
    kl             weight of the divergence from the policy that training began with, in the loss of a task that learns
                   from its own samples; None: the task's own
    trains         `all` parameters, those alone that quantizers have `learned`, or `none`: what training starts from is
                   evaluated as it is, which is rounding to nearest after training (PTQ)
    """

    optimizer: Optimizer = None
    weight_decay: NotNegative | None = None
    beta1: NotNegative | None = None
    beta2: NotNegative | None = None
    clip: Positive | None = None
    loss_scale: Positive = 1.0
    accumulate: Literal[1, 2, 4, 8, 16, 32, 64] = 1
    schedule: Schedule = None
    reset: Reset = None
    rollout: Rollout | None = None
    tis: Positive | None = None
    loss_scale_growth: Growth = None
    ramping: Ramping = None
    noise: Noise | None = None
    distill: Distill | None = None
    trains: Literal["all", "learned", "none"] = "all"
    replay: Literal["none", "router"] = "none"
    coreset: Coreset | None = None
    inject: Inject | None = None
    kl: NotNegative | None = None

    def canonical(self) -> Training:
        """The one spelling of all that compute the same: SGD has no betas; coreset and rollout say their own."""
        if self.coreset is not None and (coreset := self.coreset.canonical()) != self.coreset:
            return msgspec.structs.replace(self, coreset=coreset).canonical()
        if self.rollout is not None and (rollout := self.rollout.canonical()) != self.rollout:
            return msgspec.structs.replace(self, rollout=rollout).canonical()
        return msgspec.structs.replace(self, beta1=None, beta2=None) if isinstance(self.optimizer, SGD) else self

    def of_baseline(self) -> Training:
        """The part that BF16 has, too, where a gap is what FP4 costs beside it: optimizer, schedule and numbers of the
        update, and `kl`, which is part of the loss that is trained on. MEASURED_AGAINST_PLAIN is left out, and so is
        what changes no bit of BF16: AdamW, every task's own optimizer, and a loss scale that is a power of two, which
        is undone to the last bit when gradients are divided by it, as far as exponents reach."""
        scale_is_exact = math.frexp(self.loss_scale)[0] == 0.5
        return msgspec.structs.replace(
            self.canonical(),
            optimizer=None if isinstance(self.optimizer, AdamW) else self.optimizer,
            loss_scale=1.0 if scale_is_exact else self.loss_scale,
            loss_scale_growth=None if scale_is_exact else self.loss_scale_growth,
            **{name: getattr(DEFAULT, name) for name in MEASURED_AGAINST_PLAIN},
        )

    @property
    def kind(self) -> str:
        """Of the optimizer: `task`, `adamw`, `sgd`, `stable-spam`, `muon`."""
        return "task" if self.optimizer is None else str(self.optimizer.__struct_config__.tag)

    def label(self) -> str:
        """The fields that differ from the task's own, in words; empty if none does."""
        words = [] if self.optimizer is None else [optimizer_name(self.optimizer)]
        words += [
            f"{name.replace('_', ' ')} {value!r}".removesuffix(".0")
            for name in self.__struct_fields__
            if name not in IN_WORDS and (value := getattr(self, name)) != getattr(DEFAULT, name)
        ]
        parts = {name: getattr(self, name) for name in WORDS if name != "optimizer"}
        words += [f"{WORDS[name][0]}{WORDS[name][1](part)}" for name, part in parts.items() if part is not None]
        words += {"none": [], "router": ["router replay"]}[self.replay]
        words += {"all": [], "learned": ["trains what is learned"], "none": ["untrained"]}[self.trains]
        return ", ".join(words)


DEFAULT = Training()
MEASURED_AGAINST_PLAIN = (
    "reset",
    "ramping",
    "rollout",
    "tis",
    "noise",
    "distill",
    "trains",
    "replay",
    "coreset",
    "inject",
)
"""Techniques for what is quantized: whether they pay is asked by the gap to BF16 without them, although some of them
change what BF16 computes."""


def distill_name(distill: Distill | None) -> str:
    """The key in DISTILL_NAMES, or weight and temperature; `none` for none."""
    if distill is None:
        return "none"
    numbers = f"distill weight={distill.weight:g} temperature={distill.temperature:g}"
    return name_in(DISTILL_NAMES, distill) or numbers


def coreset_name(coreset: Coreset | None) -> str:
    """The key in CORESET_NAMES, or the numbers; `none` for none."""
    if coreset is None:
        return "none"
    times = f" selections={coreset.selections}" if coreset.by == "acs" else ""
    return name_in(CORESET_NAMES, coreset) or f"{coreset.by} share={coreset.share:g}{times}"


WORDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "optimizer": ("", optimizer_name),
    "schedule": ("learning rate ", schedule_name),
    "reset": ("", reset_name),
    "ramping": ("", ramping_name),
    "rollout": ("rollout ", rollout_name),
    "noise": ("noise ", noise_name),
    "distill": ("", distill_name),
    "inject": ("inject ", inject_name),
    "coreset": ("coreset ", coreset_name),
}
"""Field that is a part, or None for none -> what a label has before its name, and the function that names it. In the
order of labels; the optimizer stands before all numbers."""
IN_WORDS = (*WORDS, "trains", "replay")
"""Fields whose label is not their name with a value."""
