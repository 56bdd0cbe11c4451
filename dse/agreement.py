"""Does a preset put recipes in the order in which larger models have them? As data: `agreement.json`, written by
`python -m fp4dse.results.preset_agreement`.

A preset of the ladder is compared with larger ones on it, any other with all of it, over the recipes that both trained.
What a reader needs to know before he believes a small task is one sentence: `warning`.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import msgspec

from fp4dse.dse.reading.files import decode_json

FILE = Path(__file__).with_name("agreement.json")
AGREES = 0.95
"""Share of pairs in the same order from which on a task agrees: that of the study's plan. A preset needs no warning
then."""

LEAST = 10
"""Recipes that two presets share if they are compared: the orders of fewer are chance."""


class Unseen(msgspec.Struct, frozen=True):
    """The recipes without which a preset agrees best, by the scales of their gradients: what its task does not see.

    scales: in words; agree: as in `Agreement`, of the others; gap, gap_of_others: median log(loss / BF16's) of these
    recipes and of all others, in the preset that is compared with.
    """

    scales: str
    agree: float
    gap: float
    gap_of_others: float

    def words(self) -> str:
        """`ue5m3 scales without a tensor scale, which lose 54 % there (the median of the others: 1.9 %)`."""
        gap, others = (f"{100 * math.expm1(gap):.2g} %" for gap in (self.gap, self.gap_of_others))
        return f"{self.scales}, which lose {gap} there (the median of the others: {others})"


class Agreement(msgspec.Struct, frozen=True, omit_defaults=True):
    """The orders of two presets, over recipes that quantize both passes and that both trained, at all of the seeds of
    one setting (device, software, revisions) without divergence.

    preset, against: TASK:PRESET; dataset_digest: of the data of `preset`; pairs: those whose losses differ by APART or
    more in `against`; agree: share of these that `preset` has in the same order (two recipes with equal losses have
    none); spearman: Spearman's correlation of mean gaps, with its 95 % interval over recipes; measured: date of the
    newest row.
    """

    preset: str
    dataset_digest: str
    against: str
    recipes: int
    pairs: int
    agree: float
    spearman: float
    spearman_low: float
    spearman_high: float
    measured: str
    unseen: Unseen | None = None


class Agreements(msgspec.Struct, frozen=True):
    """The file. apart: % of loss; ladder: presets of one task, each larger than the one before, or trained for longer;
    lines: of presets."""

    apart: float
    ladder: list[str]
    lines: list[Agreement]

    @property
    def to_ask(self) -> str:
        """The cheapest preset that agrees with all larger ones of the ladder that it was compared with; the largest
        where none does."""
        agree = (name for name in self.ladder if (found := self.of(name)) and min(x.agree for x in found) >= AGREES)
        return next(agree, self.ladder[-1])

    def of(self, preset: str, dataset_digest: str | None = None) -> list[Agreement]:
        """The lines of a preset, on some data if they are named."""
        known = (preset, dataset_digest) if dataset_digest else (preset,)
        return [line for line in self.lines if (line.preset, line.dataset_digest)[: len(known)] == known]

    def is_rung(self, preset: str, dataset_digest: str) -> bool:
        """True for a preset of the ladder on the ladder's data, the largest included, which is compared with none."""
        return preset in self.ladder and dataset_digest in {
            line.dataset_digest for line in self.lines if line.preset in self.ladder
        }


@cache
def agreements() -> Agreements:
    """Of the shipped file."""
    found: Agreements = decode_json(FILE.read_bytes(), Agreements)
    return found


def warning(task: str, preset: str, dataset_digest: str, found: Agreements | None = None) -> str | None:
    """`other_order` with what to do about it, for who chooses by this preset."""
    found = found or agreements()
    says = other_order(task, preset, dataset_digest, found)
    if says is None:
        return None
    when = "before you use a recipe, " if found.of(f"{task}:{preset}", dataset_digest) else ""
    return f"{says}; {when}ask --task {found.to_ask}"


def other_order(task: str, preset: str, dataset_digest: str, found: Agreements | None = None) -> str | None:
    """A sentence without a full stop: how many pairs of recipes larger models order otherwise than this preset, or that
    nobody knows. None where it agrees, and for tasks of which the file has no preset at all, which stand for
    themselves. found: None for the shipped file."""
    found = found or agreements()
    name, ask = f"{task}:{preset}", found.to_ask
    lines = found.of(name, dataset_digest)
    if not lines:
        is_compared = any(line.preset.partition(":")[0] == task for line in found.lines)
        if not is_compared or found.is_rung(name, dataset_digest):
            return None
        return "nobody has compared this preset's order of recipes, on these data, with a larger model's"
    line = next((line for line in lines if line.against == ask), lines[0])
    if line.agree >= AGREES:
        return None
    model = f"{ask}, which agrees with larger models" if line.against == ask else line.against
    why = f"; this task does not see what is wrong with {line.unseen.words()}" if line.unseen else ""
    return f"{100 * (1 - line.agree):.0f} % of pairs of recipes are ordered otherwise by {model}{why}"
