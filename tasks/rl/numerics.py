"""Numerics of a rollout whose forward pass is another than the trainer's."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fp4dse.dse import Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.experts import why_not_grouped


class SamplingNumerics(LaneNumerics):
    """The forward products of lanes by recipes that need not share their structure (`Recipe.sampling`), at the step of
    other numerics. Lanes that compute alike in a layer do so together."""

    def __init__(self, recipes: Sequence[Recipe], trainer: LaneNumerics) -> None:
        bf16 = [Recipe.named("bf16")] * len(recipes)
        super().__init__(bf16, trainer.seeds.tolist(), trainer.seeds.device, trainer.steps, trainer.dtype)
        self.step: Tensor = trainer.step
        self.sampled = list(recipes)
        self.training = False
        self.learned = trainer.learned
        self.keys = trainer.keys

    def add_layer(self, layer: int, place: Place) -> None:
        """Take note of where in the model a layer stands, and who computes there in which way."""
        self.places[layer] = place
        here = [recipe.at(place) for recipe in self.sampled]
        if not all(recipe.is_plain for recipe in here):
            self.splits[layer] = self._split(here)

    def add_experts(self, layers: Sequence[int]) -> None:
        """Take note of the reason why the layers of experts, whose numbers these are, are multiplied one by one."""
        if reason := why_not_grouped(self, layers):
            self.ungrouped.add(reason)
