"""AdamW: Adam with decoupled weight decay (arXiv 1711.05101), for lanes. kernels/ops/adamw has the rule."""

from __future__ import annotations

from fp4dse.tasks.optimizers.hyperparameters import Numbers

STATE = {"mean": "element", "square": "element"}


def columns(n: Numbers) -> dict[str, float]:
    """Constants of a lane."""
    return {"b1": n.beta1, "past1": 1 - n.beta1, "b2": n.beta2, "past2": 1 - n.beta2, "eps": n.eps}


def row(step: int, n: Numbers) -> list[float]:
    """Numbers of a step: bias corrections."""
    return [1 - n.beta1 ** (step + 1), 1 - n.beta2 ** (step + 1)]
