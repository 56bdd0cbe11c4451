"""TOML and JSON that somebody else wrote: whatever is wrong with a file is said in one line.

Readers of nested data recurse, and so does whoever walks through it: a file of a few kilobytes can exhaust the stack.
So nothing is taken that is nested deeper than `DEEPEST`.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fp4dse.dse.errors import ConfigError

DEEPEST = 64
"""Tables and lists within each other that are taken; a recipe needs six."""

T = TypeVar("T")


def read_toml(path: Path, example: str = "see `fp4dse recipe show nvfp4`") -> dict[str, Any]:
    """The file as a dict; ConfigError if it is missing, not UTF-8, not TOML, nested too deeply, or says nothing."""
    text = read_text(path, "TOML file")
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found = "too many levels" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(str(path), found, f"a TOML file ({example})") from None
    if not data:
        raise ConfigError(str(path), None, f"a TOML file with at least one key ({example})")
    if is_deep(data):
        raise ConfigError(str(path), "too many levels", f"tables and lists within each other, {DEEPEST} at most")
    return data


def read_text(path: Path, kind: str) -> str:
    """The text of a file of some kind (`TOML file`); ConfigError if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(str(path), error.strerror, f"a readable {kind}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), f"byte {error.start} is not UTF-8", f"a {kind} in UTF-8") from None


def decode_json(data: bytes, type_: type[T] | Any = Any) -> Any:
    """JSON as a value of `type_`. msgspec.DecodeError says what is wrong with it, too many levels and bytes that are
    not UTF-8 included."""
    try:
        found = msgspec.json.decode(data, type=type_)
    except RecursionError:
        raise msgspec.DecodeError("too many levels") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"byte {error.start} is not UTF-8") from None
    if is_deep(found):
        raise msgspec.DecodeError("too many levels")
    return found


def is_deep(data: object) -> bool:
    """True if dicts and lists are nested deeper than `DEEPEST`. Walks level by level, so that the stack is safe."""
    level = [data]
    for _ in range(DEEPEST):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return True
