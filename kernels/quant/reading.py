"""The columns of the descriptor tables that code reads, found in its source.

What an implementation heeds follows from what its code does, codec by codec; nobody lists it. A function reads what
stands in it and in each function of ours that it names. Branches that a compile-time constant decides count only where
they are taken, so that a column which is compiled out is not one that is read.

    torch     f["encode"]
    Triton    a constant that `constant_of` was given
    C++       f.encode or i.encode: rows are called so wherever they are read
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from functools import cache
from types import FunctionType
from typing import Any, TypeVar

from fp4dse.kernels.quant.descriptor import FLOATS, INTS

T = TypeVar("T")
_CONSTANTS: dict[int, tuple[object, str]] = {}


def constant_of(column: str, constant: T) -> T:
    """The constant, by which Triton code reads the column from now on."""
    _CONSTANTS[id(constant)] = constant, column  # kept, so that no other object has its number
    return constant


def columns_read(*functions: Callable[..., Any], **constants: Any) -> frozenset[str]:
    """The columns that torch or Triton functions read, where their compile-time constants have these values."""
    found: set[str] = set()
    left, seen = [_plain(function) for function in functions], set()
    while left:
        function = left.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        for node in _taken(_tree(function), constants):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                found.add(str(node.slice.value))
            if isinstance(node, ast.Name) and node.id not in function.__code__.co_varnames:
                value = function.__globals__.get(node.id)
                left.append(_plain(value))
                found.add(_CONSTANTS.get(id(value), (None, ""))[1])
    return frozenset(found & {*FLOATS, *INTS})


def _plain(value: object) -> FunctionType | None:
    """The Python function of a function of ours; None of other things."""
    function = getattr(value, "fn", value)  # Triton's have it
    if not isinstance(function, FunctionType):
        return None
    return function if function is not value or function.__module__.startswith("fp4dse.") else None


@cache
def _tree(function: FunctionType) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _taken(node: ast.AST, constants: dict[str, Any]) -> Iterator[ast.AST]:
    """A node and those in it, but for branches that are not taken."""
    yield node
    inner: list[ast.AST] = [*ast.iter_child_nodes(node)]
    if isinstance(node, ast.If | ast.IfExp):
        names = {name.id for name in ast.walk(node.test) if isinstance(name, ast.Name)}
        if names and names <= constants.keys():
            branch = node.body if eval(ast.unparse(node.test), {}, constants) else node.orelse
            inner = [*branch] if isinstance(branch, list) else [branch]
    for child in inner:
        yield from _taken(child, constants)


def columns_read_in_cpp(source: str, functions: Collection[str]) -> frozenset[str]:
    """The columns that C++ functions read, and those that they call. Definitions begin at the start of a line."""
    bodies: dict[str, str] = {}
    for part in re.split(r"\n(?=[A-Za-z])", re.sub(r"//.*", "", source)):
        if name := re.match(r"struct (\w+)|[^(]*?(\w+)\(", part):
            bodies[name[1] or name[2]] = bodies.get(name[1] or name[2], "") + part
    found: set[str] = set()
    seen: set[str] = set()
    left = [*functions]
    while left:
        body = bodies[left.pop()]
        found |= {*re.findall(r"\b[fi]\.(\w+)", body)}
        called = {*re.findall(r"\b(?:\w+(?=[<(])|[A-Z]\w+)", body)}  # functions, and structures with constructors
        left += (called & bodies.keys()) - seen
        seen |= called
    return frozenset(found & {*FLOATS, *INTS})
