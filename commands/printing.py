"""Printing of answers: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fp4dse.dse.program.terminal import drawn_on, visible

WIDE = 10
"""Columns of an answer that are shown however little they say."""

FOLD = 22
"""Characters up to which a column of a table is never folded."""


def print_rows(columns: list[str], rows: list[dict[str, Any]], as_json: bool = False) -> None:
    """A line for each row. As JSON rows are whole; a table has the named columns.

    Long texts are folded to fit a terminal, numbers never are: where they do not fit, every row is a block of lines,
    one for each value that it has.
    """
    if as_json:
        print_json(rows)
        return
    terminal = console()
    widths = _widths(columns, rows)
    if not _fits(widths, terminal):
        for row in rows:
            print_facts({name: row[name] for name in columns if row[name] is not None})
            print()
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(visible(name), no_wrap=width <= FOLD, min_width=min(width, FOLD))
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    terminal.print(table)


def print_tables(tables: dict[str, list[dict[str, Any]]]) -> None:
    """A table under each title that has rows; their columns are those of the first row."""
    for title, rows in tables.items():
        if rows:
            print("", title, sep="\n")
            print_rows(list(rows[0]), rows)


def print_each(rows: Iterable[dict[str, Any]], as_json: bool = False) -> None:
    """Each row as soon as it is there: a block of lines, or as JSON a line."""
    for row in rows:
        if as_json:
            print(json.dumps(row, ensure_ascii=False), flush=True)
        else:
            print_facts(row)
            print(flush=True)


def print_answer(columns: list[str], rows: list[dict[str, Any]], brief: Sequence[str] = ()) -> None:
    """A table of any width. Where there are many columns, what all rows have in common stands once, under it.

    brief: names of columns, in groups in the order of their weight. Where the whole table does not fit, it has as many
    groups as do, and names what is left out; where not even the first does, every row is a block of lines.
    """
    many = len(columns) > WIDE and len(rows) > 1
    same = {name for name in columns if many and all(row[name] == rows[0][name] for row in rows)}
    shown = [name for name in columns if name not in same]
    left_out: list[str] = []
    if not _fits(_widths(shown, rows), terminal := console()):
        groups = list(brief)
        while groups and not _fits(_widths(_of(groups, shown), rows), terminal):
            groups.pop()
        left_out = [name for name in shown if name not in _of(groups, shown)] if groups else []
    print_rows([name for name in shown if name not in left_out], rows)
    common = [f"{name} {_cell(rows[0][name])}" for name in columns if name in same and rows[0][name] not in (None, "")]
    if common:
        print(f"in all rows: {', '.join(common)}")
    if left_out:
        print(f"does not fit: {', '.join(left_out)} (--format json and csv have all)")


def _of(groups: list[str], columns: list[str]) -> list[str]:
    """Those of the columns that the groups name."""
    named = " ".join(groups).split()
    return [name for name in columns if name in named]


def _fits(widths: list[int], terminal: Console) -> bool:
    return sum(min(width, FOLD) + 3 for width in widths) <= terminal.width


def _widths(columns: list[str], rows: list[dict[str, Any]]) -> list[int]:
    """Characters that each column takes where nothing is folded."""
    cells = ([visible(name), *(_cell(row[name]) for row in rows)] for name in columns)
    return [max(len(line) for cell in column for line in cell.split("\n")) for column in cells]


def print_facts(facts: dict[str, Any], as_json: bool = False) -> None:
    """A line for each fact: its name, its value."""
    if as_json:
        print_json(facts)
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(visible(name.replace("_", " ")), _cell(value))
        console().print(table)


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def short(value: object, digits: int = 3) -> object:
    """A number with so many significant digits."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def size_text(n: int) -> str:
    """`78 KiB`, `1.2 GiB`."""
    size, units = float(n), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.2g} {units[0]}" if size < 10 and units[0] != "B" else f"{size:.0f} {units[0]}"


def console() -> Console:
    """A console as wide as the terminal, or wide enough for any table where there is none."""
    width = None if sys.stdout.isatty() else 10_000
    return Console(file=drawn_on(sys.stdout), width=width, highlight=False, markup=False)


def _cell(value: object) -> str:
    return visible(_text(value))


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{number} {name}" for name, number in value.items()) or "none"
    if isinstance(value, list):
        times = Counter(map(_text, value))
        return "\n".join(line if n == 1 else f"{line}, {n} times" for line, n in times.items()) or "none"
    if value is None:
        return ""
    return f"{short(value, 4):.6g}" if isinstance(value, float) else str(value)
