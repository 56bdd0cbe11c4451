"""Samples of each step: every epoch is a new permutation of the data for each seed, from counters.

The order of a whole long training may not fit into memory, so the device holds that of a few epochs at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.kernels.ops.philox import STREAMS, random32

ORDERED_SAMPLES = 1 << 21
"""Samples of all seeds together whose order is held at a time, if that is an epoch or more."""


class Batches:
    """Rows of the batches of S seeds. A last short batch of an epoch is dropped.

    Raises ValueError for a batch that is larger than the n samples.
    """

    def __init__(self, seeds: Sequence[int], n: int, batch: int, steps: int, device: torch.device | str) -> None:
        if batch > n:
            raise ValueError(f"batch {batch} is larger than the {n} training samples")
        self.seeds = [torch.full((1,), seed, dtype=torch.int64, device=device) for seed in seeds]
        self.n, self.batch = n, batch
        self.per_epoch = n // batch
        epochs = max(1, ORDERED_SAMPLES // (len(seeds) * self.per_epoch * batch))
        self.epochs = min(epochs, -(-steps // self.per_epoch))
        self.rows = torch.zeros(self.epochs * self.per_epoch, len(seeds), batch, dtype=torch.int64, device=device)
        self.first: int | None = None  # step of the first row

    def prepare(self, step: int) -> None:
        """Make sure that step `step` is held. Nothing waits for the device."""
        first = step - step % len(self.rows)
        if first != self.first:
            self.first = first
            for i in range(self.epochs):
                self._epoch(first // self.per_epoch + i, self.rows[i * self.per_epoch : (i + 1) * self.per_epoch])

    def __call__(self, step: Tensor) -> Tensor:
        """int64 [S, batch]: rows of a step that is held; step: int64 scalar on the device."""
        return self.rows.index_select(0, (step % len(self.rows)).view(1))[0]

    def _epoch(self, epoch: int, rows: Tensor) -> None:
        for i, seed in enumerate(self.seeds):  # one by one: a permutation takes several times its memory to make
            draws = random32(seed, STREAMS["order"], epoch, 0, self.n)[0]
            permutation = torch.argsort(draws, stable=True)[: self.per_epoch * self.batch]
            rows[:, i] = permutation.view(self.per_epoch, self.batch)


def gather_samples(data: Tensor, rows: Tensor) -> Tensor:
    """[L, B, …] of data [D, n, …] at rows [L, B] of D · n."""
    return data.flatten(0, 1).index_select(0, rows.flatten()).view(*rows.shape, *data.shape[2:])
