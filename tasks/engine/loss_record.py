"""Record of the training losses: for each lane the least, the mean of the last tenth and a log-spaced curve.

The step writes its losses into a short buffer on the device (recent.py), which is fetched when it is full, so that a
training of a million steps needs no tensor of a million rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.tasks.engine.recent import Recent

CURVE_POINTS = 64

RUNG_TAIL = 0.5
"""Share of the steps up to a rung over which lanes are compared at the rung (rungs.py)."""


FINAL_TAIL = 0.1
"""Share of the steps, the last ones, that `train_loss_final` is the mean over. Their batches are the same for all
recipes of a seed."""


class LossRecord:
    """Losses of L lanes over `steps` steps. rungs: numbers of steps after which `until` is going to be asked."""

    def __init__(self, steps: int, lanes: int, device: torch.device | str, rungs: Sequence[int] = ()) -> None:
        self.points = curve_steps(steps)
        self.tail = max(1, round(FINAL_TAIL * steps))
        self.steps = steps
        self.recent = Recent((lanes,), device)
        self.least = torch.full((lanes,), torch.inf)
        self.last = torch.zeros(lanes, dtype=torch.float64)  # sum over the last steps
        self.curve = torch.full((lanes, len(self.points)), torch.nan)
        self.rungs = list(rungs)
        self.sums = torch.zeros(lanes, len(self.rungs), dtype=torch.float64)  # over the tail before each rung

    def write(self, step: Tensor, losses: Tensor) -> None:
        """Remember the losses [L] of a step, int64 scalar on the device."""
        self.recent.write(step, losses)

    def fetch(self, done: int, diverged: Tensor) -> None:
        """Take in what was written until `done` steps were done; diverged: int64 [L], the step or -1. Waits."""
        before = self.recent.fetched
        if done <= before:
            return
        steps, ended = torch.arange(before, done), torch.where(diverged < 0, self.steps, diverged).cpu()
        losses = torch.where(steps[:, None] < ended, self.recent.take(done), torch.nan)  # [n, L]
        self.least = torch.fmin(self.least, losses.nan_to_num(torch.inf).amin(0))
        for row in losses[max(0, self.steps - self.tail - before) :].double():  # in order, whatever the buffer
            self.last += row
        for n, rung in enumerate(self.rungs):
            for row in losses[max(0, rung - tail_of(rung) - before) : max(0, rung - before)].double():
                self.sums[:, n] += row
        for n, point in enumerate(self.points):
            if before <= point < done:
                self.curve[:, n] = losses[point - before]

    def now(self, step: int) -> Tensor:
        """The losses [L] of one of the last steps."""
        return self.recent.of(step)

    def until(self, rung: int) -> list[float | None]:
        """Mean loss of each lane over the tail of the steps before a rung; None where it has diverged."""
        means = self.sums[:, self.rungs.index(rung)] / tail_of(rung)
        return [mean if mean == mean else None for mean in means.tolist()]

    def state(self) -> dict[str, Tensor]:
        """All fetched values, the lane axis first."""
        return {"least": self.least, "last": self.last, "curve": self.curve, "sums": self.sums}

    def load_state(self, state: dict[str, Tensor], done: int) -> None:
        """Go on after `done` steps."""
        names = "least", "last", "curve", "sums"
        self.least, self.last, self.curve, self.sums = (state[name].cpu().clone() for name in names)
        self.recent.fetched = done


def tail_of(rung: int) -> int:
    """Number of steps before a rung over which lanes are compared."""
    return max(1, round(RUNG_TAIL * rung))


def curve_steps(steps: int) -> list[int]:
    """At most CURVE_POINTS log-spaced step indices, first and last included."""
    spaced = torch.logspace(0, torch.tensor(float(steps)).log10().item(), min(CURVE_POINTS, steps), dtype=torch.float64)
    return sorted({min(steps, round(s)) - 1 for s in spaced.tolist()} | {0, steps - 1})
