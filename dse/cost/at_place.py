"""The recipe that a layer computes as at its place: the only question about single layers that a price asks of one."""

from __future__ import annotations

from fp4dse.dse.layers.place import Place
from fp4dse.dse.reading.library import load_recipe
from fp4dse.dse.recipe import Recipe

BF16 = load_recipe("bf16")
"""The recipe that precise layers and stages compute as."""


def recipe_at(recipe: Recipe, place: Place) -> Recipe:
    """As `Recipe.at`, and without a search where there are no rules for layers."""
    if recipe.layers:
        return recipe.at(place)
    return recipe if recipe.precise.why(place) is None else BF16
