"""What is kept of the training losses: the least, the mean of the last 5 %, and a log-spaced curve, per lane.

The step writes its losses into a short buffer on the device, which is fetched when it is full, so that no step waits
for the device and a training of a million steps needs no tensor of a million rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

HELD = 256
"""Steps whose losses stay on the device."""

CURVE_POINTS = 64


class Record:
    """Losses of L lanes over `steps` steps."""

    def __init__(self, steps: int, lanes: int, device: torch.device | str) -> None:
        self.points = curve_steps(steps)
        self.tail = max(1, steps // 20)
        self.steps = steps
        self.recent = torch.zeros(HELD, lanes, device=device)
        self.least = torch.full((lanes,), torch.inf)
        self.last = torch.zeros(lanes, dtype=torch.float64)  # sum over the last steps
        self.curve = torch.full((lanes, len(self.points)), torch.nan)
        self.fetched = 0  # steps

    def write(self, step: Tensor, losses: Tensor) -> None:
        """Remember the losses [L] of a step, int64 scalar on the device."""
        self.recent.index_copy_(0, (step % HELD).view(1), losses[None])

    def is_full(self, done: int) -> bool:
        """Whether the losses must be fetched after `done` steps."""
        return done - self.fetched >= HELD

    def fetch(self, done: int, diverged: Tensor) -> None:
        """Take in what was written until `done` steps were done; diverged: int64 [L], the step or -1. Waits."""
        steps = torch.arange(self.fetched, done)
        if not len(steps):
            return
        ended = torch.where(diverged < 0, self.steps, diverged).cpu()
        losses = torch.where(steps[:, None] < ended, self.recent.cpu()[steps % HELD], torch.nan)  # [n, L]
        self.least = torch.fmin(self.least, losses.nan_to_num(torch.inf).amin(0))
        for row in losses[max(0, self.steps - self.tail - self.fetched) :].double():  # in order, whatever the buffer
            self.last += row
        for n, point in enumerate(self.points):
            if self.fetched <= point < done:
                self.curve[:, n] = losses[point - self.fetched]
        self.fetched = done

    def now(self, step: int) -> Tensor:
        """The losses [L] of one of the last steps."""
        return self.recent[step % HELD]

    def state(self) -> dict[str, Tensor]:
        """What was fetched, the lane axis first."""
        return {"least": self.least, "last": self.last, "curve": self.curve}

    def load_state(self, state: dict[str, Tensor], done: int) -> None:
        """Go on after `done` steps."""
        self.least, self.last, self.curve = (state[name].cpu().clone() for name in ("least", "last", "curve"))
        self.fetched = done


def curve_steps(steps: int) -> list[int]:
    """At most CURVE_POINTS log-spaced step indices, first and last included."""
    spaced = torch.logspace(0, torch.tensor(float(steps)).log10().item(), min(CURVE_POINTS, steps), dtype=torch.float64)
    return sorted({min(steps, round(s)) - 1 for s in spaced.tolist()} | {0, steps - 1})
