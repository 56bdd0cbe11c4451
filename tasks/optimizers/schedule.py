"""How the learning rate moves over a training, by recipes that do not leave it to the task.

    warm-up     (s + 1) / (w · steps)                                over the first w · steps steps s
    after that  constant    1
                linear      floor + (1 - floor) · (1 - t)
                cosine      floor + (1 - floor) · (1 + cos(π t)) / 2        (arXiv 1608.03983)

where t runs from 0 at the end of the warm-up to 1 after the last step. Factors are computed on the host in float64 and
rounded once, so that they are the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda t: 1.0,
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: (1.0 + math.cos(math.pi * t)) / 2.0,
}
"""Schedule -> share of what is above the floor, at t."""


class Schedule(msgspec.Struct, frozen=True):
    """One of SHAPES; warmup: share of the steps; floor: share of the learning rate."""

    shape: str
    warmup: float
    floor: float

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by at a step."""
        rise = self.warmup * steps
        if step + 1 < rise:
            return (step + 1) / rise
        t = max(0.0, step + 1 - max(rise, 1.0)) / max(1.0, steps - max(rise, 1.0) + 1)
        return self.floor + (1.0 - self.floor) * SHAPES[self.shape](t)
