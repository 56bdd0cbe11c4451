"""A path names places in a recipe, so that spaces and rules can speak of them in TOML.

    recipe                   the whole recipe
    *, fprop, backward.g     operand slots: stage, then operand
    *.g.rounding             a field of the quantizers there; `backward.rounding` is short for `backward.*.rounding`
    wgrad.rotation           the rotation of a GEMM
    backward.source          what the operands that the forward pass quantizes too are made from
    estimator.w.element      a field of how gradients pass through a forward operand; `estimator`, `estimator.w`

Stages: fprop (= forward), dgrad, wgrad, backward (= dgrad, wgrad), *. Operands: x, w, g, *.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.estimator import Through
from fp4dse.dse.library import load_recipe, place, read, read_fields
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import SHARED, STAGES, Hadamard, Recipe, Source
from fp4dse.dse.record import field_types

STAGE_GROUPS: dict[str, tuple[str, ...]] = {
    **{stage: (stage,) for stage in STAGES},
    "forward": ("fprop",),
    "backward": tuple(SHARED),
    "*": tuple(STAGES),
    "estimator": ("estimator",),
}
OPERANDS = {**STAGES, "estimator": STAGES["fprop"]}
WHOLE: dict[str, Any] = {"rotation": Hadamard | None, "source": Source}
"""Attributes of a stage that are set as a whole."""


class RecipePath(msgspec.Struct, frozen=True):
    """The places (stage, attribute) that a path names, none for the whole recipe, and the field, of their `record`."""

    places: tuple[tuple[str, str], ...]
    field: str = ""

    @property
    def record(self) -> type[Quantizer] | type[Through]:
        return Through if self.places[0][0] == "estimator" else Quantizer


def parse_path(text: str, where: str, *keys: str) -> RecipePath:
    """The path written as `text`; ConfigError on anything that is none."""
    if text == "recipe":
        return RecipePath(())
    stage, *rest = text.split(".")
    where = place(where, *keys)
    if stage not in STAGE_GROUPS:
        raise ConfigError(where, text, f"recipe, or a path that starts with one of {', '.join(STAGE_GROUPS)}")
    fields = (Through if stage == "estimator" else Quantizer).__struct_fields__
    if not rest or rest[0] in fields:
        rest = ["*", *rest]
    operand, *names = rest
    if operand in WHOLE and stage != "estimator":
        stages = STAGE_GROUPS[stage] if operand == "rotation" else tuple(s for s in STAGE_GROUPS[stage] if s in SHARED)
        if names or not stages:
            accepted = f"{stage}.rotation" if not stages else f"{stage}.{operand}, set as a whole: a name or a table"
            raise ConfigError(where, text, accepted)
        return RecipePath(tuple((s, operand) for s in stages))
    places = tuple((s, o) for s in STAGE_GROUPS[stage] for o in OPERANDS[s] if operand in ("*", o))
    if not places:
        operands = dict.fromkeys(o for s in STAGE_GROUPS[stage] for o in OPERANDS[s])
        whole = () if stage == "estimator" else ("rotation",)
        raise ConfigError(
            where, text, f"{stage}, then {', '.join([*operands, '*', *whole])} or one of {', '.join(fields)}"
        )
    if len(names) > 1 or not set(names) <= set(fields):
        raise ConfigError(where, text, f"at most one field, of {', '.join(fields)}")
    return RecipePath(places, *names)


def read_value(path: RecipePath, value: object, folder: Path, where: str, *keys: str) -> Any:
    """What `write` and `holds` take for this path: a Recipe, a whole attribute, a record, some of its fields, or one.

    A table without `like` stands for the fields that it names; what has been read already stays as it is.
    """
    if not path.places:
        if isinstance(value, Recipe):
            return value
        if not isinstance(value, str):
            raise ConfigError(place(where, *keys), value, "the name of a recipe or a .toml file")
        return load_recipe(value, folder, place(where, *keys))
    if path.places[0][1] in WHOLE:
        return read(value, WHOLE[path.places[0][1]], where, *keys)
    if path.field:
        return read(value, field_types(path.record)[path.field], where, *keys)
    if isinstance(value, dict) and "like" not in value:
        return read_fields(value, path.record, where, *keys)
    return read(value, path.record, where, *keys)


def write(recipe: Recipe, path: RecipePath, value: Any) -> Recipe:
    """The recipe with `value` at the path."""
    if not path.places:
        return value
    fields = _fields(path, value)
    changes: dict[str, dict[str, Any]] = {}
    for stage, attribute in path.places:
        new = value
        if fields is not None:
            new = _changed(getattr(getattr(recipe, stage), attribute), tuple(fields.items()))
        changes.setdefault(stage, {})[attribute] = new
    return _replace(recipe, **{stage: _replace(getattr(recipe, stage), **new) for stage, new in changes.items()})


@lru_cache(maxsize=4096)
def _changed(q: Any, fields: tuple[tuple[str, Any], ...]) -> Any:
    """Cached, since a product of many recipes is made of few quantizers."""
    return _replace(q, **dict(fields))


def holds(recipe: Recipe, path: RecipePath, value: Any) -> bool:
    """Whether every place of the path has this value in a canonical recipe."""
    if not path.places:
        return recipe == value.canonical()
    found = [getattr(getattr(recipe, stage), attribute) for stage, attribute in path.places]
    fields = _fields(path, value)
    if fields is not None:
        return all(_has(q, field, want) for q in found for field, want in fields.items())
    want = value.canonical() if isinstance(value, Quantizer) else value
    return all(have == want for have in found)


def _fields(path: RecipePath, value: Any) -> dict[str, Any] | None:
    """The quantizer fields that a value sets, None where it stands for the whole."""
    return {path.field: value} if path.field else value if isinstance(value, dict) else None


def _has(q: Quantizer | Through, field: str, want: object) -> bool:
    if isinstance(q, Through):
        return getattr(q, field) == want
    if q.is_plain and field != "element":
        return False  # there is no block, scale or rounding that could have a value
    if field == "tensor_scale":  # "amax" stands for the scale format's own target
        want = _replace(q, tensor_scale=want).canonical().tensor_scale
    return getattr(q, field) == want


_replace: Any = msgspec.structs.replace
