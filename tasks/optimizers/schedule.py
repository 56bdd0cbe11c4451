"""Schedules of the learning rate, for recipes that do not leave it to the task.

    warm-up     (s + 1) / (w · steps)                                over the first w · steps steps s
    after that  constant    1
                linear      floor + (1 - floor) · (1 - t)
                cosine      floor + (1 - floor) · (1 + cos(π t)) / 2        (arXiv 1608.03983)

where t runs from 0 at the end of the warm-up to 1 after the last step. Factors are computed on the host in float64 and
rounded once, so that they are the same on every device.
"""

from __future__ import annotations

import math

from fp4dse.dse.training import Constant, Cosine, Linear


def factor(schedule: Constant | Linear | Cosine, step: int, steps: int) -> float:
    """Factor of the learning rate at a step."""
    rise = schedule.warmup * steps
    if step + 1 < rise:
        return (step + 1) / rise
    if isinstance(schedule, Constant):
        return 1.0
    top = max(rise, 1.0)  # the step after which it falls
    t = max(0.0, (step + 1 - top) / (steps + 1 - top))
    left = 1.0 - t if isinstance(schedule, Linear) else (1.0 + math.cos(math.pi * t)) / 2.0
    return schedule.floor + (1.0 - schedule.floor) * left
