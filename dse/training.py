"""The training side of a recipe, as data: optimizer, its numbers, loss scale, gradient accumulation,
schedule of the learning rate.

What is None is the task's own. The kind of the optimizer and the number of parts of a batch are structure; every
other number is a lane's. tasks/optimizers computes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from fp4dse.dse.inject import Inject, inject_name
from fp4dse.dse.noise import Noise, noise_name
from fp4dse.dse.record import Part, name_in, name_or_numbers
from fp4dse.dse.rollout import Rollout, rollout_name

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


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


MUON_SCALES: dict[str, Callable[[int, int], float]] = {
    "match-rms": lambda out, in_: 0.2 * math.sqrt(max(out, in_)),  # arXiv 2502.16982, equation 4
    "original": lambda out, in_: math.sqrt(max(1.0, out / in_)),  # github.com/KellerJordan/Muon
}
"""Name -> factor of an orthogonal update, by the weight's outputs and inputs. `match-rms` gives it a root mean square
of 0.2, which is about AdamW's, so that AdamW's learning rates and weight decays carry over."""


class Muon(Part, frozen=True, tag_field="kind", tag="muon"):
    """Momentum made orthogonal, for the weights of hidden layers (kellerjordan.github.io/posts/muon, 2502.16982); AdamW
    for all else.

    nesterov  what is made orthogonal is momentum · mean + (1 - momentum) · gradient in place of the mean
    scale     of MUON_SCALES
    gain      a further factor of the update: the learning rate of these weights over that of all else
    """

    momentum: NotNegative = 0.95
    nesterov: bool = True
    scale: Literal["match-rms", "original"] = "match-rms"
    gain: Positive = 1.0


Optimizer = AdamW | SGD | StableSPAM | Muon | None
OPTIMIZER_NAMES: dict[str, AdamW | SGD | StableSPAM | Muon] = {
    "adamw": AdamW(),
    "sgd": SGD(),
    "stable-spam": StableSPAM(),
    "muon": Muon(),
}


class Constant(Part, frozen=True, tag_field="kind", tag="constant"):
    """The learning rate rises linearly over the first `warmup` of the steps, and stays."""

    warmup: Share = 0.0


class Linear(Part, frozen=True, tag_field="kind", tag="linear"):
    """After its warm-up it falls linearly, to `floor` of itself after the last step."""

    warmup: Share = 0.0
    floor: Share = 0.0


class Cosine(Part, frozen=True, tag_field="kind", tag="cosine"):
    """After its warm-up it falls by half a cosine (1608.03983), to `floor` of itself after the last step."""

    warmup: Share = 0.0
    floor: Share = 0.0


class Triangle(Part, frozen=True, tag_field="kind", tag="triangle"):
    """As `cosine` before the last `share` of the steps, in which the learning rate rises linearly from `floor` to
    `peak` and falls back with the same slope (FNT of LUQ, 2112.10769)."""

    warmup: Share = 0.0
    floor: Share = 0.0
    share: Share = 0.1
    peak: Share = 0.1


Schedule = Constant | Linear | Cosine | Triangle | None
SCHEDULE_NAMES: dict[str, Constant | Linear | Cosine | Triangle] = {
    "constant": Constant(),
    "linear": Linear(),
    "cosine": Cosine(),
    "triangle": Triangle(),
}


class OsciReset(Part, frozen=True, tag_field="kind", tag="osci-reset"):
    """Weights that oscillate are set to what the forward quantizer makes of them (TetraJet-v2, 2510.27527).

    From a share `start` of the steps on, in windows of 50 steps, one `every` so many: at the end of each, the weights
    of quantized layers whose ratio (tasks/optimizers/oscillation.py) is `threshold` or more.
    """

    start: Share = 0.64
    every: Annotated[int, msgspec.Meta(ge=50)] = 200
    threshold: Positive = 16.0


Reset = OsciReset | None
RESET_NAMES: dict[str, OsciReset] = {"osci-reset": OsciReset()}


Growth = Annotated[int, msgspec.Meta(ge=1)] | None


class QRamping(Part, frozen=True, tag_field="kind", tag="q-ramping"):
    """Weights that oscillate are updated less often, by more at a time (TetraJet, 2502.20853).

    Every so many steps, the ratio R of each weight (tasks/optimizers/oscillation.py) over the next 30 steps, which are
    undone, gives the steps between its updates: min(every, ⌊⌊R / alpha⌋ · beta + 1⌋).
    """

    every: Annotated[int, msgspec.Meta(ge=31)] = 200
    alpha: Positive = 16.0
    beta: Positive = 5.0


Ramping = QRamping | None
RAMPING_NAMES: dict[str, QRamping] = {"q-ramping": QRamping()}


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
        """SGD has no betas."""
        if self.coreset is not None and (coreset := self.coreset.canonical()) != self.coreset:
            return msgspec.structs.replace(self, coreset=coreset).canonical()
        if self.rollout is not None and (rollout := self.rollout.canonical()) != self.rollout:
            return msgspec.structs.replace(self, rollout=rollout).canonical()
        return msgspec.structs.replace(self, beta1=None, beta2=None) if isinstance(self.optimizer, SGD) else self

    def of_baseline(self) -> Training:
        """The part that changes what BF16 computes. AdamW is every task's own optimizer. A loss scale that is a power
        of two is undone to the last bit when gradients are divided by it, as far as exponents reach."""
        scale_is_exact = math.frexp(self.loss_scale)[0] == 0.5
        return msgspec.structs.replace(
            self.canonical(),
            optimizer=None if isinstance(self.optimizer, AdamW) else self.optimizer,
            loss_scale=1.0 if scale_is_exact else self.loss_scale,
            loss_scale_growth=None if scale_is_exact else self.loss_scale_growth,
            reset=None,
            ramping=None,
            rollout=None,
            tis=None,
            noise=None,
            distill=None,
            trains="all",
            replay="none",
            coreset=None,
            inject=None,
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
        words += [] if self.schedule is None else [f"learning rate {schedule_name(self.schedule)}"]
        words += [] if self.reset is None else [reset_name(self.reset)]
        words += [] if self.ramping is None else [ramping_name(self.ramping)]
        words += [] if self.rollout is None else [f"rollout {rollout_name(self.rollout)}"]
        words += [] if self.noise is None else [f"noise {noise_name(self.noise)}"]
        words += [] if self.distill is None else [distill_name(self.distill)]
        words += [] if self.inject is None else [f"inject {inject_name(self.inject)}"]
        words += [] if self.coreset is None else [f"coreset {coreset_name(self.coreset)}"]
        words += {"none": [], "router": ["router replay"]}[self.replay]
        words += {"all": [], "learned": ["trains what is learned"], "none": ["untrained"]}[self.trains]
        return ", ".join(words)


DEFAULT = Training()
IN_WORDS = (
    "optimizer",
    "schedule",
    "reset",
    "ramping",
    "rollout",
    "noise",
    "distill",
    "trains",
    "replay",
    "coreset",
    "inject",
)
"""Fields whose label is not their name with a value."""


def optimizer_name(optimizer: Optimizer) -> str:
    """The key in OPTIMIZER_NAMES, or the kind with its numbers, in full; `task` for none."""
    return "task" if optimizer is None else name_or_numbers(OPTIMIZER_NAMES, optimizer, "=")


def schedule_name(schedule: Schedule) -> str:
    """The key in SCHEDULE_NAMES, or the kind with its numbers, in full; `task` for none."""
    return "task" if schedule is None else name_or_numbers(SCHEDULE_NAMES, schedule, "=")


def reset_name(reset: Reset) -> str:
    """The key in RESET_NAMES, or the kind with its numbers, in full; `none` for none."""
    return "none" if reset is None else name_or_numbers(RESET_NAMES, reset, "=")


def ramping_name(ramping: Ramping) -> str:
    """The key in RAMPING_NAMES, or the kind with its numbers, in full; `none` for none."""
    return "none" if ramping is None else name_or_numbers(RAMPING_NAMES, ramping, "=")


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
