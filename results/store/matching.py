"""Baselines of rows that were written before rows named theirs: they follow from the recipe (`Recipe.baseline`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import msgspec
import pandas as pd

from fp4dse.dse import SLOTS, ConfigError, recipe_from_dict
from fp4dse.dse.formats import PLAIN
from fp4dse.dse.recipe import baseline_of
from fp4dse.dse.training import DEFAULT, Training


class _Told(msgspec.Struct):
    """The part of a recipe that its baseline follows from: reading all of it takes a hundred times as long."""

    fprop: dict[str, Any]
    dgrad: dict[str, Any]
    wgrad: dict[str, Any]
    layers: list[Any] = []
    attention: dict[str, Any] = {}
    training: Training = DEFAULT

    def quantizes(self) -> bool:
        operands = [getattr(self, stage)[operand] for stage, operand in (slot.split(".") for slot in SLOTS)]
        operands += [q for product in self.attention.values() if isinstance(product, dict) for q in product.values()]
        quantized = (not isinstance(q["element"], str) or q["element"] not in PLAIN for q in operands)
        return bool(self.layers) or any(quantized)


def baseline_id(recipe: str) -> str | None:
    """config_id of the baseline of a recipe as rows hold it, JSON; None of one that this program cannot read."""
    try:
        told = msgspec.json.decode(recipe, type=_Told)
        return _id_of(told.training if told.quantizes() else DEFAULT)
    except (msgspec.MsgspecError, KeyError, TypeError):
        pass  # as an older program wrote it, perhaps
    try:
        return recipe_from_dict(msgspec.json.decode(recipe)).baseline().config_id
    except (ConfigError, msgspec.MsgspecError):
        return None


@lru_cache(maxsize=4096)
def _id_of(training: Training) -> str:
    return baseline_of(training).config_id


def baseline_ids(recipes: Mapping[str, str]) -> pd.DataFrame:
    """config_id and baseline_id, a line a recipe. recipes: config_id -> recipe as JSON."""
    found = {"config_id": list(recipes), "baseline_id": [baseline_id(text) for text in recipes.values()]}
    return pd.DataFrame(found, dtype=object)


def with_baseline_ids(runs: pd.DataFrame, texts: Callable[[Collection[str]], Mapping[str, str]]) -> pd.DataFrame:
    """The runs with a baseline_id where they lack one. texts: config_ids -> recipes as JSON by config_id."""
    lacking = runs["baseline_id"].isna()
    if not lacking.any():
        return runs
    ids, recipes = runs["baseline_id"], runs["config_id"].astype(object)  # categories would make categories
    known = baseline_ids(texts(list(recipes[lacking].unique()))).set_index("config_id")["baseline_id"]
    filled = ids.astype(object).mask(lacking, recipes.map(known))
    return runs.assign(baseline_id=filled.astype("category") if isinstance(ids.dtype, pd.CategoricalDtype) else filled)
