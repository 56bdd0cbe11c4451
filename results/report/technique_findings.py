"""Sentences on techniques: helps, harms, depends on the rest, or nothing. Matched pairs decide.

The effect of a level is the mean over pairs of recipes that differ in nothing else. It is a finding if q, its p-value
adjusted for all techniques that are compared, is below 0.05 and most pairs agree. It is not one if one of the two
levels was tried with something that the other never met: E4M3 without a tensor scale against E8M0, which has none, says
nothing of NVFP4 against MXFP4."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import changed_with, many, number
from fp4dse.results.text.ratios import noun, written_in

AGREE = 0.8
"""Share of the pairs that have to gain, or lose, for a technique to help, or to harm."""
MOST = 3
"""Of each kind that are said."""


def standing(pairs: pd.DataFrame) -> pd.Series:
    """Per line of `marginal`: `helps`, `harms`, `depends` (most pairs do not agree), `partly` (the two levels were not
    tried with the same), or empty where chance explains it."""
    significant = pairs["q"].lt(0.05)
    better = pairs["difference"].lt(0)
    agree = pairs["helps"].where(better, 1 - pairs["helps"]).ge(AGREE)
    words = np.select(
        [~significant, pairs["untried"].ne(""), ~agree, better], ["", "partly", "depends", "helps"], default="harms"
    )
    return pd.Series(words, pairs.index, dtype=object)


def helps(found: Findings) -> list[str]:
    """Sentences (HTML) on the matched pairs of one setting, a list item each. found: of a setting."""
    pairs = found.marginal
    pairs = pairs.assign(standing=standing(pairs), size=pairs["difference"].abs())
    kinds = {kind: pairs[pairs["standing"].eq(kind)].sort_values("size", ascending=False) for kind in _STARTS}
    kinds["partly"] = kinds["partly"].sort_values("matches", ascending=False, kind="stable")  # the least partial first
    says = [
        f"<b>{start}</b>: {'; '.join(map(_effect, kinds[kind].head(MOST).to_dict('records')))}."
        for kind, start in _STARTS.items()
        if len(kinds[kind])
    ]
    if len(pairs) and not (len(kinds["helps"]) or len(kinds["harms"])):
        untold = "no single change of a technique is told apart from no change"
        if not pairs["untried"].eq("").any():
            untold = "cannot be said in general: no two levels of a technique were tried with all the same others"
        elif len(kinds["partly"]) or len(kinds["depends"]):
            untold = "no single change of a technique that was tried throughout does the same in most pairs"
        says.insert(0, f"<b>What helps</b>: {untold}.")
    return says


_STARTS = {
    "helps": "What helps",
    "harms": "What harms",
    "depends": "Depends on the rest of the recipe",
    "partly": "Tried in part only, so no general effect",
}


def everywhere(found: Findings) -> str:
    """The effects that hold in every task (HTML); empty with one setting."""
    if len(found.titles) < 2:
        return ""
    pairs = found.marginal.assign(standing=standing(found.marginal))
    says, split = [], []
    for (factor, level), lines in pairs.groupby(["factor", "level"], sort=False):
        kinds = set(lines["standing"])
        change = f"{_level(factor, level)} instead of {escape(str(lines['reference'].iloc[0]))}"
        if len(lines) == len(found.titles) and len(kinds) == 1 and kinds < {"helps", "harms"}:
            sizes = "; ".join(
                f"{escape(list(found.titles.values())[line['setting']])} {_in_its_unit(found, line)}"
                for line in lines.sort_values("setting").to_dict("records")
            )
            says.append((lines["difference"].abs().min(), f"<b>{change} {kinds.pop()}</b> in every task: {sizes}."))
        elif {"helps", "harms"} <= kinds:
            split.append(change)
    items = [text for _, text in sorted(says, reverse=True)]
    if split:
        items.append(f"<b>Helps in one task and harms in another</b>: {'; '.join(split)}.")
    body = f"<ul>{''.join(f'<li>{item}</li>' for item in items)}</ul>"
    nothing = "<p>No technique helps in every task, nor harms in every task, by more than chance.</p>"
    return f'<div class="verdict"><h3>In all tasks</h3>{body if says else nothing + (body if split else "")}</div>'


def _in_its_unit(found: Findings, line: dict[str, Any]) -> str:
    """The size of an effect (HTML) as its setting has it."""
    with written_in(found.verdicts[line["setting"]].unit):
        return changed_with(line["difference"], line["low"], line["high"])


def _effect(line: dict[str, Any]) -> str:
    """`X instead of Y: +1.00 % (…), 24 pairs` (HTML)."""
    size = changed_with(line["difference"], line["low"], line["high"])
    share = number(line["helps"], f"{100 * line['helps']:.0f} %")
    text = f"{_level(line['factor'], line['level'])} instead of {escape(str(line['reference']))}: {noun()} {size}, "
    text += f"{share} of {many(line['matches'], 'pair')} gain"
    if line["untried"]:
        text += f" (one of the two was never tried with <code>{escape(_some(line['untried']))}</code>)"
    return text


def _some(untried: str) -> str:
    first, *others = untried.split(", ")
    return f"{first} …" if others else first


def _level(factor: object, level: object) -> str:
    """A level as a space writes it (HTML)."""
    return f"<code>{escape(str(factor))} = {escape(str(level))}</code>"
