"""A setting's verdict as a record: the recipe to use, how sure that is, what it costs, and warnings (recommendation.py
makes it).

Reports and terminals put the same answers into their own form; the words that several of them need stand here.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

from fp4dse.results.stats.recipes.equal_time import FARTHEST, Time
from fp4dse.results.stats.recipes.margins import Margin, margin_text
from fp4dse.results.stats.recipes.rate_choice import Rates
from fp4dse.results.text.ratios import best, counted

Against = Literal["worse", "better", "same", "open", "unknown", "tied"]

BF16_WORDS: dict[Against, str] = {
    "worse": "worse than BF16 by more than chance",
    "better": "better than BF16 by more than chance",
    "same": "as good as BF16 within {margin}",
    "open": "not told apart from BF16",
    "unknown": "with one seed nothing can be told apart from BF16",
    "tied": "not told apart from BF16, from which all seeds differ by the same",
}
"""`Verdict.bf16` for people; see `bf16_words`."""

FRONT_WORDS = (
    (0.95, "almost surely on the front"),
    (0.66, "probably on the front"),
    (0.33, "on the front or not, that is open"),
    (0.0, "on other seeds another recipe would probably be on the front in its place"),
)
"""p_front from which on -> words."""

EXPECTED_WORDS = "expected on new seeds: the mean of its row, drawn towards what its techniques do in other recipes"
"""Why the gap of a verdict, and its interval, are not those of the recipe's row."""


class Confirmed(NamedTuple):
    """The answer of the fresh seeds: chosen on one half of them, estimated on the other."""

    config_id: str
    label: str
    gap: float
    """On the seeds that did not choose, with its 95 % interval."""
    gap_low: float
    gap_high: float
    chosen_on: int
    estimated_on: int
    """Seeds."""
    bf16: Against
    margin: Margin
    overhead: float
    time: Time
    """To BF16's loss, by the gap above."""
    by_time: bool
    """It was chosen by that time, not by the loss."""
    finished: int
    """Candidates that finished on all fresh seeds."""
    diverged: int
    missing: int
    """Candidates that diverged on one of these, or lack one."""
    open: int
    """Other candidates that the estimating seeds do not tell apart from it at equal time, or that are the same within
    the margin."""

    def warnings(self) -> tuple[str, ...]:
        """Warnings, one sentence each, without a full stop."""
        says = [f"{counted(self.diverged, 'candidate')} diverged on a fresh seed"] if self.diverged else []
        if self.missing:
            few = f"{counted(self.missing, 'candidate')} not trained on all fresh seeds yet"
            says.append(f"{few}; `fp4dse confirm` goes on")
        return tuple(says)


class Verdict(NamedTuple):
    """One setting's answers. Without a recipe that quantizes and has a gap, `config_id` is None and `none` says why."""

    setting: tuple[Any, ...]
    """SETTING values."""
    config_id: str | None
    label: str
    name: str | None
    gap: float
    """log(loss / BF16's) that is expected on new seeds, from this recipe's seeds and all others (shrinkage.py); NaN
    without a recipe."""
    gap_low: float
    gap_high: float
    pairs: int
    bf16: Against
    p_front: float
    """Share of draws over seeds in which the recipe is on the front; NaN if there is nothing to draw from."""
    overhead: float
    """In the column `axis`, NaN if it is not known."""
    band: tuple[float, ...]
    """The overhead with the best software and with the worst; empty if it is not known."""
    axis: str
    overhead_of: str | None
    """Model, chip and revision that the overhead is of."""
    time: Time
    """To BF16's loss, by the gap above."""
    by_time: bool
    """Recipes are ranked by that time, not by the loss."""
    slower: int
    """Recipes with a lower gap at equal time that save no time against BF16, and are not recommended."""
    as_good: int
    """Other recipes that are as good at equal time within the margin."""
    open: int
    """Other recipes that the seeds do not tell apart from it at equal time."""
    more_seeds: float
    """Seeds that would decide on the nearest of these; NaN where there is none, inf where no number in reach would."""
    tried: int
    diverged: int
    margin: Margin
    rates: Rates
    none: str
    warnings: tuple[str, ...]
    """Sentences without a full stop; their only numbers are counts, learning rates and shares in %."""
    confirmed: Confirmed | None = None
    """None where no candidate was trained on fresh seeds. All other fields are of screened rows."""
    unit: str | None = None
    """gap_unit of the setting."""
    is_expected: bool = False
    """`gap` is not the recipe's own mean, which its row in tables has."""

    @property
    def price(self) -> tuple[float, tuple[float, ...]]:
        """Overhead and band of the recipe to use, confirmed or else screened; no band if only the other one has it."""
        if self.confirmed is None:
            return self.overhead, self.band
        return self.confirmed.overhead, self.band if self.confirmed.config_id == self.config_id else ()

    @property
    def why(self) -> str:
        """`the lowest loss`, or `the least time to BF16's loss`; of which recipes is said where not of all."""
        return f"{ranked_by(self.by_time)} of those that save time" if self.slower else ranked_by(self.by_time)

    def sure(self) -> str:
        """The certainty in words, without a full stop; empty without a recipe."""
        if self.config_id is None:
            return ""
        front = "" if math.isnan(self.p_front) else f"; {front_words(self.p_front)}"
        return bf16_words(self.bf16, self.margin) + front


def ranked_by(by_time: bool) -> str:
    """Why a recipe is the one to use: `the least time to BF16's loss`, or `the lowest loss`."""
    return "the least time to BF16's loss" if by_time else best()


def held_against(by_time: bool) -> str:
    """The words behind what is told apart from a recipe: ` at equal time`; none where recipes are ranked by loss."""
    return " at equal time" if by_time else ""


def time_words(time: Time) -> str:
    """`BF16's loss in 0.79 (0.72 to 0.88) of its time`; empty where nobody knows it."""
    if math.isnan(time.mean):
        return ""
    if math.isinf(time.mean):
        return f"BF16's loss not with {1 / FARTHEST:g} times its tokens"
    ends = "" if math.isnan(time.low) else f" ({time.low:.2f} to {time.high:.2f})"
    ends = f" ({time.low:.2f} or more)" if math.isinf(time.high) else ends
    return f"BF16's loss in {'roughly ' if time.rough else ''}{time.mean:.2f}{ends} of its time"


def bf16_words(bf16: Against, margin: Margin) -> str:
    """`as good as BF16 within ±0.5 %`."""
    return BF16_WORDS[bf16].format(margin=margin_text(margin.value))


def front_words(p_front: float) -> str:
    """`probably on the front`."""
    return next(words for least, words in FRONT_WORDS if p_front >= least)
