"""The record of a study of layers: which recipes were trained for which unit, and what was chosen of it."""

from __future__ import annotations

from typing import Literal

import msgspec

from fp4dse.dse.layers.sensitivity import unit_label

Spend = Literal["step", "products"]
"""Of what a budget is a share: the modelled step of the recipe, or the multiply-adds of the task's model."""


class Measured(msgspec.Struct, frozen=True):
    """A unit of a study.

    layers, scope    of dse/layers/sensitivity.py, in words
    alone, spared    config_ids: it alone quantized, it alone in BF16
    products         its share of the multiply-adds of the model, embedding and head among them
    step             what sparing it adds to the modelled step, as a share of the recipe's; None where that is not known
    fisher           the score of it in BF16 at the end of training (tasks/inspection/fisher.py); None: not asked for
    """

    layers: str
    scope: str
    alone: str
    spared: str
    products: float
    step: float | None = None
    fisher: float | None = None

    @property
    def label(self) -> str:
        """The unit in words."""
        return unit_label(self.layers, self.scope)

    def cost(self, spend: Spend) -> float:
        """The share that sparing it takes, never below 0."""
        return max(0.0, self.products if spend == "products" else self.step or 0.0)


class Spared(msgspec.Struct, frozen=True):
    """Units that were chosen to be spared within a budget, with first and last blocks of the same cost beside them.

    units          their positions in the study
    config_id      the recipe with all of them spared
    ends           the recipe with first and last blocks spared instead; None where no layer of these fits
    cost, products, ends_products   what it takes, in what was budgeted and in multiply-adds
    """

    budget: float
    spend: Spend
    units: tuple[int, ...]
    config_id: str
    cost: float
    products: float
    seeds: tuple[int, ...]
    ends: str | None = None
    ends_layers: str = ""
    ends_products: float = 0.0


class Study(msgspec.Struct, frozen=True):
    """One study of a recipe on a task. baseline_id: BF16 under the recipe's training side; step_of: model, chip and
    revision of the cost model that steps of units are of."""

    task: str
    preset: str
    label: str
    config_id: str
    baseline_id: str
    lr: float
    seeds: tuple[int, ...]
    step_of: str
    units: tuple[Measured, ...]
    choices: tuple[Spared, ...] = ()

    @property
    def spend(self) -> Spend:
        """The cost that a budget limits where nobody says: the step, if it is known of all units."""
        return "step" if all(unit.step is not None for unit in self.units) else "products"

    @property
    def is_of(self) -> tuple[str, str, str, float]:
        """Task, recipe and rate, which tell it from other studies of a store, beside its units."""
        return self.task, self.preset, self.config_id, self.lr
