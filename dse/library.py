"""Reading and writing recipes: plain dicts, TOML text, and the data files shipped in `dse/recipes/`.

Shorthand that files may use, expanded here and nowhere else:

* a quantizer, scale, tensor scale, rounding, outlier treatment, rotation, relaxation or design may be given by name;
* `{ like = "nvfp4", rounding = "stochastic" }` is a named quantizer with some fields changed;
* a file may name number formats of its own (own_names.py).
"""

from __future__ import annotations

import typing
from functools import cache
from pathlib import Path

import msgspec

from fp4dse.dse.design import DESIGN_NAMES, Design
from fp4dse.dse.errors import ConfigError, at_key
from fp4dse.dse.estimator import RELAXATION_NAMES, SCALE_RELAXATION_NAMES, Relaxation, ScaleRelaxation
from fp4dse.dse.formats import ELEMENTS, PLAIN
from fp4dse.dse.outliers import OUTLIER_NAMES, Outliers
from fp4dse.dse.own_formats import Element, Own
from fp4dse.dse.own_names import as_defined, definitions, expanded, file_names
from fp4dse.dse.precision import Finish
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.reading import read_toml
from fp4dse.dse.recipe import Recipe, serves_recipes
from fp4dse.dse.record import (
    Part,
    accepted,
    defaults,
    field_types,
    name_in,
    options,
    part_types,
    plain,
    required_fields,
    takes,
)
from fp4dse.dse.rounding import ROUNDING_NAMES, Rounding
from fp4dse.dse.rules import faults
from fp4dse.dse.scale import SCALE_NAMES, TENSOR_SCALE_NAMES, Scale, TensorScale
from fp4dse.dse.stages import ROTATION_NAMES, SLOTS, Hadamard
from fp4dse.dse.training import OPTIMIZER_NAMES, SCHEDULE_NAMES, NotNegative, Optimizer, Positive, Schedule

NAMES: dict[typing.Any, dict[str, typing.Any]] = {
    Quantizer: QUANTIZERS,
    Scale: SCALE_NAMES,
    TensorScale | None: TENSOR_SCALE_NAMES,
    Rounding: ROUNDING_NAMES,
    Outliers: OUTLIER_NAMES,
    Hadamard | None: ROTATION_NAMES,
    Relaxation: RELAXATION_NAMES,
    ScaleRelaxation: SCALE_RELAXATION_NAMES,
    Design: DESIGN_NAMES,
    Optimizer: {"task": None, **OPTIMIZER_NAMES},
    Schedule: {"task": None, **SCHEDULE_NAMES},
    Finish | None: {"none": None},
    NotNegative | None: {"task": None},
    Positive | None: {"task": None},
}
"""Type of a field -> what may stand there by name."""


class RecipeFile(msgspec.Struct, frozen=True):
    """A named recipe with where it comes from."""

    name: str
    summary: str
    source: str
    recipe: Recipe


