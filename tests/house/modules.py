"""The modules of the tree, and their syntax trees."""

from __future__ import annotations

import ast
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOP = ("__init__.py", "__main__.py", "cli.py")
ROOMS = ("dse", "kernels", "tasks", "sweeps", "results", "commands")
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_on_disk() -> dict[str, Path]:
    """Import name -> folder of everything that has modules, `fp4dse` itself included."""
    folders = [file.parent for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    names = {".".join(("fp4dse", *folder.relative_to(ROOT).parts)): folder for folder in folders}
    return {"fp4dse": ROOT, **names}


def modules() -> list[Path]:
    return [*(ROOT / name for name in TOP), *(file for room in ROOMS for file in (ROOT / room).rglob("*.py"))]


def scripts() -> list[Path]:
    """Programs of the study, which are no part of the package."""
    return [*(ROOT / "docs" / "study").glob("*.py")]


@cache
def parsed(source: str) -> ast.Module:
    """Several tests ask for the same modules, and parsing all of them takes seconds."""
    return ast.parse(source)
