"""Recipes that `fp4dse bench train` times, made of named ones."""

from __future__ import annotations

from typing import Any

import msgspec

from fp4dse.dse import QUANTIZERS, SLOTS, STAGES, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.attention import ATTENTION_PRODUCTS
from fp4dse.dse.layers.rule import QUANTIZERS as QUANTIZER_FIELDS
from fp4dse.dse.layers.rule import LayerRule

APART = (
    *("nvfp4", "nvfp4-sr-rht", "nvidia-nvfp4", "four-over-six", "te-nvfp4"),
    *("mxfp4", "mxfp4-sr-rht", "mxfp4-tiles", "te-mxfp8-nvfp4", "bf16"),
)
"""Recipes of which no two can share a population."""
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "bf16")
"""Of the rules for layers that are timed."""


def with_amax(recipe: Recipe, amax: str) -> Recipe:
    """The recipe with tensor maxima that are `current`, `previous` or `held`."""
    changes: dict[str, dict[str, Any]] = {stage: {} for stage in STAGES}
    for slot in SLOTS:
        q, (stage, operand) = recipe.slot(slot), slot.split(".")
        if q.tensor_scale:
            scale = msgspec.structs.replace(q.tensor_scale, amax=amax)
            changes[stage][operand] = msgspec.structs.replace(q, tensor_scale=scale)
    stages = {stage: msgspec.structs.replace(getattr(recipe, stage), **new) for stage, new in changes.items()}
    return msgspec.structs.replace(recipe, **stages)


def by_layer() -> list[Recipe]:
    """Eight recipes with a rule each for the first three fifths of the blocks, MLP and attention apart, so that a layer
    has lanes of up to four formats."""
    base = Recipe.named("nvfp4")
    recipes = []
    for number in range(8):
        first, second = (FORMATS[(number + turn) % 4] for turn in (number // 4, 2 + number // 4))
        rules = [LayerRule(("mlp",), first=0.6, **_all_slots(first)), LayerRule(("attention",), **_all_slots(second))]
        recipes.append(msgspec.structs.replace(base, layers=tuple(rules)))
    return recipes


def _all_slots(name: str) -> dict[str, Any]:
    return dict.fromkeys(QUANTIZER_FIELDS, QUANTIZERS[name])


def uniform_recipe(name: str) -> Recipe:
    """All six operands in one format."""
    return Recipe.uniform(QUANTIZERS[name])


def with_core(name: str) -> Recipe:
    """NVFP4 with all twelve operands of the attention core in a format."""
    products = {product: dict.fromkeys(operands, name) for product, operands in ATTENTION_PRODUCTS.items()}
    return recipe_from_dict({**recipe_to_dict(Recipe.named("nvfp4")), "attention": products})
