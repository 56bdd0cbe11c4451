"""Reading and writing recipes: plain dicts, TOML text, and the data files shipped in `dse/recipes/`.

A file may use the shorthand of shorthand.py, name number formats of its own (own_names.py), and say what its layers
change by paths (paths.py): `[[layers]] kind = "attention", "*" = "mxfp8"`.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from fp4dse.dse.errors import ConfigError, at_key
from fp4dse.dse.layers.exceptions import value_of
from fp4dse.dse.layers.rule import CHANGES, QUANTIZERS, WHERE, LayerRule
from fp4dse.dse.own_formats import Own
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.reading.files import read_toml
from fp4dse.dse.reading.own_names import as_defined, definitions, expanded, file_names
from fp4dse.dse.reading.paths import Fields, RecipePath, missing, parse_path, read_field, value_text, write
from fp4dse.dse.reading.shorthand import NAMES, read, read_fields
from fp4dse.dse.recipe import Recipe, serves_recipes
from fp4dse.dse.record import Part, defaults, field_types, name_in, part_types, plain
from fp4dse.dse.rules import faults


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
    folder = Path(__file__).parents[1] / "recipes"
    return {path.stem: read_recipe_file(path) for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def load_recipe(source: str, folder: Path = Path(), where: str = "recipe") -> Recipe:
    """A recipe by name, or from a `.toml` file (relative to `folder`). ConfigError at `where` if there is none."""
    if source.endswith(".toml"):
        written = read_toml(folder / source).keys()
        if written & {"base", "axes", "join"} and written.isdisjoint(field_types(Recipe)):
            raise ConfigError(
                where, source, "the file of a recipe, with [fprop], [dgrad] and [wgrad]; this is a space's"
            )
        return read_recipe_file(folder / source).recipe
    if source not in recipe_files():
        raise ConfigError(where, source, f"{', '.join(recipe_files())}, or a .toml file")
    return recipe_files()[source].recipe


def read_recipe_file(path: Path) -> RecipeFile:
    """A recipe from a TOML file with `summary`, `source` and the three stages. ConfigError on wrong content."""
    data, where = read_toml(path), str(path)
    texts = {key: read(data.pop(key, ""), str, where, key) for key in ("summary", "source")}
    recipe = recipe_from_dict(data, where)
    check_starts(data, where)
    return RecipeFile(name=path.stem, recipe=recipe, **texts)


def check_starts(data: Mapping[str, typing.Any], where: str, *keys: str) -> None:
    """ConfigError for a quantizer in a person's file, of an operand, the attention core, a rollout or channels, whose
    table does not say what it starts from. The defaults of Quantizer, which stores leave out, are nobody's guess:
    blocks of 16 with E4M3 scales and no tensor scale."""
    for path, table in _quantizer_tables(data, Recipe):
        if table.keys().isdisjoint(("like", "element", "scale", "block")):
            accepted = '`like` with the quantizer that it changes, as { like = "mxfp4", rounding = "stochastic" }'
            more = "or element, scale and block of its own"
            raise ConfigError(at_key(where, *keys, *path), f"{{ {', '.join(table)} }}", f"{accepted}, {more}")


def _quantizer_tables(
    data: Mapping[str, typing.Any], cls: type[Part]
) -> Iterator[tuple[tuple[str, ...], dict[str, typing.Any]]]:
    """(keys, table) of the quantizers in a table of such a part."""
    for name, type_ in field_types(cls).items():
        if isinstance(table := data.get(name), dict):
            for part in part_types(type_):
                found = [((), table)] if part is Quantizer else _quantizer_tables(table, part)
                yield from (((name, *path), of) for path, of in found)


def recipe_from_dict(data: object, where: str = "recipe", *keys: str) -> Recipe:
    """A recipe from plain dicts with shorthand; ConfigError if something is wrong with it or a rule forbids it, which
    names `where` and `keys`."""
    data = expanded(data, where) if isinstance(data, dict) else data
    rules = data.pop("layers", []) if isinstance(data, dict) else []
    recipe: Recipe = read(data, Recipe, where, *keys)
    if rules:
        recipe = msgspec.structs.replace(recipe, layers=_read_rules(rules, recipe, where, *keys, "layers"))
    for _, error in faults(recipe):
        raise ConfigError(at_key(where, *keys, error.where), error.found, error.accepted)
    return recipe


def read_value(path: RecipePath, value: object, folder: Path, where: str, *keys: str) -> typing.Any:
    """The value that `paths.write` and `paths.holds` take for this path: as `paths.read_field` gives it, a Recipe for
    `recipe`, for `layers` rules. ConfigError names `where` and `keys`."""
    if path.type is Recipe:
        if isinstance(value, Recipe):
            return value
        if not isinstance(value, str):
            raise ConfigError(at_key(where, *keys), value, "the name of a recipe or a .toml file")
        return load_recipe(value, folder, at_key(where, *keys))
    if path.type == _RULES:
        return value if isinstance(value, tuple) else _read_rules(value, None, where, *keys)
    return read_field(path, value, where, *keys)


def read_places(data: Mapping[str, typing.Any], folder: Path, where: str, *keys: str) -> dict[str, typing.Any]:
    """path -> value, as `read_value` gives it."""
    return {
        text: read_value(parse_path(text, where, *keys, text), value, folder, where, *keys, text)
        for text, value in data.items()
    }


_RULES = field_types(Recipe)["layers"]


def _read_rules(data: object, base: Recipe | None, where: str, *keys: str) -> tuple[LayerRule, ...]:
    """Rules from a list of tables. base: what they are exceptions to; without one they name whole quantizers."""
    *above, key = keys or ("layers",)
    if not isinstance(data, list | tuple) or not all(isinstance(rule, dict) for rule in data):
        raise ConfigError(at_key(where, *above, key), data, "tables [[layers]] that say where and what")
    return tuple(_read_rule(rule, base, where, *above, f"{key}[{number}]") for number, rule in enumerate(data))


def _read_rule(data: dict[str, typing.Any], base: Recipe | None, where: str, *keys: str) -> LayerRule:
    """A rule from a table: conditions, fields by path, and `recipe` for all quantizers of a named one."""
    own = {key: value for key, value in data.items() if key in field_types(LayerRule)}
    if isinstance(own.get("kind"), str):
        own["kind"] = [own["kind"]]
    fields = read_fields(own, LayerRule, where, *keys)
    recipe, changed = base or Recipe.named("bf16"), dict.fromkeys(name for name in CHANGES if name in fields)
    for text, value in data.items():
        if text in own:
            continue
        path = parse_path(text, where, *keys, text)
        if path.type is Recipe:
            recipe = load_recipe(value, where=at_key(where, *keys, text))
            changed |= dict.fromkeys(CHANGES)
            continue
        written = {"_".join(chain[:2]): chain for chain in path.chains}
        if not written.keys() <= set(CHANGES):
            what = "a quantizer, rotation, source, estimator or channels"
            accepted = f"{', '.join(WHERE)}, recipe, or the path of {what}"
            raise ConfigError(at_key(where, *keys, text), text, accepted)
        found = read_field(path, value, where, *keys, text)
        if base is None and (isinstance(found, Fields) or any(len(chain) > 2 for chain in written.values())):
            accepted = "a whole quantizer: in a space the recipe that it would change differs"
            raise ConfigError(at_key(where, *keys, text), value_text(value), accepted)
        if (absent := missing(text, path, [((), recipe)])) is not None:
            raise ConfigError(at_key(where, *keys, text), value, absent)
        recipe = write(recipe, path, found)
        changed |= dict.fromkeys(written)
    for name in changed:
        fields.setdefault(name, value_of(recipe, name))
    try:
        return LayerRule(**fields)
    except ConfigError as error:
        field = error.where.removeprefix(f"{LayerRule.__name__}.")
        raise ConfigError(at_key(where, *keys, field), error.found, error.accepted) from None


def recipe_to_dict(recipe: Recipe) -> dict[str, object]:
    """Plain dicts, defaults left out; `recipe_from_dict` reads them back."""
    return plain(recipe)


def recipe_to_toml(recipe: Recipe) -> str:
    """TOML text that reads back to the same recipe, with parts by name where they have one."""
    own = file_names(_quantizers(recipe))
    parts = {name: getattr(recipe, name) for name in Recipe.__struct_fields__}
    plain_fields = _toml_fields(recipe, own)
    lines = [f"{name} = {plain_fields[name]}" for name in plain_fields if not isinstance(parts[name], Part | tuple)]
    tables = ["\n".join(lines)] if lines else []
    for name, part in parts.items():
        if name == "layers":
            tables += [_toml_rule(rule, own) for rule in recipe.layers]
        elif isinstance(part, Part) and (fields := _toml_fields(part, own)):
            tables.append("\n".join([f"[{name}]", *(f"{key} = {text}" for key, text in fields.items())]))
    for name, values in definitions(own).items():
        tables.append("\n".join([f"[{name}]", *(f"{key} = {value}" for key, value in values.items())]))
    return "\n\n".join(tables) + "\n"


def _quantizers(value: object) -> Iterator[Quantizer]:
    """Every quantizer in a recipe or in a part of one, in the order of the fields."""
    if isinstance(value, Quantizer):
        yield value
    elif isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from _quantizers(getattr(value, name))
    elif isinstance(value, tuple):
        for part in value:
            yield from _quantizers(part)


OwnNames = dict[Own, str]


def _toml_rule(rule: LayerRule, own: OwnNames) -> str:
    """A rule as a table of the list `layers`."""
    wheres = {name: getattr(rule, name) for name in WHERE if getattr(rule, name) != defaults(LayerRule)[name]}
    lines = [f"{name} = {list(of) if name == 'kind' else _toml_value(of, str, own)}" for name, of in wheres.items()]
    types = {part: field_types(field_types(Recipe)[part]) for part in {name.partition("_")[0] for name in rule.changes}}
    quantizers = {getattr(rule, name) for name in QUANTIZERS}
    is_same = len(quantizers) == 1 and None not in quantizers
    changes = [name for name in rule.changes if not is_same or name not in QUANTIZERS]
    if is_same:
        lines.append(f'"*" = {_toml_whole(rule.fprop_x, Quantizer, own)}')
    for name in changes:
        part, _, field = name.partition("_")
        lines.append(f'"{part}.{field}" = {_toml_whole(getattr(rule, name), types[part][field], own)}')
    return "\n".join(["[[layers]]", *lines]).replace("'", '"')


def _toml_whole(value: object, type_: typing.Any, own: OwnNames) -> str:
    """The value of a rule: a table of a quantizer says what it starts from, or it would change the recipe's own."""
    text = _toml_value(value, type_, own)
    if not isinstance(value, Quantizer) or not text.startswith("{") or text.startswith("{ like"):
        return text
    return f'{{ like = "{name_in(NAMES[Quantizer], Quantizer())}", {text[2:]}'


