"""Rules for layers written from what each layer of a model is to compute: the inverse of `Recipe.at`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.rule import CHANGES, LayerRule, field_of
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.stages import SHARED, SLOTS, STAGES


def with_exceptions_at(base: Recipe, wanted: Mapping[Place, Recipe]) -> Recipe:
    """The recipe with rules by which each layer of a model computes as wanted there, canonical.

    base: what it says of layers in general counts, its rules do not. wanted: of all places of the model; what is
    compared are the stages and the estimators. ConfigError for layers that no rule can tell from others.
    """
    base = msgspec.structs.replace(base, layers=())
    found: dict[tuple[tuple[str, Any], ...], list[Place]] = {}
    for place, recipe in wanted.items():
        if changes := _changes(base.at(place), recipe.canonical()):
            found.setdefault(tuple(changes.items()), []).append(place)
    rules = [
        LayerRule(**where, **dict(changes)) for changes, places in found.items() for where in meeting(places, wanted)
    ]
    return msgspec.structs.replace(base, layers=tuple(rules)).canonical()


def meeting(places: Collection[Place], among: Iterable[Place]) -> Iterator[dict[str, Any]]:
    """Conditions of rules that together meet exactly these layers among a model's: by kind or role and runs of blocks,
    where these tell them from others, else by name. ConfigError for a layer that shares its name with others."""
    model = list(dict.fromkeys(among))
    left = dict.fromkeys(places)
    met: dict[str, list[str]] = {}
    for word in dict.fromkeys([*(place.kind for place in left), *(place.role for place in left if place.role)]):
        here = [place for place in model if word in place.words]
        for blocks, members in _runs(here, left):
            met.setdefault(blocks, []).append(word)
            for place in members:
                del left[place]
    yield from ({"kind": tuple(words), **({"blocks": blocks} if blocks else {})} for blocks, words in met.items())
    for place in left:
        same = [other for other in model if other.name == place.name]
        if not place.name or len(same) > 1:
            raise ConfigError("layers", place.name, "layers that kind, role, block or name tells from others")
        yield {"name": place.name}


def _runs(here: list[Place], wanted: Mapping[Place, None]) -> Iterator[tuple[str, list[Place]]]:
    """Slices of blocks, empty for a whole model, in which all of the layers `here` are wanted, and those layers."""
    if here and all(place in wanted for place in here):
        yield "", here
        return
    by_block: dict[int, list[Place]] = {}
    for place in here:
        if place.block is not None:
            by_block.setdefault(place.block, []).append(place)
    whole = sorted(block for block, members in by_block.items() if all(place in wanted for place in members))
    for _, run in groupby(enumerate(whole), lambda pair: pair[1] - pair[0]):
        blocks = [block for _, block in run]
        text = f"{blocks[0]}:{blocks[-1] + 1}" if len(blocks) > 1 else f"{blocks[0]}"
        yield text, [place for block in blocks for place in by_block[block]]


def _changes(old: Recipe, new: Recipe) -> dict[str, Any]:
    """Fields of a rule that make one recipe of a layer the other, both canonical."""
    if all(new.slot(slot).element == "bf16" for slot in SLOTS):
        if all(old.slot(slot) == new.slot(slot) for slot in SLOTS):
            return {}
        return {field_of(slot): new.slot(slot) for slot in SLOTS}
    found: dict[str, Any] = {field_of(slot): of for slot in SLOTS if (of := new.slot(slot)) != old.slot(slot)}
    for stage, operands in STAGES.items():
        is_plain = all(new.slot(f"{stage}.{operand}").is_plain for operand in operands)
        if not is_plain and new.rotation(stage) != old.rotation(stage):
            found[f"{stage}_rotation"] = new.rotation(stage) or "none"
    if new.fprop.channels != old.fprop.channels and not (new.fprop.x.is_plain and new.fprop.w.is_plain):
        found["fprop_channels"] = new.fprop.channels or "none"
    found |= {f"{stage}_source": new.source(stage) for stage in SHARED if new.source(stage) != old.source(stage)}
    for operand in STAGES["fprop"]:
        through = getattr(new.estimator, operand)
        if not new.slot(f"fprop.{operand}").is_plain and through != getattr(old.estimator, operand):
            found[f"estimator_{operand}"] = through
    return {name: found[name] for name in CHANGES if name in found}


def value_of(recipe: Recipe, field: str) -> object:
    """The value that a field of a rule has in a recipe: `fprop_rotation` of its forward product."""
    part, _, name = field.partition("_")
    value = getattr(getattr(recipe, part), name)
    return "none" if value is None else value
