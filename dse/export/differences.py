"""Differences between two recipes in words, a line a field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fp4dse.dse.export.listed import Settings
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.stages import SLOTS, grouped


def nearest(recipe: Recipe, known: Iterable[Settings]) -> Settings:
    """The settings whose recipe differs in the fewest columns, the first of equals."""
    columns = recipe.columns()
    return min(known, key=lambda settings: _distance(columns, settings.recipe.columns()))


def _distance(a: dict[str, Any], b: dict[str, Any]) -> int:
    """Columns in which two recipes differ."""
    return sum(a[name] != b[name] for name in a)


def differences(wanted: Recipe, has: Recipe) -> list[str]:
    """The differences, one line a field: `gradients range 16/17 (it has full)`."""
    slots: dict[str, dict[str, str]] = {}
    lines = []
    there = has.columns()
    for name, value in wanted.columns().items():
        other = there[name]
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
