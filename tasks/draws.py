"""Random numbers of a task: noise, times and crops, drawn anew for every batch and keyed by (seed, step, site).

So every recipe of a seed gets the same numbers, on every device and beside any other lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fp4dse.kernels.ops import philox

STREAM = philox.STREAMS["batch"]


def seed_keys(seeds: Sequence[int]) -> Tensor:
    """int64 [S], as counters take them."""
    return torch.tensor(list(seeds), dtype=torch.int64)


def fixed_order(n: int) -> Tensor:
    """int64 [n]: a permutation that is always the same."""
    return torch.argsort(philox.random32(seed_keys([0]), philox.STREAMS["data"], 0, 0, n)[0], stable=True)


class Draws:
    """Random numbers for the batch of one step. seeds: int64 [L]; step: int64 scalar on the device.

    `site` tells the uses within a step apart: the same site gives the same numbers.
    """

    def __init__(self, seeds: Tensor, step: Tensor) -> None:
        self.seeds, self.step = seeds, step

    def normal(self, site: int, *shape: int) -> Tensor:
        """float32 [L, *shape], standard normal in 65,536 steps of equal probability (so within ±4.2)."""
        bits = philox.random16(self.seeds, STREAM, self.step, self._site(site), math.prod(shape))
        return _quantiles(self.seeds.device)[bits].view(-1, *shape)

    def integers(self, site: int, high: int, *shape: int) -> Tensor:
        """int64 [L, *shape], uniform in 0 … high - 1 (high up to 65,536; within one part in 2^16 of a probability)."""
        count = math.prod(shape)
        bits = philox.random16(self.seeds, STREAM, self.step, self._site(site), 2 * count).to(torch.int64)
        wide = bits[:, 0::2] * 65536 + bits[:, 1::2]  # 32 bits
        return ((wide * high) >> 32).view(-1, *shape)

    def _site(self, site: int) -> Tensor:
        return torch.full((), site, device=self.seeds.device)


@cache
def _quantiles(device: torch.device) -> Tensor:
    """float32 [65536]: the standard normal's quantiles at (i + 1/2) / 65536, made on the CPU so that devices agree."""
    at = (torch.arange(65536, dtype=torch.float64) + 0.5) / 65536
    quantiles: Tensor = torch.special.ndtri(at).to(torch.float32).to(device)
    return quantiles
