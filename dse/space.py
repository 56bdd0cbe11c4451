"""A space: a base recipe and the axes that vary, with rules about what may not be combined.

Enumeration is product -> canonical -> validate -> ordered dedupe. Axes are applied in the order written, so a later
one refines what an earlier one set; the product is walked as a tree, so that a prefix is computed once.

An axis is a path and its values:

    "*" = ["mxfp4", "nvfp4"]                     whole quantizers, in all six slots
    "forward.rounding" = ["nearest"]             one field of the slots of a stage; `*.g.rounding`: of one operand
    "*.g" = [{ rounding = "stochastic", range = "16/17" }]   several fields of a slot at once
    "wgrad.rotation" = ["none", "rht16"]         a rotation belongs to its GEMM
    "recipe" = ["nvfp4", "mxfp4"]                whole named recipes

Stages: fprop (= forward), dgrad, wgrad, backward (= dgrad, wgrad), *. Operands: x, w, g, *.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.library import convert, expand_part, load_recipe, read_toml
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import RULES, SLOTS, STAGES, Fprop, Recipe

_STAGE_GROUPS = {
    **{stage: (stage,) for stage in STAGES},
    "forward": ("fprop",),
    "backward": ("dgrad", "wgrad"),
    "*": tuple(STAGES),
}


_FIELDS = ", ".join(Quantizer.__struct_fields__)


class AxisPath(msgspec.Struct, frozen=True):
    """A parsed axis path: the slots (or stages, for a rotation) it touches and the field below, if any."""

    text: str
    slots: tuple[str, ...] = ()
    stages: tuple[str, ...] = ()
    field: tuple[str, ...] = ()

    @property
    def is_recipe(self) -> bool:
        return self.text == "recipe"


def parse_path(text: str, where: str) -> AxisPath:
    """Parse `stage.operand[.field…]`, `stage.rotation[.field]`, `*` or `recipe`. ConfigError on anything else."""
    if text == "recipe":
        return AxisPath(text)
    stage, _, rest = text.partition(".")
    rest = rest or "*"
    operand, *field = rest.split(".")
    if operand in Quantizer.__struct_fields__:  # `backward.rounding` is short for `backward.*.rounding`
        operand, field = "*", [operand, *field]
    if stage not in _STAGE_GROUPS:
        raise ConfigError(where, text, f"recipe, or a path that starts with one of {', '.join(_STAGE_GROUPS)}")
    stages = _STAGE_GROUPS[stage]
    if operand == "rotation":
        return AxisPath(text, stages=stages, field=tuple(field))
    slots = tuple(s for s in SLOTS if s.split(".")[0] in stages and operand in ("*", s.split(".")[1]))
    if not slots:
        raise ConfigError(where, text, f"{stage}, then x, w, g, *, rotation, or a field: {_FIELDS}")
    if field and field[0] not in Quantizer.__struct_fields__:
        raise ConfigError(where, text, f"a quantizer field: {_FIELDS}")
    return AxisPath(text, slots=slots, field=tuple(field))


class Forbid(msgspec.Struct, frozen=True):
    """Recipes where every path in `when` has the value given are rejected, for `reason`."""

    when: dict[str, object]
    reason: str


class Count(msgspec.Struct):
    """What enumeration met: `raw` product, `merged` as equivalent, `rejected` by rule, `left`."""

    raw: int = 0
    merged: int = 0
    rejected: dict[str, int] = msgspec.field(default_factory=dict)
    left: int = 0


class Space(msgspec.Struct, frozen=True):
    """Axes around a base recipe. `Space.load(file)`, `Space.from_dict(...)`; `recipes()` enumerates."""

    name: str
    base: Recipe
    axes: dict[str, list] = {}
    forbid: list[Forbid] = []
    summary: str = ""

    @staticmethod
    def load(source: str | Path) -> Space:
        """From a TOML file, or a shipped space by its name. ConfigError on wrong content."""
        path = Path(source)
        return Space.from_dict({"name": path.stem, **read_toml(path)}, where=path.name)

    @staticmethod
    def from_dict(data: dict, where: str = "space") -> Space:
        """From plain data: name, base (recipe name, default nvfp4), axes, forbid, summary."""
        known = Space.__struct_fields__
        for key in data:
            if key not in known:
                raise ConfigError(f"{where}: {key}", key, ", ".join(known))
        base = data.get("base", "nvfp4")
        if not isinstance(base, str):
            raise ConfigError(f"{where}: base", base, "the name of a recipe or a .toml file")
        axes = data.get("axes", {})
        if not isinstance(axes, dict):
            raise ConfigError(f"{where}: axes", axes, "a table of path = [values]")
        for path, values in axes.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"{where}: axes.{path}", values, "a list with at least one value")
        forbid = convert(data.get("forbid", []), list[Forbid], f"{where}: forbid")
        space = Space(
            name=str(data.get("name", "space")),
            base=load_recipe(base),
            axes=axes,
            forbid=forbid,
            summary=str(data.get("summary", "")),
        )
        space._compiled(where)
        return space

    def recipes(self, count: Count | None = None) -> Iterator[Recipe]:
        """Every distinct valid recipe, canonical, in the order of the product. `count` is filled in on the way."""
        count = count if count is not None else Count()
        axes, forbidden = self._compiled("space")
        seen: set[Recipe] = set()
        for recipe in self._walk(self.base, axes):
            count.raw += 1
            recipe = recipe.canonical()
            if recipe in seen:
                count.merged += 1
                continue
            seen.add(recipe)
            broken = next((rule for rule, check, _ in RULES if check(recipe)), None) or next(
                (f.reason for f, tests in forbidden if all(_read(recipe, path) == want for path, want in tests)), None
            )
            if broken:
                count.rejected[broken] = count.rejected.get(broken, 0) + 1
                continue
            count.left += 1
            yield recipe

    def _walk(self, recipe: Recipe, axes: list[tuple[AxisPath, list]]) -> Iterator[Recipe]:
        if not axes:
            yield recipe
            return
        (path, values), *rest = axes
        for value in values:
            yield from self._walk(_write(recipe, path, value), rest)

    def _compiled(self, where: str) -> tuple[list[tuple[AxisPath, list]], list[tuple[Forbid, list]]]:
        axes = []
        for text, values in self.axes.items():
            path = parse_path(text, f"{where}: axes.{text}")
            spots = (f"{where}: axes.{text}[{i}]" for i in itertools.count())
            axes.append((path, [_parse(path, value, self.base, spot) for value, spot in zip(values, spots)]))
        forbidden = []
        for i, rule in enumerate(self.forbid):
            tests = []
            for text, value in rule.when.items():
                spot = f"{where}: forbid[{i}].when.{text}"
                path = parse_path(text, spot)
                if path.is_recipe:
                    raise ConfigError(spot, text, "a path to a slot, a field or a rotation")
                tests.append((path, _target(path, value, self.base, spot)))
            forbidden.append((rule, tests))
        return axes, forbidden


def _parse(path: AxisPath, value: object, base: Recipe, where: str) -> object:
    """An axis value as what `_write` sets: a Recipe, or a dict of field -> record for a slot, or a record."""
    if path.is_recipe:
        if not isinstance(value, str):
            raise ConfigError(where, value, "the name of a recipe")
        return load_recipe(value)
    if path.slots and not path.field and isinstance(value, dict) and "like" not in value:
        return {f: _field(path.slots[0], (f,), v, base, f"{where}.{f}") for f, v in value.items()}
    return _target(path, value, base, where)


def _target(path: AxisPath, value: object, base: Recipe, where: str) -> object:
    """The record that a path has when set to `value`."""
    if path.stages:
        if path.field:
            raise ConfigError(where, path.text, f"{path.text.rsplit('.', len(path.field))[0]}, with a whole rotation")
        data = {"rotation": expand_part("rotation", value, where)}
        return convert({**_plain_stage(), **data}, Fprop, where).rotation
    if not path.field:
        data = expand_part("x", value, where)
        if isinstance(data, dict) and "like" in data:
            data = {**expand_part("x", data["like"], where), **{k: v for k, v in data.items() if k != "like"}}  # type: ignore[dict-item]
            data = {k: expand_part(k, v, where) for k, v in data.items()}
        return convert(data, Quantizer, where)
    return _field(path.slots[0], path.field, value, base, where)


def _plain_stage() -> dict:
    return {"x": {"element": "none"}, "w": {"element": "none"}}


def _field(slot: str, field: tuple[str, ...], value: object, base: Recipe, where: str) -> object:
    if field[0] not in Quantizer.__struct_fields__:
        raise ConfigError(where, field[0], f"a quantizer field: {_FIELDS}")
    if len(field) > 1:
        raise ConfigError(where, ".".join(field), f"{field[0]} as a whole: a name or a table")
    expanded = expand_part(field[0], value, where)
    data = {} if expanded is None else {field[0]: expanded}
    return getattr(convert(data, Quantizer, where), field[0])


def _write(recipe: Recipe, path: AxisPath, value: object) -> Recipe:
    if path.is_recipe:
        return value  # type: ignore[return-value]
    if path.stages:
        return _replace(recipe, **{st: _replace(getattr(recipe, st), rotation=value) for st in path.stages})
    stages: dict[str, object] = {}
    for slot in path.slots:
        stage, operand = slot.split(".")
        struct = stages.get(stage) or getattr(recipe, stage)
        old = getattr(struct, operand)
        if path.field:
            new = _replace(old, **{path.field[0]: value})
        else:
            new = _replace(old, **value) if isinstance(value, dict) else value
        stages[stage] = _replace(struct, **{operand: new})
    return _replace(recipe, **stages)


def _read(recipe: Recipe, path: AxisPath) -> object:
    """The value at a path: of its first slot or stage (a rule over a group asks for all to be equal)."""
    if path.stages:
        values = [recipe.rotation(st) for st in path.stages]
    else:
        values = [getattr(recipe.slot(s), path.field[0]) if path.field else recipe.slot(s) for s in path.slots]
    return values[0] if all(v == values[0] for v in values) else None


_replace = msgspec.structs.replace

__all__ = ["Count", "Forbid", "Space"]
