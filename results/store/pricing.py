"""Overheads worked out from the recipes when rows are read.

Rows are stored with the overhead of the default model on the default chip. An overhead follows from the recipe, so one
of another model or chip, or of an earlier version of the cost model, is made when rows are read, once for each distinct
recipe. The band (BAND) is never stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
import pandas as pd

from fp4dse.dse import ConfigError, Recipe, recipe_from_dict
from fp4dse.dse.cost import BAND, ENDS, MID, CostTarget
from fp4dse.dse.reading.shorthand import read
from fp4dse.dse.record import field_types

PRICED = ["overhead", "overhead_of", *BAND]
"""The columns of runs that depend on model and chip."""


@lru_cache(maxsize=262144)
def price(recipe: str, cost: CostTarget, scenario: str = MID) -> float:
    """The overhead of a recipe as rows hold it, JSON; NaN of one that this program cannot read."""
    try:
        return cost.overhead(_recipe(recipe), scenario)
    except ConfigError:
        return float("nan")


@lru_cache(maxsize=65536)
def _recipe(text: str) -> Recipe:
    """The recipe of a row, a part at a time, as recipes of a study share most of theirs. Rules were checked when it was
    trained. ConfigError if it is none."""
    try:
        parts = _PARTS.decode(text)
    except msgspec.DecodeError:
        raise ConfigError("recipe", text, "a recipe as JSON") from None
    if parts.get("layers", _NO_RULES) != _NO_RULES or not set(parts) <= set(Recipe.__struct_fields__):
        return recipe_from_dict(msgspec.json.decode(text))
    return Recipe(**{name: _part(name, bytes(part)) for name, part in parts.items()})


_NO_RULES = msgspec.Raw(b"[]")
"""Rows have the list of rules also where it is empty."""
_PARTS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@lru_cache(maxsize=65536)
def _part(name: str, text: bytes) -> Any:
    return read(msgspec.json.decode(text), field_types(Recipe)[name], "recipe", name)


def prices(recipes: Mapping[str, str], cost: CostTarget) -> pd.DataFrame:
    """config_id and PRICED, a line a recipe. recipes: config_id -> recipe as JSON."""
    found: dict[str, object] = {"config_id": list(recipes), "overhead_of": cost.of}
    for name, scenario in {"overhead": MID, **dict(zip(BAND, ENDS, strict=True))}.items():
        found[name] = [price(recipe, cost, scenario) for recipe in recipes.values()]
    types = dict.fromkeys(["overhead", *BAND], float) | {"config_id": str, "overhead_of": str}
    return pd.DataFrame(found).astype(types)[["config_id", *PRICED]]


def priced(runs: pd.DataFrame, known: pd.DataFrame, cost: CostTarget) -> pd.DataFrame:
    """The runs, which have config_id and overhead_of, with PRICED from `prices`. An overhead stays as it is stored if
    it is of this very model, chip and revision, or of what nobody can tell (summarize refuses that)."""
    of, recipes = known.set_index("config_id"), runs["config_id"].astype(object)  # categories would make categories
    stored = runs["overhead_of"].astype(object)
    kept = stored.eq(cost.of) | (stored.notna() & ~stored.astype(str).str.fullmatch(r".+ on .+, revision [0-9]+"))
    more = {name: recipes.map(of[name]) for name in BAND}
    for name in ("overhead", "overhead_of"):
        if name in runs:
            more[name] = runs[name].astype(object).where(kept, recipes.map(of[name]))
    found = runs.assign(**more)
    return found.astype({"overhead": float}) if "overhead" in found else found
