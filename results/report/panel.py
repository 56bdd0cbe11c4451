"""A panel: one section of the report, with the commands that print its numbers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from html import escape

import pandas as pd

from fp4dse.results.report.findings import Findings
from fp4dse.results.text.ratios import written_in


@dataclass(frozen=True)
class Panel:
    """A section of the report; it is left out where `body` is empty."""

    name: str
    """The anchor that links lead to."""
    link: str
    """The text of the link at the top of the page."""
    title: str
    body: Callable[[Findings], str]
    """HTML."""
    queries: tuple[str, ...] = ()
    """SQL whose answers hold the numbers; with `{axis}` it is asked for each overhead axis."""
    about: str = ""
    """The introduction, HTML."""
    code: str = ""
    """Python that prints the numbers where SQL cannot; `{path}` is the store's."""

    def html(self, found: Findings) -> str:
        """The section; empty if there is nothing to show."""
        body = self.body(found)
        if not body:
            return ""
        heading = f"<h2>{escape(self.title)}</h2>" if self.title else ""
        about = f'<p class="about">{self.about}</p>' if self.about else ""
        lines = "".join(f"<pre><code>{escape(command)}</code></pre>" for command in self.commands(found))
        asked = f'<details class="asked"><summary>Where these numbers are from</summary>{lines}</details>'
        return f'<section id="{self.name}">{heading}{about}{body}{asked}</section>'

    def commands(self, found: Findings) -> list[str]:
        """The shell commands that print the numbers of the panel."""
        path = str(found.store.path)
        plain = [query for query in self.queries if "{axis}" not in query]
        by_axis = [query.format(axis=axis) for query in self.queries if "{axis}" in query for axis in found.axes]
        asked = [f"fp4dse query {shlex.quote(query)} --store {shlex.quote(path)}" for query in [*plain, *by_axis]]
        return [*asked, *([f"python -c {shlex.quote(self.code.format(path=path))}"] if self.code else [])]


def for_each_setting(body: Callable[[Findings], str]) -> Callable[[Findings], str]:
    """Turns a body for one setting into the body of a panel; the page shows the part of the setting that is chosen."""

    @wraps(body)
    def bodies(found: Findings) -> str:
        return "".join(
            f'<div class="of" data-setting="{i}"{" hidden" if i else ""}>{_in_its_unit(body, one)}</div>'
            for i, one in enumerate(found.settings)
        )

    return bodies


def where_any(
    found: Findings, lines_of: Callable[[Findings], pd.DataFrame], shown: Callable[[pd.DataFrame], str], none: str
) -> str:
    """The body of a panel from the lines of each setting; empty where none has any. none: HTML for one without."""
    lines = [lines_of(one) for one in found.settings]
    if not any(len(of) for of in lines):
        return ""
    by_setting = iter(lines)

    @for_each_setting
    def of_setting(_: Findings) -> str:
        here = next(by_setting)
        return shown(here) if len(here) else none

    return of_setting(found)


def _in_its_unit(body: Callable[[Findings], str], one: Findings) -> str:
    """A body for one setting, whose gaps are in the setting's unit."""
    with written_in(one.verdicts[0].unit):
        return body(one)
