"""Numbers, changes of the loss and names of recipes as HTML.

Every number in the text is a `<data value>` with all its digits. Under each panel stand the commands whose answers hold
these values; a test runs them and compares.
"""

from __future__ import annotations

import re
from html import escape

from fp4dse.results.text.labels import Labels
from fp4dse.results.text.ratios import change, change_range, ends

_PLAIN = re.compile(r"(?<![\w.±])\d+(?:\.\d+)?(?:e-\d+)?(?![\w%])(?!\.\d)(?! %)")


def number(value: float, text: str | None = None) -> str:
    """A number (HTML) with what the reader sees; by default in full."""
    return f'<data value="{float(value)!r}">{escape(text if text is not None else f"{value:,}")}</data>'


def changed(log_ratio: float) -> str:
    """A log ratio of losses (HTML) as a person reads it: `+0.62 %`, `× 11.4` (see ratios.py)."""
    return number(log_ratio, typeset(change(log_ratio)))


def typeset(text: str) -> str:
    """The text with a true minus, and no break before %."""
    return text.replace("-", "−").replace(" ", "\u00a0")


def spoken(sentence: str) -> str:
    """A sentence as HTML. Its numbers are counts and learning rates, so their digits in the text are all
    there are; shares in % and names, such as language:0.4M, stay as they are."""
    return _PLAIN.sub(lambda found: number(float(found[0]), found[0]), escape(sentence, quote=False))


def called(label: str, labels: Labels) -> str:
    """A recipe by its short label (HTML), the whole one where a mouse points at it."""
    return f'<span title="{escape(label)}">{escape(labels.of(label))}</span>'


def many(count: float, word: str) -> str:
    """`1 seed`, `3 seeds` (HTML)."""
    return f"{number(count, f'{count:,.0f}')} {word}{'' if count == 1 else 's'}"


def interval(mean: float, low: float, high: float) -> str:
    """`+0.10 to +0.30 %` (HTML), in the unit that suits the mean; empty if it is not known."""
    texts = change_range(mean, low, high).split(" to ")
    if not texts[0]:
        return ""
    return " to ".join(number(v, typeset(text)) for v, text in zip(ends(low, high), texts, strict=True))


def changed_with(mean: float, low: float, high: float) -> str:
    """`+0.20 % (+0.10 to +0.30 %)` (HTML); without the bracket if a bound is NaN."""
    bounds = interval(mean, low, high)
    return f"{changed(mean)} ({bounds})" if bounds else changed(mean)
