"""Reads the file of a space into the fields of a Space: its shorthand is expanded here and nowhere else."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Protocol

from fp4dse.dse.cost import DEFAULT_COST, CostTarget
from fp4dse.dse.errors import ConfigError, at_key
from fp4dse.dse.reading.library import check_starts, load_recipe, read_places, read_value, recipe_from_dict
from fp4dse.dse.reading.own_names import expanded
from fp4dse.dse.reading.paths import Kind, parse_path, value_text
from fp4dse.dse.reading.shorthand import read
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.record import Part
from fp4dse.dse.space.design import Design, Factorial, OneAtATime, check_design
from fp4dse.dse.space.missing_parts import check_parts
from fp4dse.dse.space.overrides import written

BASE = "nvfp4"
"""Where a file names none."""

EXAMPLE = 'as: base = "nvfp4", axes = { "*.g.rounding" = ["nearest", "stochastic"] }, on lines of their own'
"""A space as it may be written, for those whose file cannot be read."""

NAME = r"[^\s./\\][^/\\\x00-\x1f\x7f]*"
"""Of a space: its results go into a folder of this name."""
MOST_SEEDS, LAST_SEED = 10_000, 10**9 - 1
"""Seeds that a sweep takes, and the largest of them."""

Finder = Callable[[str], Path | None]
"""The file of a space that is joined by name."""


class SpaceType(Protocol):
    """The class `Space`, which reads the spaces that a file joins."""

    def load(self, path: Path, find: Finder) -> Any: ...
    def from_dict(self, data: dict[str, Any], where: str, folder: Path, find: Finder) -> Any: ...


class Axis(Part, frozen=True):
    """One axis: values as `library.read_value` gives them, where every condition of `when` (path -> values) holds."""

    values: list[Any]
    when: dict[str, Any] = {}  # noqa: RUF012  (msgspec copies it)
    texts: list[Any] = []  # noqa: RUF012


class Forbid(Part, frozen=True):
    """Recipes for which every condition in `when` holds are rejected, for `reason`."""

    when: dict[str, Any]
    reason: str


class Require(Part, frozen=True):
    """Recipes for which every condition in `when` holds are rejected, for `reason`, unless all of `then` holds."""

    then: dict[str, Any]
    reason: str
    when: dict[str, Any] = {}  # noqa: RUF012


class Lanes(Part, frozen=True):
    """Learning rates and seeds that every recipe is trained with; None: the task's own, the command's own."""

    lr: list[Any] | None = None
    seeds: list[Any] | int | None = None


class SpaceFile(Part, frozen=True):
    """A space as it is written: the base and what axes and rules hold are not read yet, names of own formats are."""

    name: str
    summary: str = ""
    base: str | Recipe | None = None
    fixed: dict[str, Any] = {}  # noqa: RUF012
    axes: dict[str, Any] = {}  # noqa: RUF012
    forbid: list[Any] = []  # noqa: RUF012
    require: list[Any] = []  # noqa: RUF012
    join: list[Any] = []  # noqa: RUF012
    design: Design = Factorial()
    lanes: Lanes = Lanes()
    cost: CostTarget = DEFAULT_COST
    elements: dict[str, Any] = {}  # noqa: RUF012
    scales: dict[str, Any] = {}  # noqa: RUF012


_open: ContextVar[tuple[Path, ...]] = ContextVar("_open", default=())


@contextmanager
def opened(path: Path) -> Iterator[None]:
    """While the file of a space is read, and those that it joins. ConfigError if it joins itself."""
    above, found = _open.get(), path.resolve()
    if found in above:
        way = " → ".join(file.name for file in (*above[above.index(found) :], found))
        raise ConfigError(f"{above[-1]}: join", str(path), f"a space that does not lead back to itself ({way})")
    token = _open.set((*above, found))
    try:
        yield
    finally:
        _open.reset(token)


def resolve(
    data: dict[str, Any],
    space_type: SpaceType,
    where: str = "space",
    folder: Path = Path(),
    find: Finder = lambda _: None,
) -> dict[str, Any]:
    """The fields of a space with everything read; what is read already stays as it is."""
    data = expanded({"name": "space", **data}, where)
    if isinstance(data.get("base"), dict):
        table = data["base"]
        data = {**data, "base": recipe_from_dict(table, where, "base")}
        if _open.get():  # in a file: what `recipe_to_dict` returns leaves defaults out
            check_starts(table, where, "base")
    file = read(data, SpaceFile, where)
    if not re.fullmatch(NAME, file.name):
        accepted = "a text without / and \\, that begins with no dot and no space"
        raise ConfigError(at_key(where, "name"), file.name, accepted)
    base = file.base
    if base is None and not (file.join and not file.axes):
        base = BASE
    check_design(file.design, at_key(where, "design"))
    space = {
        "name": file.name,
        "summary": file.summary,
        "base": load_recipe(base, folder, at_key(where, "base")) if isinstance(base, str) else base,
        "fixed": read_places(file.fixed, folder, where, "fixed"),
        "axes": {text: _read_axis(text, axis, folder, where) for text, axis in file.axes.items()},
        "forbid": [_read_rule(rule, Forbid, folder, where, f"forbid[{i}]") for i, rule in enumerate(file.forbid)],
        "require": [_read_rule(rule, Require, folder, where, f"require[{i}]") for i, rule in enumerate(file.require)],
        "join": [
            _read_joined(entry, space_type, folder, find, where, f"join[{i}]") for i, entry in enumerate(file.join)
        ],
        "design": file.design,
        "lanes": _read_lanes(file.lanes, where),
        "cost": _read_cost(file.cost, folder, where),
    }
    _check_fixed(space["fixed"], space["axes"], where)
    if space["base"] is not None:
        check_parts(space["base"], space["fixed"], space["axes"], isinstance(file.design, OneAtATime), where)
    for i, joined in enumerate(space["join"]):
        for field in ("lr", "seeds"):
            if getattr(joined.lanes, field) is not None and getattr(space["lanes"], field) is None:
                raise ConfigError(
                    at_key(where, "lanes", field), None, f"a list, which counts for all (join[{i}] has its own)"
                )
        if joined.cost not in (DEFAULT_COST, space["cost"]):
            accepted = f"{joined.cost.of}, which join[{i}] has: all recipes have their overheads of one"
            raise ConfigError(at_key(where, "cost"), space["cost"].of, accepted)
    return space


def _read_axis(text: str, data: object, folder: Path, where: str) -> Axis:
    path = parse_path(text, where, "axes", text)
    if isinstance(path.type, Kind):
        raise ConfigError(at_key(where, "axes", text), text, f"{text.rsplit('.', 1)[0]}, set as a whole")
    if isinstance(data, Axis):
        return data
    values, when = data, {}
    if isinstance(data, dict):
        for key in data:
            if key not in ("values", "when"):
                raise ConfigError(at_key(where, "axes", text, key), key, "values, when")
        values, when = data.get("values"), read(data.get("when", {}), dict, where, "axes", text, "when")
    if not isinstance(values, list) or not values:
        raise ConfigError(
            at_key(where, "axes", text), values, "a list with at least one value, or a table with values, when"
        )
    found = [read_value(path, value, folder, where, "axes", f"{text}[{i}]") for i, value in enumerate(values)]
    for i, value in enumerate(found):
        if any(value == other and type(value) is type(other) for other in found[:i]):  # 0 is not False
            raise ConfigError(at_key(where, "axes", f"{text}[{i}]"), value_text(value), "each value once")
    return Axis(
        values=found,
        when=_read_conditions(when, folder, where, "axes", text, "when"),
        texts=[value_text(found[i] if isinstance(found[i], tuple) else value) for i, value in enumerate(values)],
    )


def _check_fixed(fixed: dict[str, Any], axes: dict[str, Axis], where: str) -> None:
    """ConfigError for an axis that varies what is fixed."""
    for text, axis in axes.items():
        own = written(parse_path(text, where), axis.values)
        for other, value in fixed.items():
            if not own.isdisjoint(written(parse_path(other, where), [value])):
                raise ConfigError(at_key(where, "axes", text), text, f'a path that is not fixed (fixed."{other}" is)')


def _read_rule(data: object, cls: type, folder: Path, where: str, key: str) -> Any:
    rule = read(data, cls, where, key)
    conditions = {"when": rule.when} if cls is Forbid else {"when": rule.when, "then": rule.then}
    must = "when" if cls is Forbid else "then"
    if not conditions[must]:
        raise ConfigError(at_key(where, key, must), conditions[must], "at least one path = value")
    read_ones = {name: _read_conditions(when, folder, where, key, name) for name, when in conditions.items()}
    return cls(reason=rule.reason, **read_ones)


def _read_conditions(data: Mapping[str, Any], folder: Path, where: str, *keys: str) -> dict[str, list[Any]]:
    """path -> the values of which one must hold."""
    out = {}
    for text, given in data.items():
        path = parse_path(text, where, *keys, text)
        values = given if isinstance(given, list) else [given]
        if not values:
            raise ConfigError(at_key(where, *keys, text), given, "a value, or a list with at least one")
        out[text] = [read_value(path, value, folder, where, *keys, text) for value in values]
    return out


def _read_joined(entry: object, space_type: SpaceType, folder: Path, find: Finder, where: str, key: str) -> Any:
    """A joined space: itself, a file, a name that `find` knows, or a table."""
    if isinstance(entry, space_type):  # type: ignore[arg-type]
        return entry
    if isinstance(entry, dict):
        return space_type.from_dict({"name": key, **entry}, at_key(where, key), folder, find)
    if isinstance(entry, str) and entry.endswith(".toml"):
        return space_type.load(folder / entry, find)
    if isinstance(entry, str) and (found := find(entry)):
        return space_type.load(found, find)
    raise ConfigError(at_key(where, key), entry, "a .toml file, the name of a shipped space, or a table with axes")


def is_seeds(seeds: list[Any]) -> bool:
    """True if a sweep takes these seeds."""
    return 0 < len(seeds) <= MOST_SEEDS and all(type(seed) is int and 0 <= seed <= LAST_SEED for seed in seeds)


def _read_lanes(lanes: Lanes, where: str) -> Lanes:
    for lr in lanes.lr if lanes.lr is not None else [1.0]:
        if type(lr) not in (int, float) or not 0 < lr < math.inf:
            raise ConfigError(at_key(where, "lanes", "lr"), lr, "a list of numbers above 0")
    if lanes.lr == []:
        raise ConfigError(at_key(where, "lanes", "lr"), [], "a list of numbers above 0")
    seeds = lanes.seeds
    if isinstance(seeds, int):
        seeds = list(range(min(seeds, MOST_SEEDS + 1)))
    if seeds is not None and not is_seeds(seeds):
        accepted = f"a number of seeds, or a list of seeds ({MOST_SEEDS:,} at most, from 0 to {LAST_SEED})"
        raise ConfigError(at_key(where, "lanes", "seeds"), lanes.seeds, accepted)
    for name, values in (("lr", lanes.lr or []), ("seeds", seeds or [])):
        for value in values:
            if values.count(value) > 1:
                raise ConfigError(at_key(where, "lanes", name), values, f"each value once ({value} is there twice)")
    return Lanes(lr=lanes.lr and [float(lr) for lr in lanes.lr], seeds=seeds)


def _read_cost(cost: CostTarget, folder: Path, where: str) -> CostTarget:
    """With files of its own found beside the file."""
    found = {
        name: str(folder / text) if text.endswith(".toml") else text
        for name, text in (("model", cost.model), ("chip", cost.chip))
    }
    cost = CostTarget(**found)
    cost.check(at_key(where, "cost."))
    return cost
