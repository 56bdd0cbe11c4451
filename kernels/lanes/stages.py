"""The stages of lanes (kernels/stage.py), which of them a layer takes now, and what follows from that.

There are two sets of stages: the recipes', and the BF16 baseline's for layers that the recipe keeps precise by their
place in the model, and for the stages and steps of its finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from fp4dse.dse import SHARED, SLOTS, STAGES, Recipe
from fp4dse.dse.stages import grouped
from fp4dse.kernels.dispatch import by_device
from fp4dse.kernels.lanes.moment import Moment
from fp4dse.kernels.make_stages import but_weights, make_stages
from fp4dse.kernels.ops.attention_core import AttentionCore
from fp4dse.kernels.quant.backend import Backend
from fp4dse.kernels.quant.operand.kinds import Converted
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.stage import Stage

BASELINE = Recipe.named("bf16")
"""The recipe of precise layers and stages."""

EXPERT = 24
"""Bits that the number of an expert is shifted by in its seed: lanes have smaller seeds, mostly."""

Seeds = TypeVar("Seeds", int, Tensor)


def expert_seed(seed: Seeds, expert: int) -> Seeds:
    """The seed by which an expert draws where it shares its layer's number, of the lane's."""
    return seed + (expert << EXPERT)


class LaneStages(Moment):
    """The stages of lanes that compute alike.

    recipes, seeds: one a lane; recipes are canonical and have one structural signature. steps, dtype: as in
    `LaneNumerics`. backend: of the device that the seeds go to.
    """

    members: tuple[int, ...] = ()
    """Layers of experts whose lanes stand side by side in one product (experts.py)."""

    def __init__(
        self,
        recipes: Sequence[Recipe],
        seeds: Sequence[int],
        device: torch.device,
        steps: int | None,
        dtype: torch.dtype,
        backend: Backend,
    ) -> None:
        super().__init__(device)
        self.recipes = list(recipes)
        self.recipe = self.recipes[0]
        """The first lane's: what is structure is that of all."""
        self.steps, self.dtype, self.lanes = steps, dtype, len(recipes)
        self.seeds = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        self.precise_layers: set[int] = set()
        self.learned: dict[tuple[str, int], Tensor] = {}
        """(operand, layer) -> the clip that is trained there, [L, 1]: a parameter of the layer."""
        self.keys: dict[int, tuple[int, int]] = {}
        """Layer of an expert -> that of the first expert and the number of the expert, by which it draws."""
        self.requantized = {stage for stage in SHARED if self.recipe.copies(stage)}
        self.backend = backend
        self.quantized = self.baseline = make_stages(self.recipes, self.recipe.gemm, device, self.backend)
        if any(recipe.slot(slot).element != "bf16" for recipe in self.recipes for slot in SLOTS):
            self.baseline = make_stages([BASELINE] * self.lanes, "exact", device, self.backend)
        self.but_weights: dict[str, Stage] = {}
        """Stages whose weight alone is quantized, for a finish that has such."""
        if self.recipe.finish and self.recipe.finish.stages_but_weights:
            self.but_weights = but_weights(self.recipes, self.quantized, self.baseline, self.recipe.gemm, device)
        self.slots = {
            f"{name}.{of}": slot for name, stage in self.quantized.items() for of, slot in stage.slots.items()
        }
        self.core: AttentionCore | None = None
        """The attention core, where it is quantized."""
        if not self.recipe.attention.is_plain:
            parts = [recipe.attention for recipe in self.recipes]
            self.core = AttentionCore(parts, device, self.backend, self.recipe.gemm)
            self.slots |= self.core.slots

    def phase(self, step: int) -> frozenset[str]:
        """Compute as at this step of the training from now on: within the recipe's finish or before it.

        Returns the stages that are precise now, and as `fprop.w` those that are but for their weight. A step that was
        captured holds for the steps with the same ones.
        """
        finish = self.recipe.finish
        has_begun = finish is not None and self.steps is not None and step >= finish.first_step(self.steps)
        self.precise_stages = frozenset()
        if finish and has_begun:
            self.precise_stages = frozenset([*finish.stages, *(f"{stage}.w" for stage in finish.stages_but_weights)])
        return self.precise_stages

    def is_precise(self, stage: str) -> bool:
        """True if a stage is precise now, its weight apart in fine-tuning; what is then deployed is quantized."""
        return stage in self.precise_stages or (f"{stage}.w" in self.precise_stages and not self.evaluation)

    def stage(self, name: str, layer: int) -> Stage:
        """The stage of this name as it is computed in a layer now."""
        quantized, baseline = self.quantized[name], self.baseline[name]
        if layer in self.precise_layers or self.evaluation == "bf16":
            return baseline
        if all(slot.maxima is None for slot in quantized.slots.values()) or not self.is_precise(name):
            return quantized
        return baseline if name in self.precise_stages else self.but_weights.get(name, baseline)

    def use(self, layer: int) -> Use:
        """The record of a slot's use in this layer, now."""
        training = self.training and self.part == 0  # state changes once a step
        evaluating = self.evaluation == "quantized"
        is_again = self.journal is not None and self.journal.mode == "again"
        flags = training, self.counting and not is_again, self.measuring
        key, expert = self.keys.get(layer, (layer, 0))
        seeds = expert_seed(self.seeds, expert) if expert else self.seeds
        more: dict[str, Any] = {"evaluating": evaluating, "journal": self.journal, "key": key, "members": self.members}
        return Use(seeds, self.step, layer, *flags, self.part, **more)

    def clip(self, operand: str, layer: int) -> Tensor | None:
        """The clip of an operand, [L, 1], None where the layer does not clamp it now."""
        if not self.learned or not self.stage("fprop", layer).slots[operand].learns_clip:
            return None
        return self.learned.get((operand, layer))

    @property
    def gemms(self) -> dict[str, str]:
        """Stage -> the backend of its product, in quantized layers."""
        return {name: stage.gemm for name, stage in self.quantized.items()}

    @property
    def gemm_why_not(self) -> tuple[str, ...]:
        """The reasons why faster products were passed over, one sentence each."""
        stages = [
            *self.quantized.values(),
            *self.but_weights.values(),
            *([] if self.quantized is self.baseline else self.baseline.values()),
        ]
        return tuple(f"{stage.name}: {reason}" for stage in stages for reason in stage.gemm_why_not)

    @property
    def through_why_not(self) -> tuple[str, ...]:
        """The reasons why gradients pass through quantizers by the reference."""
        reasons = {name: slot.why_not_through for name, slot in self.slots.items()}
        return tuple(f"{name}: gradient through the reference ({why})" for name, why in reasons.items() if why)

    @property
    def operand_why_not(self) -> tuple[str, ...]:
        """The reasons why the reference quantizes."""
        reasons = {name: slot.why_not_fused for name, slot in self.slots.items()}
        return tuple(grouped({n: f"quantized by the reference ({why})" if why else "" for n, why in reasons.items()}))

    def why_not_packed(self, layer: int | None = None) -> str | None:
        """The reason why a layer, or one that is quantized, does not keep codes of x for the backward pass, None if it
        does."""
        if "wgrad" not in self.requantized:
            return "wgrad.source: found input; accepted: forward"
        stage = self.quantized["fprop"] if layer is None else self.stage("fprop", layer)
        if stage.choice is not None:
            return "fprop.channels: accepted: none"
        slot = stage.slots["x"]
        return slot.why_not_stored() or by_device(self.seeds.device, cpu=None, cuda=slot.why_not_codes)

    def converts(self, layer: int) -> bool:
        """True if the weight's gradient takes codes of x as they are, with `packed` or without."""
        is_wanted = isinstance(self.stage("wgrad", layer).slots["x"], Converted)
        return is_wanted and self.stage("fprop", layer).slots["x"].maxima is not None

    def keeps_codes(self, layer: int) -> bool:
        """True if the backward pass is to take codes of a layer's x."""
        return self.converts(layer) or (self.packed and self.why_not_packed(layer) is None)

    def input_dtype(self, stage: str, layer: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype that x of this dtype may be rounded to before it enters a stage, without a change of the result."""
        return self.stage(stage, layer).input_dtype("x", dtype)

    def common_dtype(self, operand: str, layer: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype that x, w or g of this dtype may be rounded to once for all products that take it, without a change
        of a result."""
        stages = [self.stage(name, layer) for name, operands in STAGES.items() if operand in operands]
        [common, *others] = {stage.input_dtype(operand, dtype) for stage in stages}
        return dtype if others else common

    def needs_forward_x(self, layer: int) -> bool:
        """True if the backward pass needs what the forward quantizer made of x, or saved for its gradient."""
        return "wgrad" in self.requantized or self.stage("fprop", layer).slots["x"].has_estimator

    def can_requantize_x(self, layer: int) -> bool:
        """True if `requantize_x` returns in the backward pass what `forward` had: no state has changed in between."""
        maxima = self.stage("fprop", layer).slots["x"].maxima
        return maxima is None or not maxima.has_state
