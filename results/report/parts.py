"""The pieces that sections are made of: a number that can be looked up, and the queries that print it.

Every number in the text is a `<data value>` with all its digits. Under each section stand the commands whose answers
hold these values; a test runs them and compares.
"""

from __future__ import annotations

import math
from html import escape

from fp4dse.results.intervals import percent
from fp4dse.results.labels import Labels


def number(value: float, text: str | None = None) -> str:
    """A number (HTML) with what the reader sees; by default in full."""
    return f'<data value="{float(value)!r}">{escape(text if text is not None else f"{value:,}")}</data>'


def percents(value: float, sign: bool = True) -> str:
    """A log ratio or a share (HTML) as a number of %, without the sign of percent."""
    return number(value, percent(value).replace("-", "−") if sign else f"{100 * value:.2f}")


def called(label: str, labels: Labels) -> str:
    """A recipe by its short label (HTML), the whole one where a mouse points at it."""
    return f'<span title="{escape(label)}">{escape(labels.of(label))}</span>'


def many(count: float, word: str) -> str:
    """`1 seed`, `3 seeds` (HTML)."""
    return f"{number(count, f'{count:,.0f}')} {word}{'' if count == 1 else 's'}"


def interval(low: float, high: float) -> str:
    """`+0.10 to +0.30 %` (HTML), empty if it is not known."""
    return f"{percents(low)} to {percents(high)} %" if math.isfinite(low) and math.isfinite(high) else ""


def section(title: str, body: str, queries: list[str], about: str = "", name: str = "") -> str:
    """A section (HTML). queries: what to type, one command each; about: the section's plain introduction (HTML)."""
    kind = f' id="{name}"' if name else ""
    intro = f'<p class="about">{about}</p>' if about else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{intro}{body}{asked(queries)}</section>"


def asked(queries: list[str]) -> str:
    """The commands that print a section's numbers (HTML)."""
    if not queries:
        return ""
    lines = "".join(f"<pre><code>{escape(query)}</code></pre>" for query in queries)
    return f'<details class="asked"><summary>Where these numbers are from</summary>{lines}</details>'


def of_setting(setting: int, html: str) -> str:
    """What is shown only while this setting is chosen (HTML)."""
    hidden = " hidden" if setting else ""
    return f'<div class="of" data-setting="{setting}"{hidden}>{html}</div>'
