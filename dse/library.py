"""Reading recipes: from dicts, TOML text and the data files shipped in `dse/recipes/`.

Shorthand that files may use, expanded here and nowhere else:

* a quantizer, scale, tensor scale, rounding or rotation may be given by name;
* `{ like = "nvfp4", rounding = "stochastic" }` is a named quantizer with some fields changed.
"""

from __future__ import annotations

import re
import tomllib
import types
import typing
from functools import cache
from pathlib import Path

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.quantizer import QUANTIZERS, ROUNDING_NAMES, SCALE_NAMES, TENSOR_SCALE_NAMES
from fp4dse.dse.recipe import ROTATION_NAMES, STAGES, Recipe

PART_NAMES: dict[str, dict] = {
    "scale": SCALE_NAMES,
    "tensor_scale": TENSOR_SCALE_NAMES,
    "rounding": ROUNDING_NAMES,
    "rotation": ROTATION_NAMES,
    **{operand: QUANTIZERS for operand in ("x", "w", "g")},
}
"""Field name -> what may stand there by name."""


class RecipeFile(msgspec.Struct, frozen=True):
    """A named recipe with where it comes from."""

    name: str
    summary: str
    source: str
    recipe: Recipe


@cache
def recipe_files() -> dict[str, RecipeFile]:
    """All shipped recipes by name."""
    folder = Path(__file__).parent / "recipes"
    return {path.stem: read_recipe_file(path) for path in sorted(folder.glob("*.toml"))}


def read_recipe_file(path: Path) -> RecipeFile:
    """A recipe from a TOML file with `summary`, `source` and the three stages. ConfigError on wrong content."""
    data = read_toml(path)
    texts = {key: data.pop(key, "") for key in ("summary", "source")}
    return RecipeFile(name=path.stem, recipe=recipe_from_dict(data, path.name), **texts)


def read_toml(path: Path) -> dict:
    """The file as a dict; ConfigError if it is missing or not TOML."""
    try:
        return tomllib.loads(Path(path).read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(path), f"not TOML: {error}", "a TOML file (see `fp4dse recipe show nvfp4`)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), type(error).__name__, "a readable TOML file") from None


def load_recipe(text: str) -> Recipe:
    """A recipe by name, or from a `.toml` file."""
    return read_recipe_file(Path(text)).recipe if text.endswith(".toml") else Recipe.named(text)


def recipe_from_dict(data: dict, where: str = "recipe") -> Recipe:
    """A recipe from plain dicts with shorthand. ConfigError names file, key, found and accepted."""
    if not isinstance(data, dict):
        raise ConfigError(where, data, "a table with fprop, dgrad and wgrad")
    return convert(_expand(data, where), Recipe, where)


def recipe_to_dict(recipe: Recipe) -> dict:
    """Plain dicts, defaults left out; `recipe_from_dict` reads them back."""
    return msgspec.to_builtins(recipe)


def recipe_to_toml(recipe: Recipe) -> str:
    """TOML text that `recipe_from_dict(tomllib.loads(text))` reads back to the same recipe."""
    lines: list[str] = []
    for stage, table in recipe_to_dict(recipe).items():
        lines.append(f"[{stage}]")
        lines += [f"{key} = {_toml_value(value)}" for key, value in table.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_toml_value(v)}" for k, v in value.items()) + " }" if value else "{}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def expand_part(field: str, value: object, where: str) -> object:
    """A part given by name, as its record's dict (None for the absent one); anything else unchanged."""
    names = PART_NAMES.get(field)
    if names is None or not isinstance(value, str):
        return value
    if value not in names:
        raise ConfigError(where, value, ", ".join(names) + ", or a table")
    return msgspec.to_builtins(names[value])


def _expand(data: dict, where: str) -> dict:
    out = {}
    for key, value in data.items():
        here = f"{where}: {key}" if ":" not in where else f"{where}.{key}"
        value = expand_part(key, value, here)
        if isinstance(value, dict):
            value = _expand(value, here)
            if "like" in value:
                like = value.pop("like")
                value = {**expand_part("x", like, f"{here}.like"), **value}  # type: ignore[dict-item]
        if value is None and key in ("tensor_scale", "rotation"):
            continue
        out[key] = value
    return out


def convert(data: object, type_: type, where: str):
    """msgspec.convert with an error that says what would be accepted at the failing key."""
    try:
        return msgspec.convert(data, type_)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        keys = [k for k in re.split(r"[.\[\]`]", path) if k and k != "..."]
        unknown = re.match(r"Object contains unknown field `(.*)`", text)
        missing = re.match(r"Object missing required field `(.*)`", text)
        found, expected = data, type_
        for key in keys:
            found = found.get(key, found) if isinstance(found, dict) else found
            expected = _field_type(expected, key, found)
        spot = ".".join(keys)
        if unknown:
            spot, found = f"{spot}.{unknown[1]}".strip("."), unknown[1]
        if missing:
            found = f"no {missing[1]}"
        place = f"{where}.{spot}" if ":" in where else f"{where}: {spot}".rstrip(": ")
        raise ConfigError(place, found, accepted(expected)) from None


def _field_type(type_: object, key: str, found: object):
    for option in _options(type_):
        if isinstance(option, type) and issubclass(option, msgspec.Struct):
            hints = typing.get_type_hints(option, include_extras=False)
            if key in hints:
                return hints[key]
            if key == option.__struct_config__.tag_field:
                tags = [o.__struct_config__.tag for o in _options(type_) if o is not type(None)]
                return typing.Literal[tuple(tags)]
    return type_


def _options(type_: object) -> tuple:
    return (
        typing.get_args(type_)
        if isinstance(type_, types.UnionType) or typing.get_origin(type_) is typing.Union
        else (type_,)
    )


def accepted(type_: object) -> str:
    """What a field of this type takes, in words."""
    words = []
    for option in _options(type_):
        if typing.get_origin(option) is typing.Literal:
            words += [str(v) for v in typing.get_args(option)]
        elif option is type(None):
            words.append('"none"')
        elif isinstance(option, type) and issubclass(option, msgspec.Struct):
            config = option.__struct_config__
            fields = [*option.__struct_fields__]
            if config.tag_field:
                fields.insert(0, f'{config.tag_field} = "{config.tag}"')
            words.append("a table with " + (", ".join(fields) or "no fields"))
        else:
            words.append({float: "a number", int: "a whole number", str: "a text"}.get(option, str(option)))  # type: ignore[call-overload]
    return " | ".join(words)


assert set(STAGES) == set(Recipe.__struct_fields__)
