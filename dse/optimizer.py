"""Optimizers, as data. tasks/optimizers has what each computes; learning rate, weight decay and betas are those of
training.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from fp4dse.dse.record import NotNegative, Part, Positive, name_or_numbers


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


def optimizer_name(optimizer: Optimizer) -> str:
    """The key in OPTIMIZER_NAMES, or the kind with its numbers, in full; `task` for none."""
    return "task" if optimizer is None else name_or_numbers(OPTIMIZER_NAMES, optimizer, "=")
