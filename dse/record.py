"""The base of all records that make up a recipe: frozen, checked when made, and written out without defaults.

msgspec gives immutability, hashing and JSON. What is added here: a record made in Python is checked as strictly as
one that is read from a file (msgspec checks only the latter), and defaults are left out *by value*, so that equal
records are written alike and an id never depends on how a record came about.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from functools import cache, lru_cache
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec

from fp4dse.dse.errors import ConfigError

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""Numbers of fields; a share is of 0 to 1."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """A strict record. Making one with a value that its field does not take raises ConfigError.

    LABELS: fields that are for people, and no part of what the record stands for. Equality is that of all fields, so
    that nothing that is remembered for one record answers for another; `unlabelled` leaves them out.
    """

    LABELS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for field, allowed in _takes_by_field(type(self)):
            value = getattr(self, field)
            if type(value) in allowed.classes:  # by far the most frequent, and spaces make records by the million
                continue
            if not allowed.fits(value):
                raise ConfigError(f"{type(self).__name__}.{field}", value, accepted(field_types(type(self))[field]))
            if type(value) is int and allowed.takes_float:  # 448 and 448.0 are equal: make them the same in JSON too
                msgspec.structs.force_setattr(self, field, float(value))


def plain(part: Part) -> dict[str, object]:
    """The record as plain dicts and lists, tag first, fields that have their default value left out.

    Leaving defaults out means that a field added later does not change how older records are written.
    """
    config = part.__struct_config__
    out: dict[str, object] = {config.tag_field: config.tag} if config.tag_field else {}
    for name, default in defaults(type(part)).items():
        value = getattr(part, name)
        if value == default:
            continue
        out[name] = _plain_value(value)
    return out


def _plain_value(value: object) -> object:
    if isinstance(value, Part):
        return plain(value)
    return [_plain_value(one) for one in value] if type(value) is tuple else value


@lru_cache(maxsize=65536)
def unlabelled(part: Any) -> Any:
    """The record without what is for people: equal for all records that stand for the same."""
    kind: type[Part] = type(part)
    changes = {name: defaults(kind)[name] for name in kind.LABELS}
    for name in part.__struct_fields__:
        if isinstance(value := getattr(part, name), Part):
            changes[name] = unlabelled(value)
        elif type(value) is tuple and value and isinstance(value[0], Part):
            changes[name] = tuple(map(unlabelled, value))
    changed = any(getattr(part, name) is not value for name, value in changes.items())
    return msgspec.structs.replace(part, **changes) if changed else part


def plain_parts(part: Part) -> dict[str, object]:
    """Like `plain` of what is `unlabelled`, for JSON: the parts of the record are encoded already, each once."""
    return {
        name: _encoded_value(value)
        for name, default in defaults(type(part)).items()
        if (value := getattr(part, name)) != default
    }


def _encoded_value(value: object) -> object:
    if isinstance(value, Part):
        return _encoded(value)
    return [_encoded_value(one) for one in value] if type(value) is tuple else value


@lru_cache(maxsize=65536)
def _encoded(part: Part) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(plain(unlabelled(part)), order="sorted"))


def name_in(names: Mapping[str, Any], value: object) -> str | None:
    """The first name of a value in a table of names, if it has one."""
    return next((name for name, known in names.items() if known == value), None)


def name_or_numbers(names: Mapping[str, Any], part: Part, join: str = "") -> str:
    """The name of a record in a table of names, else its kind with all fields: `dge k7 cap3`; `join`: `=` for `k=7`."""
    numbers = [f"{field}{join}{getattr(part, field)!r}".removesuffix(".0") for field in part.__struct_fields__]
    return name_in(names, part) or " ".join([str(part.__struct_config__.tag), *numbers])


@cache
def defaults(cls: type[Part]) -> dict[str, object]:
    """Field name -> its default value, msgspec.NODEFAULT where the field must be given."""
    return {field.name: field.default for field in msgspec.structs.fields(cls)}


@cache
def required_fields(cls: type[Part]) -> tuple[str, ...]:
    """The names of fields that must be given."""
    return tuple(field.name for field in msgspec.structs.fields(cls) if field.required)


@cache
def field_types(cls: type[Part]) -> dict[str, typing.Any]:
    """Field name -> its type, in the order of definition."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}


