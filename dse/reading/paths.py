"""A path names fields of a recipe, so that spaces and rules can speak of them in TOML.

    recipe                   the whole recipe
    *, fprop, backward.g     operand slots: stage, then operand
    *.g.rounding             a field of the quantizers there; `backward.rounding` is short for `backward.*.rounding`
    wgrad.rotation           the rotation of a GEMM
    backward.source          what the operands that the forward pass quantizes too are made from
    estimator.w.element      a field of how gradients pass through a forward operand; `estimator`, `estimator.w`
    *.scale.zero             a field of a part, where the part has it; `*.scale.format` is the part's kind, for rules

A path is a walk over the fields of the records that make up a recipe, so every field of every record has one. Beside
fields there are two kinds of names: groups of stages, forward (= fprop), backward (= dgrad, wgrad), *; and * for all
operands of a stage, which may be left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, lru_cache
from typing import Any

import msgspec

from fp4dse.dse.errors import ConfigError, at_key
from fp4dse.dse.estimator import Through
from fp4dse.dse.formats import PLAIN
from fp4dse.dse.layers.rule import LayerRule
from fp4dse.dse.own_formats import FloatElement, TableElement, element_name, simplest
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.reading.shorthand import NAMES, read, read_fields
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.record import Part, field_types, name_in, part_types, plain, unlabelled
from fp4dse.dse.scale import OwnScale, TensorScale, scale_name, simplest_scale
from fp4dse.dse.stages import SHARED, STAGES

GROUPS: dict[str, tuple[str, ...]] = {"forward": ("fprop",), "backward": tuple(SHARED), "*": tuple(STAGES)}
"""Names for several stages."""
OPERANDS = (Quantizer, Through)
"""A record with fields of these types has operands."""

Chain = tuple[str, ...]
"""Field names that lead from one record to a field in it."""


class Kind(msgspec.Struct, frozen=True):
    """Stands for a type where a path ends at the tag of one of several records: `*.scale.format`."""

    tags: tuple[str, ...]


class Tree(msgspec.Struct, frozen=True, cache_hash=True):
    """Fields of a record, with the fields in them. No branches: the record itself."""

    branches: tuple[tuple[str, Tree], ...] = ()


class Fields(msgspec.Struct, frozen=True, cache_hash=True):
    """Some fields of a record with their values; the others stay."""

    values: tuple[tuple[str, Any], ...]


class RecipePath(msgspec.Struct, frozen=True):
    """The fields that a path names, and the type of what is there."""

    tree: Tree
    type: Any

    @property
    def chains(self) -> list[Chain]:
        """The way from the recipe to each of the fields."""
        return tree_chains(self.tree)


def tree_chains(tree: Tree) -> list[Chain]:
    """The way to each field of a tree; () is the record itself."""
    if not tree.branches:
        return [()]
    return [(name, *chain) for name, below in tree.branches for chain in tree_chains(below)]


def parse_path(text: str, where: str, *keys: str) -> RecipePath:
    """The path written as `text`; ConfigError on anything that is none."""
    if text == "recipe":
        return RecipePath(Tree(), Recipe)
    found: dict[Chain, Any] = {(): Recipe}
    for name in text.split("."):
        known = {chain: _names(type_) for chain, type_ in found.items()}
        found = {chain + more: type_ for chain, names in known.items() for more, type_ in names.get(name, {}).items()}
        if not found:
            names = dict.fromkeys(name for names in known.values() for name in names)
            accepted = ", ".join(names) or "no more: it has no fields"
            if () in known:
                accepted = f"recipe, or a path that starts with one of {accepted}"
            elif known:
                accepted = f"{text.rsplit('.' + name, 1)[0]}, then one of {accepted}" if names else accepted
            raise ConfigError(at_key(where, *keys), text, accepted)
    ends = {chain + more: end for chain, type_ in found.items() for more, end in _ends(type_).items()}
    return RecipePath(_tree(list(ends)), next(iter(ends.values())))


@cache
def _names(type_: Any) -> dict[str, dict[Chain, Any]]:
    """The names that may follow in a path after `type_`: name -> the fields that it leads to."""
    if isinstance(type_, Kind):
        return {}
    names: dict[str, dict[Chain, Any]] = {}
    for part in part_types(type_):
        for name, field in field_types(part).items():
            known = names.setdefault(name, {}).get((name,))
            names[name][name,] = field if known in (None, field) else known | field
    if type_ is Recipe:
        fields = field_types(Recipe)
        return names | {group: {(stage,): fields[stage] for stage in stages} for group, stages in GROUPS.items()}
    if operands := _operands(type_):
        names["*"] = {(operand,): record for operand, record in operands.items()}
        for operand, record in operands.items():
            for name in field_types(record):
                names.setdefault(name, {})[operand, name] = field_types(record)[name]
    if kinds := [part for part in part_types(type_) if part.__struct_config__.tag_field]:
        config = kinds[0].__struct_config__
        names[str(config.tag_field)] = {
            (str(config.tag_field),): Kind(tuple(str(kind.__struct_config__.tag) for kind in kinds))
        }
    return names


def _ends(type_: Any) -> dict[Chain, Any]:
    """The ends of a path that leads to `type_`: its operands, if it has some."""
    return {(operand,): record for operand, record in _operands(type_).items()} or {(): type_}


def _operands(type_: Any) -> dict[str, type[Part]]:
    if type_ is Recipe or not (isinstance(type_, type) and issubclass(type_, Part)):
        return {}
    return {name: field for name, field in field_types(type_).items() if field in OPERANDS}


def _tree(chains: list[Chain]) -> Tree:
    heads = dict.fromkeys(chain[0] for chain in chains if chain)
    return Tree(tuple((head, _tree([chain[1:] for chain in chains if chain[0] == head])) for head in heads))


def read_field(path: RecipePath, value: object, where: str, *keys: str) -> Any:
    """The value that `write` and `holds` take for this path, which is none to a whole recipe: a record, some of its
    Fields, or the value of a field.

    A table without `like` stands for the fields that it names, unless it has to say which of several records it is.
    What has been read already stays as it is. ConfigError names `where` and `keys`.
    """
    if isinstance(value, Fields):
        return value
    if isinstance(path.type, Kind):
        if value not in path.type.tags:
            raise ConfigError(at_key(where, *keys), value, ", ".join(path.type.tags))
        return value
    if isinstance(value, dict) and isinstance(path.type, type) and "like" not in value:
        return Fields(tuple(read_fields(value, path.type, where, *keys).items()))
    return read(value, path.type, where, *keys)


def write(recipe: Recipe, path: RecipePath, value: Any) -> Recipe:
    """The recipe with `value` at the path. Where a part has no such field, it stays as it is (see `missing`)."""
    if isinstance(value, Recipe):
        return value
    stages = {name: _written(getattr(recipe, name), below, value) for name, below in path.tree.branches}
    return _replace(recipe, **stages)


@lru_cache(maxsize=65536, typed=True)  # 0 is not False
def _written(old: Any, tree: Tree, value: Any) -> Any:
    """Cached, since a product of many recipes is made of few parts."""
    if not tree.branches:
        return _replace(old, **dict(value.values)) if isinstance(value, Fields) else value
    new = {name: _written(getattr(old, name), below, value) for name, below in tree.branches if hasattr(old, name)}
    return _replace(old, **new) if new else old


def missing(text: str, path: RecipePath, parts: Iterable[tuple[Chain, Any]]) -> str | None:
    """None if one of the fields that a path names is in one of the parts, so that `write` may set it; else what would
    be accepted. text: of the path; parts: where in a recipe a value stands, () for a recipe itself, and the value."""
    found = [
        (len(at) + _depth(value, chain[len(at) :]), chain)
        for at, value in parts
        for chain in path.chains
        if chain[: len(at)] == at
    ]
    depth, chain = max(found, key=lambda one: one[0] - len(one[1]))
    if depth == len(chain):
        return None
    owner = text.rsplit(".", len(chain) - depth)[0]
    if isinstance(path.type, Kind) and depth == len(chain) - 1:
        return f"{owner}, set as a whole"
    known = NAMES.get(parse_path(owner, text).type, {}).items()
    names = [name for name, part in known if name not in PLAIN and _depth(part, (chain[depth],))]
    example = f', as {owner} = "{names[0]}"' if names else ""
    return (
        f"a field of a part that is there: nothing has {owner} with {chain[depth]} here, and this would be left out; "
        f"set the part as a whole first{example}"
    )


def _depth(value: Any, chain: Chain) -> int:
    """The number of names of a chain that lead from a record to a field in it, one after another."""
    for number, name in enumerate(chain):
        if not isinstance(value, Part) or name not in value.__struct_fields__:
            return number
        value = getattr(value, name)
    return len(chain)


def holds(recipe: Recipe, path: RecipePath, value: Any) -> bool:
    """True if every field of the path exists in a canonical recipe and has this value."""
    if isinstance(value, Recipe):
        return bool(unlabelled(recipe) == unlabelled(value.canonical()))
    return all(_holds(getattr(recipe, name), below, value) for name, below in path.tree.branches)


@lru_cache(maxsize=65536, typed=True)  # 0 is not False
def _holds(part: Any, tree: Tree, value: Any) -> bool:
    if not tree.branches:
        if isinstance(value, Fields):
            return all(_has(part, name, want) for name, want in value.values)
        return bool(_numbers(part) == _numbers(value))
    return all(
        _has(part, name, value)
        if not below.branches
        else hasattr(part, name) and _holds(getattr(part, name), below, value)
        for name, below in tree.branches
    )


def _numbers(value: Any) -> Any:
    """The one spelling of values that compute the same."""
    if isinstance(value, Quantizer):
        value = value.canonical()
    elif isinstance(value, TableElement | FloatElement):
        value = simplest(value)
    elif isinstance(value, OwnScale):
        value = simplest_scale(value)
    return unlabelled(value) if isinstance(value, Part) else value


def _has(part: Any, name: str, want: Any) -> bool:
    """True if a field of a record has this value, or these Fields."""
    if isinstance(part, Quantizer) and part.is_plain and name != "element":
        return False  # there is no block, scale or rounding that could have a value
    if isinstance(part, Part) and name == part.__struct_config__.tag_field:
        return bool(part.__struct_config__.tag == want)
    if not hasattr(part, name):
        return False
    if isinstance(part, Quantizer) and isinstance(want, TensorScale):  # without a target, it is the format's own
        want = _replace(part, tensor_scale=want).canonical().tensor_scale
    return _holds(getattr(part, name), Tree(), want)


def value_text(value: object) -> str:
    """A value as it may be written in a file, on one line, for people and as a name of a level."""
    if isinstance(value, Recipe):
        return value.label()
    if isinstance(value, Fields):
        return ", ".join(f"{name} = {value_text(field)}" for name, field in value.values)
    if isinstance(value, TableElement | FloatElement):
        return element_name(value)
    if isinstance(value, OwnScale):
        return scale_name(value)
    if isinstance(value, LayerRule):
        return value.label()
    if isinstance(value, tuple):
        return "; ".join(map(value_text, value)) or "none"
    if isinstance(value, Part):
        found = (name_in(names, value) for names in NAMES.values())
        return next(filter(None, found), None) or value_text(plain(value))
    if isinstance(value, dict):
        return ", ".join(f"{name} = {value_text(field)}" for name, field in value.items())
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else str(value)


_replace = msgspec.structs.replace
