"""A space: a base recipe and the axes that vary, with rules about what may not be combined.

Enumeration is product -> canonical -> dedupe -> validate. Axes are applied in the order written, so a later one
refines what an earlier one set; the product is walked as a tree, so that a prefix is computed once.

An axis is a path (see paths.py) and its values:

    "*" = ["mxfp4", "nvfp4"]                     whole quantizers, in all six slots
    "forward.rounding" = ["nearest"]             one field
    "*.g" = [{ rounding = "stochastic", range = "16/17" }]   several fields at once
    "wgrad.rotation" = ["none", "rht16"]         a rotation belongs to its GEMM
    "recipe" = ["nvfp4", "mxfp4"]                whole recipes
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.library import load_recipe, place, read, read_toml
from fp4dse.dse.paths import RecipePath, holds, parse_path, read_value, write
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.record import Part
from fp4dse.dse.rules import faults


class Forbid(Part, frozen=True):
    """Recipes where every path in `when` has the value given are rejected, for `reason`."""

    when: dict
    reason: str


class Count(msgspec.Struct):
    """What enumeration met: `raw` = `merged` as equivalent + `rejected` by rule + `left`."""

    raw: int = 0
    merged: int = 0
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    left: int = 0


class SpaceFile(Part, frozen=True):
    """A space as it is written: the base and what axes and rules hold are not read yet."""

    name: str
    summary: str = ""
    base: str = "nvfp4"
    axes: dict = {}  # noqa: RUF012  (msgspec copies it)
    forbid: list = []  # noqa: RUF012


class Space(msgspec.Struct, frozen=True):
    """Axes around a base recipe. `Space.load(file)`, `Space.from_dict(...)`; `recipes()` enumerates.

    axes: path -> its values, as `paths.read_value` gives them. forbid: rules, `when` likewise.
    """

    name: str
    base: Recipe
    axes: dict[str, list] = {}
    forbid: list[Forbid] = []
    summary: str = ""

    @staticmethod
    def load(path: str | Path) -> Space:
        """From a TOML file; recipe files that it names are looked for beside it. ConfigError on wrong content."""
        path = Path(path)
        return Space.from_dict({"name": path.stem, **read_toml(path)}, str(path), path.parent)

    @staticmethod
    def from_dict(data: dict, where: str = "space", folder: Path = Path()) -> Space:
        """From plain data: name, summary, base (a recipe's name or .toml file), axes, forbid, with all shorthand.

        ConfigError names `where` and the key; recipe files are looked for in `folder`.
        """
        file = read({"name": "space", **data}, SpaceFile, where)
        return Space(
            name=file.name,
            base=load_recipe(file.base, folder, place(where, "base")),
            axes={text: _read_axis(text, values, folder, where) for text, values in file.axes.items()},
            forbid=[_read_rule(rule, folder, where, f"forbid[{i}]") for i, rule in enumerate(file.forbid)],
            summary=file.summary,
        )

    def recipes(self, count: Count | None = None) -> Iterator[Recipe]:
        """Every distinct valid recipe, canonical, in the order of the product. `count` is filled in on the way."""
        count = count if count is not None else Count()
        axes = [(parse_path(text, self.name), values) for text, values in self.axes.items()]
        rules = [
            (rule.reason, [(parse_path(text, self.name), value) for text, value in rule.when.items()])
            for rule in self.forbid
        ]
        seen: set[Recipe] = set()
        for recipe in _product(self.base, axes):
            count.raw += 1
            recipe = recipe.canonical()
            if recipe in seen:
                count.merged += 1
                continue
            seen.add(recipe)
            broken = next((name for name, _ in faults(recipe)), None) or next(
                (reason for reason, when in rules if all(holds(recipe, path, value) for path, value in when)), None
            )
            if broken:
                count.rejected[broken] = count.rejected.get(broken, 0) + 1
            else:
                count.left += 1
                yield recipe


def _product(recipe: Recipe, axes: list[tuple[RecipePath, list[Any]]]) -> Iterator[Recipe]:
    if not axes:
        yield recipe
        return
    (path, values), *rest = axes
    for value in values:
        yield from _product(write(recipe, path, value), rest)


def _read_axis(text: str, values: object, folder: Path, where: str) -> list:
    path = parse_path(text, where, "axes", text)
    if not isinstance(values, list) or not values:
        raise ConfigError(place(where, "axes", text), values, "a list with at least one value")
    return [read_value(path, value, folder, where, "axes", f"{text}[{i}]") for i, value in enumerate(values)]


def _read_rule(data: object, folder: Path, where: str, key: str) -> Forbid:
    rule = read(data, Forbid, where, key)
    if not rule.when:
        raise ConfigError(place(where, key, "when"), rule.when, "at least one path = value")
    when = {
        text: read_value(parse_path(text, where, key, "when", text), value, folder, where, key, "when", text)
        for text, value in rule.when.items()
    }
    return Forbid(when=when, reason=rule.reason)
