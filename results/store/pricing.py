"""Overheads for a model and a chip that are asked for, worked out from the recipes.

Rows are stored with the overhead of the default model on the default chip. An overhead follows from the recipe, so any
other is made when rows are read, once for each distinct recipe.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec
import pandas as pd

from fp4dse.dse import ConfigError, recipe_from_dict
from fp4dse.dse.cost import CostTarget

PRICED = ["overhead", "overhead_of"]
"""The columns of a row that depend on model and chip."""


@lru_cache(maxsize=65536)
def price(recipe: str, cost: CostTarget) -> float:
    """The overhead of a recipe as rows hold it, JSON; NaN of one that this program cannot read."""
    try:
        return cost.overhead(recipe_from_dict(msgspec.json.decode(recipe)))
    except ConfigError:
        return float("nan")


def prices(recipes: Mapping[str, str], cost: CostTarget) -> pd.DataFrame:
    """config_id and PRICED, a line a recipe. recipes: config_id -> recipe as JSON."""
    overheads = [price(recipe, cost) for recipe in recipes.values()]
    found = pd.DataFrame({"config_id": list(recipes), "overhead": overheads, "overhead_of": cost.of})
    return found.astype({"config_id": str, "overhead": float, "overhead_of": str})


def priced(runs: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
    """The runs, which have config_id, with those of PRICED that they have from `prices`."""
    of, recipes = known.set_index("config_id"), runs["config_id"].astype(object)  # categories would make categories
    return runs.assign(**{name: recipes.map(of[name]) for name in PRICED if name in runs})
