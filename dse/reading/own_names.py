"""Names that a file gives to number formats of its own: `[elements.NAME]` and `[scales.NAME]`.

    [elements.nf4]
    values = [-1.0, -0.6961928, …, 1.0]        any 2 to 16 numbers with 0 among them

    [elements.e2m1-wide]                       or a float format with a sign
    exponent = 3                               bits
    mantissa = 0
    bias = 3                                   2^(exponent - 1) - 1 if not given
    max = 8.0                                  the largest number; if not given, every code is finite

    [scales.ue3m4]                             a float format without a sign
    exponent = 3
    mantissa = 4

Reading a file begins with `expanded`, which puts the formats in the place of their names, wherever a quantizer's
`element` or `scale` is written. A scale's other fields are given as `{ format = "ue3m4", zero = "min" }`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeGuard, TypeVar

from fp4dse.dse.errors import ConfigError, at_key
from fp4dse.dse.formats import ELEMENTS, PLAIN
from fp4dse.dse.own_formats import (
    ELEMENT_BITS,
    ELEMENT_RANGE,
    FloatElement,
    Own,
    OwnElement,
    TableElement,
    float_format,
)
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.scale import SCALE_BITS, SCALE_NAMES, SCALE_RANGE, OwnScale

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_PARAMETERS = ("exponent", "mantissa", "bias", "max")

Format = TypeVar("Format", bound=Own)
Names = dict[str, Mapping[str, Any]]
"""Field of a quantizer -> name -> format."""


def expanded(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The data of a file without its `elements` and `scales`, which take the place of their names.

    ConfigError names `where`, the format and the field.
    """
    readers: dict[str, tuple[Iterable[str], Callable[..., Own]]] = {
        "elements": ((*ELEMENTS, *PLAIN), read_element),
        "scales": (SCALE_NAMES, read_scale),
    }
    names: Names = {}
    for key, (taken, read) in readers.items():
        tables = data.get(key, {})
        if not isinstance(tables, dict):
            raise ConfigError(at_key(where, key), tables, f"tables [{key}.NAME]")
        for name in tables:
            if name in taken:
                raise ConfigError(at_key(where, key, name), name, f"a name that is not built in ({', '.join(taken)})")
            if not _NAME.fullmatch(name):
                raise ConfigError(at_key(where, key, name), name, "a letter, then letters, digits, - and _; 32 at most")
        names[key.removesuffix("s")] = {name: read(name, table, where, key) for name, table in tables.items()}
    rest = {key: value for key, value in data.items() if key not in readers}
    return _expanded(rest, "", names) if any(names.values()) else rest


