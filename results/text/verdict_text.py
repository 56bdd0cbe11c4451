"""The verdict on a setting as sentences: the recipe to use, how sure that is, its cost, what counts as the same, and
warnings."""

from __future__ import annotations

import math
import textwrap

from fp4dse.results.stats.levels import POINTS
from fp4dse.results.stats.recipes.verdict import (
    EXPECTED_WORDS,
    Confirmed,
    Verdict,
    bf16_words,
    held_against,
    ranked_by,
    time_words,
)
from fp4dse.results.text.labels import Labels
from fp4dse.results.text.ratios import change_with_range, counted, share_with_band, written_in


def verdict_text(verdict: Verdict, called: Labels, width: int = 100) -> str:
    """A setting's answers, a paragraph each."""
    return "\n".join(titled(title, text, width) for title, text in answers(verdict, called))


def titled(title: str, text: str, width: int = 100) -> str:
    """`Beware:   …`, a paragraph in lines of at most `width`."""
    return wrapped(f"{title + ':':<10}{text}", width, 10)


def answers(verdict: Verdict, called: Labels) -> list[tuple[str, str]]:
    """Titles and texts of the verdict: the recipe to use, how sure that is, its cost, what counts as the same, and
    warnings. What was confirmed on fresh seeds goes first, and the screened answer says that it is one."""
    with written_in(verdict.unit):
        return _answers(verdict, called)


def _answers(verdict: Verdict, called: Labels) -> list[tuple[str, str]]:
    new = verdict.confirmed
    use, sure = _use(verdict, called), _sure(verdict)
    if new is None:
        found = [("Use", use), ("How sure", sure), ("Cost", _cost(verdict))]
    else:
        found = [("Use", confirmed_text(new, called)), ("How sure", _sure_when_confirmed(new))]
        found += [("Cost", _cost(verdict)), ("Screened", f"{use.removesuffix('.')}; {sure}")]
    found += [("Same", f"{verdict.margin.sentence()}.")] if verdict.config_id is not None else []
    warnings = (*verdict.warnings, *(new.warnings() if new else ()))
    found += [("Beware", f"{warning}.") for warning in warnings]
    return [(title, text) for title, text in found if text]


def _use(verdict: Verdict, called: Labels) -> str:
    if verdict.config_id is None:
        return f"nothing of this: {verdict.none}."
    against = change_with_range(verdict.gap, verdict.gap_low, verdict.gap_high)
    basis = f"; {EXPECTED_WORDS}" if verdict.is_expected else ""
    seeds = counted(verdict.pairs, "seed")
    return f"{called.of(verdict.label)}: {verdict.why}, {against} against BF16 ({seeds}{basis})."


def _sure(verdict: Verdict) -> str:
    if verdict.config_id is None:
        return ""
    says = [verdict.sure()]
    if verdict.open:
        other = f"{counted(verdict.open, 'other recipe')} not told apart from it{held_against(verdict.by_time)}"
        if math.isfinite(verdict.more_seeds):
            other += f" ({counted(int(verdict.more_seeds), 'more seed')} would settle the nearest)"
        says.append(other)
    return f"{'; '.join(says)}."


def confirmed_text(new: Confirmed, called: Labels) -> str:
    """The recipe that fresh seeds chose, and its loss on those that did not choose, as a sentence."""
    moved = change_with_range(new.gap, new.gap_low, new.gap_high)
    why, seeds = ranked_by(new.by_time), counted(new.chosen_on + new.estimated_on, "fresh seed")
    chosen = f"confirmed on {seeds}: {why} on {new.chosen_on} of them"
    return f"{called.of(new.label)}, {chosen}, {moved} against BF16 on the other {new.estimated_on}."


def _sure_when_confirmed(new: Confirmed) -> str:
    count = counted(new.open, "other candidate")
    others = f"; {count} not told apart from it{held_against(new.by_time)}" if new.open else ""
    return f"{bf16_words(new.bf16, new.margin)}{others}."


def _cost(verdict: Verdict) -> str:
    overhead, band = verdict.price
    if verdict.config_id is None or math.isnan(overhead):
        return ""
    of = f" ({verdict.overhead_of.rpartition(',')[0]})" if verdict.overhead_of else ""
    alone = ", the trainer's alone: what its rollouts take is not in it" if verdict.unit == POINTS else ""
    time = time_words((verdict.confirmed or verdict).time)
    return f"{share_with_band(overhead, band)} of BF16's modelled step time{of}{alone}{f'; {time}' if time else ''}."


def wrapped(text: str, width: int, indent: int) -> str:
    """Lines of at most `width`, all but the first of them indented."""
    return textwrap.fill(text, width, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False)
