"""Numerics that count what each layer multiplies."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from torch import Tensor

from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.lanes import Forward
from fp4dse.tasks.own.one_by_one import SequentialNumerics
from fp4dse.tasks.task import Task

PLAIN = Recipe.named("bf16")
MOST_PARAMETERS = 50_000_000
"""Of a model that is built only to look at it."""


class Counting(LaneNumerics):
    """One BF16 lane. products: layer -> multiply-adds of its forward products so far."""

    groups_experts = False

    def __init__(self, *given: Any, **more: Any) -> None:
        self.products: dict[int, float] = {}
        super().__init__(*given, **more)

    def forward(self, layer: int, x: Tensor, w: Tensor, *more: Any, **others: Any) -> Forward:
        self.products[layer] = self.products.get(layer, 0.0) + x.shape[1] * w.shape[1] * w.shape[2]
        return super().forward(layer, x, w, *more, **others)


class SequentialCounting(SequentialNumerics):
    """The same for a plain module, whose lanes have numerics of their own."""

    @cached_property
    def each(self) -> list[LaneNumerics]:
        lanes: list[LaneNumerics] = [Counting(self.recipes, self.seeds.tolist(), dtype=self.dtype)]
        lanes[0].step = self.step
        return lanes

    @property
    def products(self) -> dict[int, float]:
        """Those of its lane."""
        counting = self.each[0]
        assert isinstance(counting, Counting)
        return counting.products


def counting_numerics(task: Task) -> Counting | SequentialCounting:
    """Numerics of one BF16 lane of a task."""
    return (SequentialCounting if task.one_by_one else Counting)([PLAIN], [0])
