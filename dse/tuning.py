"""Classes of recipes that share a tuned learning rate."""

from __future__ import annotations

from fp4dse.dse.attention import ATTENTION_SLOTS, FORWARD
from fp4dse.dse.recipe import Recipe

CLASSES = {
    "bf16": "nothing is quantized",
    "forward": "the forward pass is quantized",
    "backward": "the backward pass alone is",
    "sgd": "the recipe brings this optimizer and quantizes",
    "sgd-bf16": "BF16 with this optimizer",
    "stable-spam": "the recipe brings this optimizer and quantizes",
    "stable-spam-bf16": "BF16 with this optimizer",
    "muon": "the recipe brings this optimizer and quantizes",
    "muon-bf16": "BF16 with this optimizer",
}
"""Class -> what its recipes have in common."""


def tuning_class(recipe: Recipe) -> str:
    """The class of a recipe: its optimizer, where that is not Adam; else what it quantizes, in any layer or in the
    attention core."""
    kind = recipe.training.kind
    if kind in CLASSES:
        return f"{kind}-bf16" if recipe.is_plain else kind
    forward = [recipe.fprop.x, recipe.fprop.w]
    forward += [q for rule in recipe.layers for q in (rule.fprop_x, rule.fprop_w) if q is not None]
    forward += [recipe.attention.operand(slot) for slot in ATTENTION_SLOTS if slot.partition(".")[0] in FORWARD]
    if any(not q.is_plain for q in forward):
        return "forward"
    return "bf16" if recipe.is_plain else "backward"
