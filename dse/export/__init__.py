"""Settings of another library that realise a recipe, with what they cannot express.

A library has finitely many settings for a layer, and each computes a recipe: so they are listed with that recipe, and
the one that is wanted is looked up by its config_id. Transformer Engine also takes quantizers one by one
(te_custom.py). A recipe with exceptions is an ordered list of layers (assignment.py), each with its settings. What no
settings compute is refused, with the nearest settings and, field by field, what they have instead; of rules, those that
can be said are. Numbers agree as far as the library computes what its documentation says; the notes name known
differences.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache

import msgspec

from fp4dse.dse.attention import Attention
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.export import modelopt, te, te_custom, te_quant, torchao
from fp4dse.dse.export.assignment import Assignment, assign
from fp4dse.dse.export.differences import differences, nearest
from fp4dse.dse.export.listed import Settings, any_bits, of_layer
from fp4dse.dse.export.pieces import Said, say
from fp4dse.dse.reading.library import recipe_to_dict
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.training import Training

LISTS: dict[str, Callable[[], Iterator[Settings]]] = {
    "te": te.settings,
    "torchao": torchao.settings,
    "modelopt": modelopt.settings,
}
"""Target -> all settings that it has for a layer, the ones with fewer arguments first."""

TARGETS = (*LISTS, "te_quant", "json")

__all__ = ["LISTS", "TARGETS", "Export", "Settings", "differences", "export"]


class Export(msgspec.Struct, frozen=True):
    """The settings, and what they cannot express: empty if they compute the recipe. Then they are the nearest ones."""

    target: str
    settings: Settings
    cannot: list[str]


def export(recipe: Recipe, target: str, blocks: int | None = None) -> Export:
    """The settings of `te` (NVIDIA Transformer Engine), `torchao`, `modelopt` (NVIDIA Model Optimizer) or `te_quant`
    (Megatron's file of formats per layer), or the canonical recipe as `json`.

    blocks: of the model, for rules that depend on their number. ConfigError for another target.
    """
    if target == "json":
        text = json.dumps(recipe_to_dict(recipe.canonical()), indent=2, ensure_ascii=False)
        return Export(target, Settings(text, recipe.canonical()), [])
    if target not in TARGETS:
        raise ConfigError("--to", target, ", ".join(TARGETS))
    if blocks is not None and blocks < 1:
        raise ConfigError("--blocks", blocks, "a number from 1 on")
    recipe = any_bits(recipe.canonical())
    if target in LISTS and (settings := _known(target).get(recipe.config_id)):
        return Export(target, settings, [])
    around = _around(recipe)
    if target == "te":
        return _te(recipe, assign(recipe, blocks), around)
    if target == "te_quant":
        said = say(te_quant.assigned(recipe, blocks), lambda of: _look_up(of, _layers(target)))
        said = _without(said, te_quant.unsaid(said))
        return Export(target, te_quant.render(said, recipe, blocks), [*said.cannot, *around])
    said = say(assign(recipe, blocks), lambda of: _look_up(of, _layers(target)))
    if target == "modelopt":
        said = _without(said, modelopt.cannot_name(said))
    render = modelopt.render if target == "modelopt" else torchao.render
    return Export(target, said.default if said.is_uniform else render(said, recipe), [*said.cannot, *around])


def _te(recipe: Recipe, made: Assignment, around: list[str]) -> Export:
    """One of Transformer Engine's recipes, or one made of quantizers."""
    said, built_in = say(made, te_custom.factory), _look_up(made.default, _layers("te"))
    near, lines = built_in
    if unmade := te_custom.factory(made.default)[1]:
        return Export("te", near, [*lines, *said.cannot[len(unmade) :], *around])
    settings = near if not lines and said.is_uniform else te_custom.render(said, recipe)
    return Export("te", settings, [*said.cannot, *around])


def _look_up(recipe: Recipe, known: dict[str, Settings]) -> tuple[Settings, list[str]]:
    """The settings of a layer's recipe, or the nearest with what they have instead."""
    if settings := known.get(recipe.config_id):
        return settings, []
    near = nearest(recipe, known.values())
    return near, differences(recipe, of_layer(near.recipe))


def _around(recipe: Recipe) -> list[str]:
    """Lines for all that a recipe has beside its layers: no library has it as a setting of formats."""
    return differences(recipe, msgspec.structs.replace(recipe, attention=Attention(), finish=None, training=Training()))


def _without(said: Said[Settings], lines: list[str]) -> Said[Settings]:
    """The export without the rules that cannot be said after all; each line begins with the origin of one."""
    left = tuple(pair for pair in said.entries if not any(line.startswith(f"{pair[0].origin}:") for line in lines))
    return Said(said.default, left, [*said.cannot, *lines])


@cache
def _known(target: str) -> dict[str, Settings]:
    """config_id -> settings."""
    return {settings.recipe.config_id: settings for settings in LISTS[target]()}


@cache
def _layers(target: str) -> dict[str, Settings]:
    """config_id of a layer's recipe -> settings."""
    listed = te_quant.settings if target == "te_quant" else LISTS[target]
    return {of_layer(settings.recipe).config_id: settings for settings in listed()}
