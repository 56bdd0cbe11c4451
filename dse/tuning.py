"""Classes of recipes that share a tuned learning rate."""

from __future__ import annotations

from typing import Literal

from fp4dse.dse.recipe import Recipe

Class = Literal["bf16", "forward", "backward", "sgd", "stable-spam"]

CLASSES: dict[Class, str] = {
    "bf16": "nothing is quantized",
    "forward": "the forward pass is quantized",
    "backward": "the backward pass alone is",
    "sgd": "the recipe brings this optimizer, whatever it quantizes",
    "stable-spam": "the recipe brings this optimizer, whatever it quantizes",
}


def tuning_class(recipe: Recipe) -> Class:
    """The class of a recipe: its optimizer, where that is not Adam; else what it quantizes."""
    kind = recipe.training.kind
    if kind == "sgd" or kind == "stable-spam":
        return kind
    if any(not recipe.slot(slot).is_plain for slot in ("fprop.x", "fprop.w")):
        return "forward"
    return "bf16" if recipe.is_plain else "backward"
