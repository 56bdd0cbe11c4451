"""Names that a shell offers at the tab key: those that are known without a slow import and without a store."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from fp4dse.dse import recipe_files


def offer(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """For `autocompletion=`: those of the names that begin with what was typed. Files are the shell's own business."""
    return lambda incomplete: [name for name in names() if name.startswith(incomplete)]


def offer_several(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """As `offer`, for a list with commas: of the names that are not in it, those that begin with its end."""

    def offered(incomplete: str) -> list[str]:
        *before, begun = incomplete.split(",")
        return [",".join([*before, name]) for name in names() if name.startswith(begun) and name not in before]

    return offered


def spaces() -> Iterable[str]:
    """By their files: what reads them imports pandas."""
    folder = Path(__file__).parents[1] / "sweeps" / "spaces"
    return sorted(path.stem for path in folder.glob("*.toml"))


def spaces_and_recipes() -> Iterable[str]:
    return [*spaces(), *recipe_files()]


def tasks() -> Iterable[str]:
    """`task:preset` of those that `fp4dse tasks` lists, once that was run; until then the tasks alone."""
    from fp4dse.tasks.listing import known_names

    return known_names()
