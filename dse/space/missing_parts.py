"""Refuses paths of a space into parts that none of its recipes has: what they set would be left out without a word.

A path into a part that some recipes have and others lack, as `*.rotation.size`, varies the former alone, which is what
it is for. Where all lack it, as `training.rollout.kv_cache` does under the trainer's own rollout, recipes would be the
same with every value, and look as if it cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fp4dse.dse.errors import ConfigError, at_key
from fp4dse.dse.reading.paths import Chain, Fields, RecipePath, missing, parse_path, value_text
from fp4dse.dse.recipe import Recipe

Places = list[tuple[Chain, Any]]
"""Where in a recipe a value may stand, and the value."""


def check_parts(base: Recipe, fixed: Mapping[str, Any], axes: Mapping[str, Any], alone: bool, where: str) -> None:
    """ConfigError for a path that sets a field of a part that neither the base, nor what is fixed above it, nor a value
    of an axis above it has; conditions of axes are not asked. What is fixed holds below all axes. axes: Axis by path;
    alone: each axis varies in the base, without the others."""
    paths = {text: parse_path(text, where) for text in (*fixed, *axes)}
    of_axes = {text: list(_places(paths[text], axis.values)) for text, axis in axes.items()}
    above: Places = [((), base)]
    for text, value in fixed.items():
        _check(text, paths[text], [*above, *(place for of in of_axes.values() for place in of)], value, where, "fixed")
        above += _places(paths[text], [value])
    for text, axis in axes.items():
        _check(text, paths[text], above, [*map(value_text, axis.values)], where, "axes")
        if not alone:
            above += of_axes[text]


def _check(text: str, path: RecipePath, above: Places, found: object, where: str, key: str) -> None:
    if (absent := missing(text, path, above)) is not None:
        raise ConfigError(at_key(where, key, text), found, absent)


def _places(path: RecipePath, values: Iterable[Any]) -> Iterator[tuple[Chain, Any]]:
    """Of `values` that are written to the path."""
    for value in values:
        for chain in [()] if isinstance(value, Recipe) else path.chains:
            if isinstance(value, Fields):
                yield from (((*chain, name), field) for name, field in value.values)
            else:
                yield chain, value
