"""Baselines of rows that were written before rows named theirs: they follow from the recipe (`Recipe.baseline`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import msgspec
import pandas as pd

from fp4dse.dse import ConfigError, recipe_from_dict
from fp4dse.results.stats.paired import PLAIN


class _Told(msgspec.Struct):
    """The part of a recipe that almost always decides: without a training side the baseline is plain BF16."""

    training: dict[str, object] = {}


def baseline_id(recipe: str) -> str | None:
    """config_id of the baseline of a recipe as rows hold it, JSON; None of one that this program cannot read."""
    try:
        if not msgspec.json.decode(recipe, type=_Told).training:
            return PLAIN
        return recipe_from_dict(msgspec.json.decode(recipe)).baseline().config_id
    except (ConfigError, msgspec.MsgspecError):
        return None


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