def _expanded(value: Any, field: str, names: Names) -> Any:
    """A value of the field of a quantizer, or of none of interest, with all that is below it."""
    if isinstance(value, str):
        return names.get(field, {}).get(value, value)
    if isinstance(value, list):
        return [_expanded(one, field, names) for one in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("format")
    if field == "scale" and isinstance(kind, str) and kind in names["scale"]:
        return {**value, "format": "own", **_numbers(names["scale"][kind])}
    return {key: _expanded(below, _field(key, field), names) for key, below in value.items()}


def _field(key: str, above: str) -> str:
    """The field that a key, or the end of a path, names; `values` of an axis are those of the path above it.

    An estimator's `element` and `scale` are derivatives, and no formats.
    """
    *way, end = key.split(".")
    if "estimator" in (*way, end):
        return "estimator"
    return above if end == "values" or above == "estimator" else end


def _numbers(scale: OwnScale) -> dict[str, Any]:
    return {"mantissa": scale.mantissa, "emin": scale.emin, "max": scale.max, "name": scale.name}


def read_element(name: str, data: object, where: str, *keys: str) -> OwnElement:
    """An element from its table; ConfigError names `where`, `keys`, the name and the field."""
    fields = _fields(name, data, ("values", *_PARAMETERS), where, *keys)
    if "values" not in fields:
        mantissa, emin, largest = _parameters(name, fields, 1, ELEMENT_BITS, ELEMENT_RANGE, where, *keys)
        return _made(FloatElement, where, *keys, name, mantissa=mantissa, emin=emin, max=largest, name_=name)
    if len(fields) > 1:
        others = ", ".join(field for field in fields if field != "values")
        raise ConfigError(at_key(where, *keys, name), f"values and {others}", "values alone, or without them exponent")
    values = fields["values"]
    if not isinstance(values, list):
        raise ConfigError(at_key(where, *keys, name, "values"), values, "a list of 2 to 16 numbers")
    return _made(TableElement, where, *keys, name, values=tuple(values), name_=name)


def read_scale(name: str, data: object, where: str, *keys: str) -> OwnScale:
    """A scale format from its table, likewise."""
    fields = _fields(name, data, _PARAMETERS, where, *keys)
    mantissa, emin, largest = _parameters(name, fields, 0, SCALE_BITS, SCALE_RANGE, where, *keys)
    return _made(OwnScale, where, *keys, name, mantissa=mantissa, emin=emin, max=largest, name_=name)


def _fields(name: str, data: object, known: tuple[str, ...], where: str, *keys: str) -> dict[str, Any]:
    accepted = "values, or exponent, mantissa, bias, max" if "values" in known else "exponent, mantissa, bias, max"
    if not isinstance(data, dict):
        raise ConfigError(at_key(where, *keys, name), data, f"a table with {accepted}")
    for field in data:
        if field not in known:
            raise ConfigError(at_key(where, *keys, name, field), field, accepted)
    if "values" not in data and "exponent" not in data:
        raise ConfigError(at_key(where, *keys, name), data or None, f"a table with {accepted}")
    return data


def _parameters(
    name: str, fields: dict[str, Any], sign: int, bits: int, reach: int, where: str, *keys: str
) -> tuple[int, int, float]:
    """(mantissa, emin, largest) of exponent and mantissa bits, bias and largest number."""

    def whole(field: str, default: int | None, least: int, most: int) -> int:
        value = fields.get(field, default)
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(at_key(where, *keys, name, field), value, f"a whole number from {least} to {most}")
        return value

    exponent = whole("exponent", None, 1, 7)
    mantissa = whole("mantissa", 0, 0, bits - sign - exponent)
    usual = 2 ** (exponent - 1) - 1
    # 2^(1 - bias) is the smallest normal number, 2^(2^exponent - 1 - bias) the power of two of the largest
    bias = whole("bias", usual, 1 - reach, 1 + reach - mantissa)
    emin, top = 1 - bias, (2 - 2.0**-mantissa) * 2.0 ** (2**exponent - 1 - bias)
    largest = fields.get("max", top)
    of = at_key(where, *keys, name, "max")
    if type(largest) not in (int, float) or not (least := 2.0 ** (emin - mantissa)) <= largest <= top:
        raise ConfigError(of, largest, f"a number from {least:g} to {top:g}")
    numbers = float_format(mantissa, emin, top, sign).magnitudes()
    if largest not in numbers:
        near = sorted(sorted(numbers, key=lambda number: abs(number - largest))[:2])
        raise ConfigError(of, largest, f"a number of the format, like {near[0]:g} or {near[1]:g}")
    return mantissa, emin, float(largest)


def _made(cls: type[Format], where: str, *keys: str, name_: str, **fields: Any) -> Format:
    """The record; its ConfigError with the place in the file."""
    try:
        return cls(**fields, name=name_)
    except ConfigError as error:
        raise ConfigError(at_key(where, *keys, error.where), error.found, error.accepted) from None


def file_names(quantizers: Iterable[Quantizer]) -> dict[Own, str]:
    """Own format -> its name in a file that has these quantizers; a number behind tells apart those called alike."""
    names: dict[Own, str] = {}
    for q in quantizers:
        for own in map(as_defined, filter(_is_own, (q.element, q.scale))):
            if own in names:
                continue
            usual = own.name if _NAME.fullmatch(own.name) else "lut"
            built_in = SCALE_NAMES if isinstance(own, OwnScale) else {**ELEMENTS, **PLAIN}
            taken = {name for other, name in names.items() if isinstance(other, OwnScale) == isinstance(own, OwnScale)}
            names[own] = next(name for name in _numbered(usual) if name not in taken and name not in built_in)
    return names


def _is_own(part: object) -> TypeGuard[Own]:
    return isinstance(part, Own)


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}-{n}" for n in itertools.count(2))


def as_defined(own: Own) -> Own:
    """The format as `[elements.NAME]` or `[scales.NAME]` defines it: a scale without what a quantizer does with it."""
    return OwnScale(**_numbers(own)) if isinstance(own, OwnScale) else own


def definitions(names: dict[Own, str]) -> dict[str, dict[str, Any]]:
    """`elements.NAME` or `scales.NAME` -> the fields that define it: what `expanded` reads."""
    return {
        f"{'scales' if isinstance(own, OwnScale) else 'elements'}.{name}": _definition(own)
        for own, name in names.items()
    }


def _definition(own: Own) -> dict[str, Any]:
    if isinstance(own, TableElement):
        return {"values": list(own.values)}
    assert isinstance(own, FloatElement | OwnScale)
    binades = math.frexp(own.max)[1] - own.emin  # the largest exponent code
    return {"exponent": max(1, binades).bit_length(), "mantissa": own.mantissa, "bias": 1 - own.emin, "max": own.max}