def _toml_fields(part: Part, own: OwnNames) -> dict[str, str]:
    """Field -> TOML of its value, defaults left out."""
    types = field_types(type(part))
    return {
        name: _toml_value(getattr(part, name), types[name], own)
        for name, default in defaults(type(part)).items()
        if getattr(part, name) != default
    }


def _toml_changes(q: Quantizer, own: OwnNames) -> dict[str, str]:
    """A quantizer as changes of the nearest named one, of the same format if there is one; one with a format of its own
    says all of itself."""
    types = field_types(Quantizer)
    if isinstance(q.element, Own) or isinstance(q.scale, Own):
        whole = {name: _toml_value(getattr(q, name), types[name], own) for name in ("element", "block", "scale")}
        return whole | _toml_fields(q, own)

    def changes(named: Quantizer) -> list[str]:
        return [name for name in types if getattr(q, name) != getattr(named, name)]

    def distance(name: str) -> tuple[int, int]:
        changed = changes(NAMES[Quantizer][name])
        return len({"element", "block", "scale"}.intersection(changed)), len(changed)

    like = min(NAMES[Quantizer], key=distance)
    texts = {name: _toml_value(getattr(q, name), types[name], own) for name in changes(NAMES[Quantizer][like])}
    return {"like": f'"{like}"'} | texts


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
        elif isinstance(value, Quantizer):
            fields = _toml_changes(value, own)
        fields = ({config.tag_field: f'"{kind}"'} if config.tag_field else {}) | fields
        return "{ " + ", ".join(f"{key} = {text}" for key, text in fields.items()) + " }"
    if isinstance(value, bool):
        return str(value).lower()
    text = name or value
    return f'"{text}"' if isinstance(text, str) else repr(text)
