"""SGD with momentum, for lanes: buffer <- momentum · buffer + g, w <- w - lr · buffer.

As in the literature on convolutional networks: no dampening, no Nesterov momentum, and weight decay is added to the
gradient (the caller does that, `COUPLED`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fp4dse.dse.optimizer import SGD
from fp4dse.tasks.optimizers.hyperparameters import Numbers, Tensors

STATE = {"buffer": "element"}


def columns(n: Numbers) -> dict[str, float]:
    """Constants of a lane."""
    assert isinstance(n.optimizer, SGD)
    return {"momentum": n.optimizer.momentum}


def row(_step: int, _n: Numbers) -> list[float]:
    """Nothing changes from step to step."""
    return []


def update(
    g: Tensor, state: dict[str, Tensor], c: dict[str, Tensor], _numbers: Sequence[Tensor], _: Tensors
) -> tuple[Tensor, dict[str, Tensor]]:
    """The update before the learning rate, [L, P], and the new state."""
    buffer = state["buffer"] * c["momentum"] + g
    return buffer, {"buffer": buffer}