def options(type_: typing.Any) -> tuple[Any, ...]:
    """The members of a union, or the type alone."""
    is_union = isinstance(type_, types.UnionType) or typing.get_origin(type_) is typing.Union
    return typing.get_args(type_) if is_union else (type_,)


def part_types(type_: typing.Any) -> list[type[Part]]:
    """The records among the members of a union, or the type alone if it is one."""
    return [option for option in options(type_) if isinstance(option, type) and issubclass(option, Part)]


class Takes(NamedTuple):
    """The values that a type takes: instances of `classes`, `literals` with their types, finite numbers above `above`
    or from `least` on, up to `most`, whole numbers from `whole` on."""

    classes: frozenset[type]
    literals: frozenset[tuple[type, object]]
    above: float | None = None
    least: float | None = None
    most: float | None = None
    whole: int | None = None

    def fits(self, value: typing.Any) -> bool:
        """Strict: True is no 1, 16.0 no 16, and inf no number."""
        t = type(value)
        if t in self.classes or (t in (str, int) and (t, value) in self.literals):
            return True
        if t is int and self.whole is not None:
            return bool(value >= self.whole)
        if t not in (int, float) or not math.isfinite(value) or (self.most is not None and value > self.most):
            return False
        return bool((self.above is not None and value > self.above) or (self.least is not None and value >= self.least))

    @property
    def takes_float(self) -> bool:
        return self.above is not None or self.least is not None


@cache
def takes(type_: typing.Any) -> Takes:
    """The values that a field of `type_` takes.

    Numbers are written as Annotated[float, Meta(gt=…)] or Meta(ge=…), either with le=…, whole ones as Annotated[int,
    Meta(ge=…)].
    """
    classes, literals, numbers = set(), set(), {}
    for option in options(type_):
        if typing.get_origin(option) is typing.Literal:
            literals |= {(type(v), v) for v in typing.get_args(option)}
        elif typing.get_origin(option) is typing.Annotated:
            meta = option.__metadata__[0]
            of_float = {"above": meta.gt, "least": meta.ge, "most": meta.le}
            numbers = {"whole": meta.ge} if option.__origin__ is int else of_float
        else:
            classes.add(typing.get_origin(option) or option)
    return Takes(frozenset(classes), frozenset(literals), **numbers)


@cache
def _takes_by_field(cls: type[Part]) -> tuple[tuple[str, Takes], ...]:
    return tuple((name, takes(type_)) for name, type_ in field_types(cls).items())


def accepted(type_: typing.Any) -> str:
    """The values that a field of `type_` takes, in words."""
    words: list[str] = []
    for option in options(type_):
        if typing.get_origin(option) is typing.Literal:
            words += [str(v) for v in typing.get_args(option)]
        elif typing.get_origin(option) is typing.Annotated:
            meta, what = option.__metadata__[0], "a whole number" if option.__origin__ is int else "a number"
            from_ = f"{what} above {meta.gt}" if meta.gt is not None else f"{what} from {meta.ge}"
            on = "" if meta.gt is not None else " on"
            words.append(from_ + (on if meta.le is None else f" to {meta.le}"))
        elif option is type(None):
            words.append("none")
        elif isinstance(option, type) and issubclass(option, Part):
            config = option.__struct_config__
            fields = [f'{config.tag_field} = "{config.tag}"'] if config.tag_field else []
            words.append("a table with " + (", ".join([*fields, *option.__struct_fields__]) or "no fields"))
        else:
            words.append(_IN_WORDS[typing.get_origin(option) or option])
    return ", ".join(words)


_IN_WORDS = {
    bool: "true, false",
    str: "a text",
    int: "a whole number",
    dict: "a table",
    list: "a list",
    tuple: "a list of numbers",
}
