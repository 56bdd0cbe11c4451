"""How answers are printed: tables for people, JSON for programs."""

from __future__ import annotations

import json
import sys

from rich import box
from rich.console import Console
from rich.table import Table

WIDE = 10
"""Columns of an answer that are shown however little they say."""


def print_rows(columns: list[str], rows: list[dict], as_json: bool = False) -> None:
    """A line for each row. As JSON rows are whole; a table has the named columns."""
    if as_json:
        print_json(rows)
    else:
        table = Table(*columns, box=box.SIMPLE_HEAD)
        for row in rows:
            table.add_row(*(_cell(row[name]) for name in columns))
        console().print(table)


def print_answer(columns: list[str], rows: list[dict]) -> None:
    """A table of any width. Where there are many columns, what all rows have in common stands once, under it."""
    many = len(columns) > WIDE and len(rows) > 1
    same = {name for name in columns if many and all(row[name] == rows[0][name] for row in rows)}
    print_rows([name for name in columns if name not in same], rows)
    common = [f"{name} {_cell(rows[0][name])}" for name in columns if name in same and rows[0][name] not in (None, "")]
    if common:
        print(f"in all rows: {', '.join(common)}")


def print_facts(facts: dict, as_json: bool = False) -> None:
    """A line for each fact: its name, its value."""
    if as_json:
        print_json(facts)
    else:
        table = Table.grid(padding=(0, 2))
        for name, value in facts.items():
            table.add_row(name.replace("_", " "), _cell(value))
        console().print(table)


def print_json(data: object) -> None:
    print(json.dumps(data, indent=2, ensure_ascii=False))


def short(value: object, digits: int = 3) -> object:
    """A number with so many significant digits."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def console() -> Console:
    """As wide as the terminal; wide enough for any table where there is none."""
    return Console(width=None if sys.stdout.isatty() else 10_000, highlight=False, markup=False)


def _cell(value: object) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{number} {name}" for name, number in value.items()) or "none"
    if isinstance(value, list):
        return "\n".join(map(_cell, value)) or "none"
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
