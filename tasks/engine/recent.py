"""Numbers of the last steps, which wait on the device until there are many to fetch.

A step writes its own by the number that the device has of it, so that a captured step does it too, and no step waits
for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

BUFFERED_STEPS = 256
"""Steps whose numbers stay on the device."""


class Recent:
    """Numbers of the shape `shape` of each of the last BUFFERED_STEPS steps. fetched: steps until which they were
    taken."""

    def __init__(self, shape: tuple[int, ...], device: torch.device | str) -> None:
        self.values = torch.zeros(BUFFERED_STEPS, *shape, device=device)
        self.fetched = 0

    def write(self, step: Tensor, values: Tensor) -> None:
        """Remember the numbers of a step, int64 scalar on the device."""
        self.values.index_copy_(0, (step % BUFFERED_STEPS).view(1), values[None])

    def is_full(self, done: int) -> bool:
        """True if they must be taken after `done` steps."""
        return done - self.fetched >= BUFFERED_STEPS

    def take(self, done: int) -> Tensor:
        """All that was written since the last time until `done` steps were done, [n, …] on the CPU. Waits."""
        steps = torch.arange(self.fetched, done)
        self.fetched = done
        return self.values.cpu()[steps % BUFFERED_STEPS] if len(steps) else self.values[:0].cpu()

    def of(self, step: int) -> Tensor:
        """The numbers of one of the last steps, on the device."""
        return self.values[step % BUFFERED_STEPS]
