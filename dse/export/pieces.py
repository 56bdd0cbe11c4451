"""An assignment with the settings that a library has for each of its recipes, and what it has not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from fp4dse.dse.export.assignment import USUAL, Assignment, Entry
from fp4dse.dse.recipe import Recipe

Piece = TypeVar("Piece")


class Said(msgspec.Struct, Generic[Piece], frozen=True):
    """default: the settings of all layers but those of `entries`, the first of which holds; cannot: what is missing, a
    line a field."""

    default: Piece
    entries: tuple[tuple[Entry, Piece], ...]
    cannot: list[str]

    @property
    def is_uniform(self) -> bool:
        """True where nothing is an exception but what always is."""
        return all(entry.number == USUAL for entry, _ in self.entries)

    @property
    def notes(self) -> tuple[str, ...]:
        """Things that a reader of the settings has to know."""
        named = any(entry.name for entry, _ in self.entries)
        return ("names in rules are taken as they are: of the layers of the model that is converted",) if named else ()


def say(made: Assignment, settings_of: Callable[[Recipe], tuple[Piece, list[str]]]) -> Said[Piece]:
    """settings_of: the settings of a layer's recipe, and what they cannot express."""
    default, lines = settings_of(made.default)
    cannot, entries = [*lines, *made.cannot], []
    for entry in made.entries:
        piece, lines = settings_of(entry.recipe)
        if lines:
            cannot += [f"{entry.origin}: {line}" for line in lines]
        else:
            entries.append((entry, piece))
    return Said(default, tuple(entries), cannot)