@serves_recipes
@cache
def recipe_files() -> dict[str, RecipeFile]:
    """All shipped recipes by name."""
    folder = Path(__file__).parent / "recipes"
    return {path.stem: read_recipe_file(path) for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def load_recipe(source: str, folder: Path = Path(), where: str = "recipe") -> Recipe:
    """A recipe by name, or from a `.toml` file (relative to `folder`). ConfigError at `where` if there is none."""
    if source.endswith(".toml"):
        return read_recipe_file(folder / source).recipe
    if source not in recipe_files():
        raise ConfigError(where, source, f"{', '.join(recipe_files())}, or a .toml file")
    return recipe_files()[source].recipe


def read_recipe_file(path: Path) -> RecipeFile:
    """A recipe from a TOML file with `summary`, `source` and the three stages. ConfigError on wrong content."""
    data, where = read_toml(path), str(path)
    texts = {key: read(data.pop(key, ""), str, where, key) for key in ("summary", "source")}
    return RecipeFile(name=path.stem, recipe=recipe_from_dict(data, where), **texts)


def recipe_from_dict(data: object, where: str = "recipe") -> Recipe:
    """A recipe from plain dicts with shorthand; ConfigError if something is wrong with it or a rule forbids it."""
    recipe: Recipe = read(expanded(data, where) if isinstance(data, dict) else data, Recipe, where)
    for _, error in faults(recipe):
        raise ConfigError(at_key(where, error.where), error.found, error.accepted)
    return recipe


def recipe_to_dict(recipe: Recipe) -> dict[str, object]:
    """Plain dicts, defaults left out; `recipe_from_dict` reads them back."""
    return plain(recipe)


def recipe_to_toml(recipe: Recipe) -> str:
    """TOML text that reads back to the same recipe, with parts by name where they have one."""
    own = file_names(recipe.slot(slot) for slot in SLOTS)
    parts = {name: getattr(recipe, name) for name in Recipe.__struct_fields__}
    plain_fields = _toml_fields(recipe, own)
    lines = [f"{name} = {plain_fields[name]}" for name in plain_fields if not isinstance(parts[name], Part)]
    tables = ["\n".join(lines)] if lines else []
    for name, part in parts.items():
        if isinstance(part, Part) and (fields := _toml_fields(part, own)):
            tables.append("\n".join([f"[{name}]", *(f"{key} = {text}" for key, text in fields.items())]))
    for name, values in definitions(own).items():
        tables.append("\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in values.items())]))
    return "\n\n".join(tables) + "\n"


OwnNames = dict[Own, str]


def _toml_fields(part: Part, own: OwnNames) -> dict[str, str]:
    """Field -> TOML of its value, defaults left out."""
    types = field_types(type(part))
    return {
        name: _toml_value(getattr(part, name), types[name], own)
        for name, default in defaults(type(part)).items()
        if getattr(part, name) != default
    }


def _toml_value(value: object, type_: typing.Any, own: OwnNames) -> str:
    name = name_in(NAMES.get(type_, {}), value)
    if isinstance(value, Own):
        name = own.get(value)
    if name is None and isinstance(value, Part):
        config = value.__struct_config__
        kind, fields = config.tag, _toml_fields(value, own)
        if isinstance(value, Own):
            kind, defined = own[as_defined(value)], _toml_fields(as_defined(value), own)
            fields = {key: text for key, text in fields.items() if key not in defined}
        fields = ({config.tag_field: f'"{kind}"'} if config.tag_field else {}) | fields
        return "{ " + ", ".join(f"{key} = {text}" for key, text in fields.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    text = name or value
    return f'"{text}"' if isinstance(text, str) else repr(text)


def read(value: object, type_: typing.Any, where: str, *keys: str) -> typing.Any:
    """Plain data as what a field of `type_` holds. ConfigError names `where` (the file) and the path of `keys`."""
    if isinstance(value, str) and value in NAMES.get(type_, {}):
        return NAMES[type_][value]
    if isinstance(value, dict) and (parts := part_types(type_)):
        return _read_part(value, parts, where, *keys)
    if isinstance(value, list) and tuple in takes(type_).classes:
        value = tuple(value)
    if not takes(type_).fits(value):
        raise ConfigError(at_key(where, *keys), value, _in_words(type_))
    return value


def _read_part(data: dict[str, typing.Any], parts: list[type[Part]], where: str, *keys: str) -> Part:
    """The table as one of `parts`, which its tag picks where there are several."""
    data, cls = dict(data), parts[0]
    if tag_field := cls.__struct_config__.tag_field:
        tags = {str(part.__struct_config__.tag): part for part in parts}
        tag = data.pop(tag_field, None)
        if not isinstance(tag, str) or tag not in tags:
            raise ConfigError(at_key(where, *keys, tag_field), tag, ", ".join(tags))
        cls = tags[tag]
    if cls is Quantizer and "like" in data:
        base: Quantizer = read(data.pop("like"), Quantizer, where, *keys, "like")
        return msgspec.structs.replace(base, **read_fields(data, cls, where, *keys))
    fields = read_fields(data, cls, where, *keys)
    for name in required_fields(cls):
        if name not in fields:
            raise ConfigError(at_key(where, *keys, name), None, _in_words(field_types(cls)[name]))
    try:
        return cls(**fields)
    except ConfigError as error:  # of a record whose fields have to fit each other
        raise ConfigError(at_key(where, *keys, error.where), error.found, error.accepted) from None


def read_fields(data: dict[str, typing.Any], cls: type[Part], where: str, *keys: str) -> dict[str, typing.Any]:
    """Some fields of a record, each read as its type; ConfigError on a field that `cls` does not have."""
    known = field_types(cls)
    for key in data:
        if key not in known:
            raise ConfigError(at_key(where, *keys, key), key, ", ".join(known) or "no fields")
    return {key: read(value, known[key], where, *keys, key) for key, value in data.items()}


def _in_words(type_: typing.Any) -> str:
    own = {Element: "elements", Scale: "scales"}.get(type_)
    words = [f"or a name that the file defines in [{own}.NAME]"] if own else []
    if type_ is Element:
        return ", ".join([*ELEMENTS, *PLAIN, *words])
    if type_ not in NAMES:
        return accepted(type_)
    others = [option for option in options(type_) if option is not type(None)]
    return ", ".join([*NAMES[type_], *words, "or a table" if part_types(type_) else accepted(others[0])])
