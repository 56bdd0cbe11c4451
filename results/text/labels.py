"""Short names of recipes that stand beside each other, with nothing lost.

A label is a list of phrases, the formats first. A recipe with a name goes by it, with its label behind it where that is
short; `fp4dse recipe show NAME` says the rest. What all recipes have is said once (`common`) and left out of the labels
of those without a name. The formats at the start always stay, and so does, in all labels, as much of what is common as
it takes that none of them is the name or the label of a shipped recipe that is another one.

    nvfp4, SR, wgrad rht16, loss scale 1024          nvfp4, SR
    ue5m3-t448, wgrad rht16, loss scale 1024         ue5m3-t448                common: wgrad rht16, loss scale 1024

    nvfp4, forward bf16, loss scale 1024             nvfp4, forward bf16
    mxfp4, forward bf16, loss scale 1024             mxfp4, forward bf16       common: loss scale 1024
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

import pandas as pd

from fp4dse.dse import recipe_files

SHORT = 40
"""A label of at most so many characters stands behind the name."""


class Labels(NamedTuple):
    """`common`: phrases that all recipes have; `short`: label -> what the recipe is called."""

    common: tuple[str, ...]
    short: dict[str, str]

    def of(self, label: str) -> str:
        """The recipe's name; the label itself if it was not among those compared."""
        return self.short.get(label, label)

    def says(self) -> str:
        """The line below a table that names what all recipes have; empty if labels are whole."""
        return f"All recipes have: {', '.join(self.common)}" if self.common else ""


def short_labels(labels: Iterable[str], names: Iterable[object]) -> Labels:
    """The names of recipes that are compared with each other. names: of each label; null where there is none."""
    known = dict(zip(labels, names, strict=True))
    phrases = [label.split(", ")[1:] for label in known]
    shared = set.intersection(*map(set, phrases)) if len(phrases) > 1 else set()
    common = tuple(phrase for phrase in phrases[0] if phrase in shared) if shared else ()
    found = _called(known, common)
    while common and any(text in _shipped() and text not in (label, known[label]) for label, text in found.items()):
        common = common[1:]
        found = _called(known, common)
    return Labels(common, found)


def _called(known: Mapping[str, object], common: tuple[str, ...]) -> dict[str, str]:
    """Label -> what the recipe is called if labels without a name lack `common`. known: label -> name."""
    found = {}
    for label, name in known.items():
        if pd.isna(name):
            formats, *phrases = label.split(", ")
            found[label] = ", ".join([formats, *(phrase for phrase in phrases if phrase not in common)])
        else:
            found[label] = str(name) if name == label or len(label) > SHORT else f"{name}: {label}"
    return found


@cache
def _shipped() -> frozenset[str]:
    """Names and labels of the shipped recipes."""
    return frozenset(text for name, file in recipe_files().items() for text in (name, file.recipe.label()))
