"""Configurations: formats, quantizers, recipes, spaces, and their cost. No training, no torch."""

from fp4dse.dse.cost import points
from fp4dse.dse.errors import ConfigError, StoreError
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.reading.library import load_recipe, recipe_files, recipe_from_dict, recipe_to_dict, recipe_to_toml
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.recipe.signature import Signature
from fp4dse.dse.space.space import Space
from fp4dse.dse.stages import SHARED, SLOTS, STAGES, Hadamard

__all__ = [
    "QUANTIZERS",
    "SHARED",
    "SLOTS",
    "STAGES",
    "ConfigError",
    "Hadamard",
    "Quantizer",
    "Recipe",
    "Signature",
    "Space",
    "StoreError",
    "load_recipe",
    "points",
    "recipe_files",
    "recipe_from_dict",
    "recipe_to_dict",
    "recipe_to_toml",
]
