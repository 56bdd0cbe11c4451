"""Tests if the order of recipes depends on assumed numbers. One assumption at a time is changed, and the shipped
recipes are priced again on the default model and chip."""

from __future__ import annotations

from itertools import combinations

import msgspec

from fp4dse.dse.cost.chip import Chip, Number, load_chip
from fp4dse.dse.cost.model import Model, load_model
from fp4dse.dse.cost.step import DEFAULT_CHIP, DEFAULT_MODEL, step_cost
from fp4dse.dse.library import recipe_files
from fp4dse.dse.recipe import Recipe

CHANGES: dict[str, tuple[float, ...]] = {
    "achieved.matrix": (0.5, 0.9),
    "achieved.vector": (0.4, 0.9),
    "achieved.bandwidth": (0.7, 0.95),
    "convert": (4.7e12, 75e12),
    "launch": (0.5e-6, 8e-6),
}
"""Assumed number of a chip -> other values that it might have."""

APART = 0.01
"""Recipes whose overheads differ by less are not called ordered."""


class Effect(msgspec.Struct, frozen=True):
    """The effect of a change: the largest relative change of an overhead, and the pairs of recipes that swap places."""

    what: str
    largest: float
    swapped: int
    pairs: int


def effects() -> list[Effect]:
    """Every change of CHANGES, then other models and chips."""
    model, chip = load_model(DEFAULT_MODEL), load_chip(DEFAULT_CHIP)
    before = _overheads(model, chip)
    cases = {
        f"{path} {value:g}": (model, _with(chip, path, value)) for path, values in CHANGES.items() for value in values
    }
    cases |= {f"model {name}": (load_model(name), chip) for name in ("llama-350m", "llama-8b", "vit-b")}
    cases |= {f"chip {name}": (model, load_chip(name)) for name in ("gb300", "generic")}
    return [_effect(what, before, _overheads(*case)) for what, case in cases.items()]


def _with(chip: Chip, path: str, value: float) -> Chip:
    """The chip with one number changed."""
    outer, _, inner = path.partition(".")
    number: object = Number(value, "changed")
    if inner:
        number = msgspec.structs.replace(chip.achieved, **{inner: number})
    return msgspec.structs.replace(chip, **{outer: number})


def _overheads(model: Model, chip: Chip) -> list[float]:
    bf16 = step_cost(Recipe.named("bf16"), model, chip).total
    return [step_cost(file.recipe, model, chip).total / bf16 for file in recipe_files().values()]


def _effect(what: str, before: list[float], after: list[float]) -> Effect:
    largest = max(abs(b / a - 1) for a, b in zip(before, after, strict=True))
    pairs = [(i, j) for i, j in combinations(range(len(before)), 2) if abs(before[i] - before[j]) > APART]
    swapped = sum((before[i] - before[j]) * (after[i] - after[j]) < 0 for i, j in pairs)
    return Effect(what, largest, swapped, len(pairs))
