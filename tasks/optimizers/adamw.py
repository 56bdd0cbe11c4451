"""AdamW: Adam with decoupled weight decay (arXiv 1711.05101), for lanes.

    mean   <- β1 · mean + (1 - β1) · g             square <- β2 · square + (1 - β2) · g²
    update  = mean/(1 - β1^t) / (sqrt(square/(1 - β2^t)) + eps) + weight decay · w
    w      <- w - lr · update

Each operation is a single IEEE rounding, so a lane's bits do not depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.tasks.optimizers.numbers import Numbers, Tensors

STATE = {"mean": "element", "square": "element"}


def columns(n: Numbers) -> dict[str, float]:
    """Constants of a lane."""
    return {"b1": n.beta1, "past1": 1 - n.beta1, "b2": n.beta2, "past2": 1 - n.beta2, "eps": n.eps}


def rows(lr_factors: Sequence[float], n: Numbers) -> list[list[float]]:
    """Numbers of each step: bias corrections."""
    return [[1 - n.beta1**t, 1 - n.beta2**t] for t in range(1, len(lr_factors) + 1)]


def update(
    g: Tensor, state: dict[str, Tensor], c: dict[str, Tensor], numbers: Sequence[Tensor], _: Tensors
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the learning rate is multiplied with, [L, P], and the new state."""
    return adam(g, state["mean"], state["square"], c, *numbers)


def adam(g: Tensor, mean: Tensor, square: Tensor, c: dict[str, Tensor], correction1: Tensor, correction2: Tensor):
    """Adam's update from gradient and momenta, with the new momenta."""
    mean = mean * c["b1"] + g * c["past1"]
    square = square * c["b2"] + g * g * c["past2"]
    scale = torch.sqrt(square / correction2) + c["eps"]
    return mean / correction1 / scale, {"mean": mean, "square": square}
