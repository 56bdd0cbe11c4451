"""Settings of another library that realise a recipe, with what they cannot express.

A library has finitely many settings, and each computes a recipe: so they are listed with that recipe, and the one that
is wanted is looked up by its config_id. What no settings compute is refused, with the nearest settings and, field by
field, what they have instead. Numbers agree as far as the library computes what its documentation says; the notes name
known differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.export import te, torchao
from fp4dse.dse.export.listed import Settings
from fp4dse.dse.library import recipe_to_dict
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.stages import SLOTS, STAGES, grouped

LISTS: dict[str, Callable[[], Iterator[Settings]]] = {"te": te.settings, "torchao": torchao.settings}
"""Target -> all its settings, the ones with fewer arguments first."""

TARGETS = (*LISTS, "json")


class Export(msgspec.Struct, frozen=True):
    """The settings, and what they cannot express: empty if they compute the recipe. Then they are the nearest ones."""

    target: str
    settings: Settings
    cannot: list[str]


def export(recipe: Recipe, target: str) -> Export:
    """The settings of `te` (NVIDIA Transformer Engine), `torchao`, or the canonical recipe as `json`.

    ConfigError for another target.
    """
    if target == "json":
        text = json.dumps(recipe_to_dict(recipe.canonical()), indent=2, ensure_ascii=False)
        return Export(target, Settings(text, recipe.canonical()), [])
    if target not in LISTS:
        raise ConfigError("--to", target, ", ".join(TARGETS))
    recipe, known = _any_bits(recipe.canonical()), _known(target)
    if settings := known.get(recipe.config_id):
        return Export(target, settings, [])
    columns = recipe.columns()
    nearest = min(known.values(), key=lambda settings: _distance(columns, settings.recipe.columns()))
    return Export(target, nearest, differences(recipe, nearest.recipe))


def _any_bits(recipe: Recipe) -> Recipe:
    """The recipe with the usual number of random bits: it is the library's and the chip's choice, and not compared."""
    stages = {}
    for name in STAGES:
        stage = getattr(recipe, name)
        drawn = {o: getattr(stage, o) for o in STAGES[name] if isinstance(getattr(stage, o).rounding, Stochastic)}
        changes = {o: msgspec.structs.replace(q, rounding=Stochastic()) for o, q in drawn.items()}
        stages[name] = msgspec.structs.replace(stage, **changes)
    return msgspec.structs.replace(recipe, **stages)


@cache
def _known(target: str) -> dict[str, Settings]:
    """config_id -> settings."""
    return {settings.recipe.config_id: settings for settings in LISTS[target]()}


def _distance(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Columns in which two recipes differ."""
    return sum(a[name] != b[name] for name in a)


def differences(wanted: Recipe, has: Recipe) -> list[str]:
    """The differences, one line a field: `gradients range 16/17 (it has full)`."""
    slots: dict[str, dict[str, str]] = {}
    lines = []
    for name, value in wanted.columns().items():
        other = has.columns()[name]
        slot = next((slot for slot in SLOTS if name.startswith(slot.replace(".", "_") + "_")), None)
        field = name.removeprefix((slot or "").replace(".", "_") + "_").replace("_", " ")
        if value == other or (slot and field != "element" and wanted.slot(slot).is_plain != has.slot(slot).is_plain):
            continue  # where only one is quantized, the element says it all
        text = f"{_word(value)} (it has {_word(other)})"
        if slot:
            slots.setdefault(field, dict.fromkeys(SLOTS, ""))[slot] = f"{field} {text}"
        else:
            lines.append(f"{field} {text}")
    return [line for texts in slots.values() for line in grouped(texts)] + lines


def _word(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
