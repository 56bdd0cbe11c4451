"""A space: a base recipe and the axes that vary, with rules about what may not be combined.

Enumeration is product -> canonical -> dedupe -> validate. Axes are applied in the order written, so a later one
refines what an earlier one set (`overridden` names those that write over it instead), and what is fixed holds in every
recipe; the product is walked as a tree, so that a prefix is computed once.

An axis is a path (see paths.py) and its values:

    "*" = ["mxfp4", "nvfp4"]                     whole quantizers, in all six slots
    "forward.rounding" = ["nearest"]             one field
    "*.g" = [{ rounding = "stochastic", range = "16/17" }]   several fields at once
    "wgrad.rotation" = ["none", "rht16"]         a rotation belongs to its GEMM
    "recipe" = ["nvfp4", "mxfp4"]                whole recipes
    "*.block" = { values = [16, 32], when = { "*.scale.format" = "ue5m3" } }   only where the condition holds

A condition is a path and a value, or a list of values of which one must hold. `when` of an axis looks at what the base
and the axes above made.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse.cost import DEFAULT_COST
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.reading.files import read_toml
from fp4dse.dse.reading.paths import RecipePath, holds, parse_path, value_text, write
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.record import unlabelled
from fp4dse.dse.rules import canonical_faults
from fp4dse.dse.space.design import (
    Factorial,
    Fractional,
    Levels,
    OneAtATime,
    Random,
    balanced,
    regular,
    shuffled,
)
from fp4dse.dse.space.overrides import covered, overridden, written
from fp4dse.dse.space.space_file import EXAMPLE, Finder, Lanes, opened, resolve

DRAWS_PER_RUN = 1000
"""A random design gives up after so many draws for each recipe that it wants."""


DRAWN = 100
"""Combinations that an axis is looked at in, to say how often it changes nothing."""


class Count(msgspec.Struct):
    """Counts of an enumeration: `raw` = `merged` as equivalent + `rejected` by rule + `left`.

    faults: rule -> what it says of the first recipe that it rejects; a rule of the space is its own reason.
    """

    raw: int = 0
    merged: int = 0
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    left: int = 0
    faults: dict[str, str] = msgspec.field(default_factory=dict)


class Space(msgspec.Struct, frozen=True):
    """Axes around a base recipe. `Space.load(file)`, `Space.from_dict(...)`, `Space("name", base=…, axes=…)`, where all
    shorthand of the files may be used; `recipes()` enumerates.

    base     a recipe, its name or its .toml file; None: there are joined spaces alone
    fixed    path -> value, the same in all recipes of the product
    axes     path -> its values, or an Axis
    forbid, require     rules; they hold for joined spaces too
    join     further spaces whose recipes follow
    design   which combinations are taken (design.py)
    lanes    learning rates and seeds
    cost     the model and the chip that overheads are of
    """

    name: str = "space"
    summary: str = ""
    base: Any = None
    fixed: dict[str, Any] = {}
    axes: dict[str, Any] = {}
    forbid: list[Any] = []
    require: list[Any] = []
    join: list[Any] = []
    design: Any = Factorial()
    lanes: Any = Lanes()
    cost: Any = DEFAULT_COST

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in self.__struct_fields__}
        for field, value in resolve(given, Space).items():
            msgspec.structs.force_setattr(self, field, value)

    @staticmethod
    def load(path: str | Path, find: Finder = lambda _: None) -> Space:
        """From a TOML file; files that it names are looked for beside it, and `find` knows spaces by name. ConfigError
        on wrong content."""
        path = Path(path)
        data = read_toml(path, EXAMPLE)
        with opened(path):
            space = Space.from_dict({"name": path.stem, **data}, str(path), path.parent, find)
        if not set(data) - {"name", "summary"}:
            raise ConfigError(str(path), ", ".join(data), "a space that says what is tried: base, axes, fixed or join")
        return space

    @staticmethod
    def from_dict(
        data: dict[str, Any], where: str = "space", folder: Path = Path(), find: Finder = lambda _: None
    ) -> Space:
        """From plain data with the fields of a space, with all shorthand. ConfigError names `where` and the key."""
        return Space(**resolve(data, Space, where, folder, find))

    @property
    def size(self) -> int:
        """Of the full product, were every axis to apply; without joined spaces."""
        return math.prod(len(axis.values) for axis in self.axes.values()) if self.base else 0

    def recipes(self, count: Count | None = None) -> Iterator[Recipe]:
        """Every distinct valid recipe, canonical, in the order of the product. `count` is filled in on the way."""
        yield from self._recipes(count if count is not None else Count(), set(), ())

    def build(self, levels: Sequence[int]) -> Recipe:
        """The canonical recipe at the given level of each axis, whether or not a rule rejects it."""
        return self._built(self._axes(), levels).canonical()

    def broken(self, recipe: Recipe) -> str | None:
        """The first rule, ours or the space's, that a canonical recipe breaks."""
        return _broken(recipe, self._rules())[0]

    def describe(self) -> list[dict[str, Any]]:
        """The axes, a row each, those of joined spaces too: `axis`, `values` and `when` in words, and `idle`.

        idle: of some combinations in which the axis varies, drawn at random, the share in which all of its values
        compute the same; None with one value.
        """
        axes, rows = self._axes(), []
        drawn = list(itertools.islice(shuffled([len(axis.values) for axis in axes]), DRAWN)) if self.base else []
        for i, (text, axis) in enumerate(self.axes.items()):
            idle = [
                len({unlabelled(self.build([*levels[:i], n, *levels[i + 1 :]])) for n in range(len(axis.values))}) == 1
                for levels in drawn
                if axes[i].applies(self._built(axes[:i], levels[:i]))
            ]
            when = [f"{path} = {' or '.join(map(value_text, values))}" for path, values in axis.when.items()]
            share = sum(idle) / len(idle) if idle and len(axis.values) > 1 else None
            rows.append({"axis": text, "values": " | ".join(axis.texts), "when": ", ".join(when), "idle": share})
        return rows + [row for space in self.join for row in space.describe()]

    def overridden(self) -> list[str]:
        """A sentence for each axis that another one writes over, so that it varies less than it seems."""
        return overridden(list(self.axes.items()), self.name) + [
            text for space in self.join for text in space.overridden()
        ]

    def _recipes(self, count: Count, seen: set[Recipe], outer: tuple[_Rule, ...]) -> Iterator[Recipe]:
        rules = (*self._rules(), *outer)
        wanted = math.inf
        if isinstance(self.design, Random):
            wanted = count.left + self.design.runs
        for recipe in self._combinations():
            count.raw += 1
            recipe = recipe.canonical()
            if (what := unlabelled(recipe)) in seen:
                count.merged += 1
                continue
            seen.add(what)
            rule, fault = _broken(recipe, rules)
            if rule:
                count.rejected[rule] = count.rejected.get(rule, 0) + 1
                count.faults.setdefault(rule, fault)
                continue
            count.left += 1
            yield recipe
            if count.left >= wanted:
                break
        for space in self.join:
            yield from space._recipes(count, seen, rules)

    def _combinations(self) -> Iterator[Recipe]:
        """The recipes of the design, not canonical."""
        if self.base is None:
            return
        axes = self._axes()
        start = self._fix(self.base)
        sizes = [len(axis.values) for axis in axes]
        match self.design:
            case Factorial():
                yield from self._product(start, axes)
            case OneAtATime():
                yield start
                for axis in axes:
                    if axis.applies(start):
                        yield from (self._set(start, axis, value) for value in axis.values)
            case Fractional(runs=None, resolution=int(resolution)):
                yield from (self._built(axes, levels) for levels in regular(sizes, resolution))
            case Fractional(runs=int(runs), seed=seed):
                yield from (self._built(axes, levels) for levels in balanced(sizes, runs, seed))
            case Random(runs=runs, seed=seed):
                draws = shuffled(sizes, seed)
                yield from (self._built(axes, levels) for levels in itertools.islice(draws, runs * DRAWS_PER_RUN))

    def _product(self, recipe: Recipe, axes: Sequence[_Axis]) -> Iterator[Recipe]:
        if not axes:
            yield recipe
            return
        axis, *rest = axes
        if not axis.applies(recipe):
            yield from self._product(recipe, rest)
            return
        for value in axis.values:
            changed = self._set(recipe, axis, value)
            if rest:
                yield from self._product(changed, rest)
            else:
                yield changed

    def _built(self, axes: Sequence[_Axis], levels: Levels | Sequence[int]) -> Recipe:
        recipe = self._fix(self.base)
        for axis, level in zip(axes, levels, strict=True):
            if axis.applies(recipe):
                recipe = self._set(recipe, axis, axis.values[level])
        return recipe

    def _set(self, recipe: Recipe, axis: _Axis, value: Any) -> Recipe:
        recipe = write(recipe, axis.path, value)
        for path, fixed in axis.fixed:
            recipe = write(recipe, path, fixed)
        return recipe

    def _fix(self, recipe: Recipe) -> Recipe:
        for path, value in self._fixed():
            recipe = write(recipe, path, value)
        return recipe

    def _fixed(self) -> list[tuple[RecipePath, Any]]:
        return [(parse_path(text, self.name), value) for text, value in self.fixed.items()]

    def _axes(self) -> list[_Axis]:
        axes, fixed = [], [(path, value, written(path, [value])) for path, value in self._fixed()]
        for text, axis in self.axes.items():
            path = parse_path(text, self.name)
            own = written(path, axis.values)
            rewritten = [(at, value) for at, value, fields in fixed if covered(fields, own)]
            axes.append(_Axis(path, axis.values, _conditions(axis.when, self.name), rewritten))
        return axes

    def _rules(self) -> tuple[_Rule, ...]:
        forbidden = [_Rule(rule.reason, _conditions(rule.when, self.name)) for rule in self.forbid]
        required = [
            _Rule(rule.reason, _conditions(rule.when, self.name), _conditions(rule.then, self.name))
            for rule in self.require
        ]
        return (*forbidden, *required)


Conditions = list[tuple[RecipePath, list[Any]]]


class _Axis(msgspec.Struct, frozen=True):
    """An axis with its paths parsed, and what is fixed within what it sets."""

    path: RecipePath
    values: list[Any]
    when: Conditions
    fixed: list[tuple[RecipePath, Any]]

    def applies(self, recipe: Recipe) -> bool:
        return not self.when or _all_hold(recipe.canonical(), self.when)


class _Rule(msgspec.Struct, frozen=True):
    """A rule with its paths parsed: `when` without `then` is rejected."""

    reason: str
    when: Conditions
    then: Conditions | None = None

    def rejects(self, recipe: Recipe) -> bool:
        return _all_hold(recipe, self.when) and not (self.then is not None and _all_hold(recipe, self.then))


def _all_hold(recipe: Recipe, conditions: Conditions) -> bool:
    return all(any(holds(recipe, path, value) for value in values) for path, values in conditions)


def _broken(recipe: Recipe, rules: Sequence[_Rule]) -> tuple[str | None, str]:
    """The first rule that a canonical recipe breaks, and what it says of it."""
    for name, error in canonical_faults(recipe):
        return name, str(error)
    reason = next((rule.reason for rule in rules if rule.rejects(recipe)), None)
    return reason, reason or ""


def _conditions(when: Mapping[str, list[Any]], where: str) -> Conditions:
    return [(parse_path(text, where), values) for text, values in when.items()]
