"""The report: what won, how sure that is, what it cost, and what was run where, as one HTML file.

One module a section. `findings` works everything out, by the functions that the views of `fp4dse query` call, and each
section ends with the queries that print its numbers. The page's script is in page.js and explore.js.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import pandas as pd

from fp4dse.dse import StoreError
from fp4dse.results.files import write_atomic
from fp4dse.results.intervals import CONFIDENCE
from fp4dse.results.page import page
from fp4dse.results.report import curves, explore, lost, machine, maps, paper, storage, techniques, words
from fp4dse.results.report.findings import COLUMNS, Findings, findings
from fp4dse.results.report.parts import many, number, section
from fp4dse.results.report.slots import ABOUT as ABOUT_SLOTS
from fp4dse.results.report.slots import COMMAND as SLOT_COMMAND
from fp4dse.results.report.slots import Statistics, slots
from fp4dse.results.store import Store

__all__ = ["write_figures", "write_report"]


def write_report(
    store: Store,
    path: str | Path,
    title: str = "FP4 recipes: quality against overhead",
    statistics: Statistics | None = None,
) -> None:
    """Write the report of a store to `path`, an HTML file that needs no network.

    statistics: what a quantizer does to a bell curve (see slots.Statistics); without it the report has no such section.
    StoreError if the store holds no runs or the file cannot be written.
    """
    found = read_findings(store)
    write_atomic(Path(path), page(title, _body(store, found, title, statistics), ("explore.js",)).encode())


def write_figures(store: Store, folder: str | Path, form: str = "pdf") -> list[Path]:
    """The report's pictures as files for a paper; returns their paths. See paper.write_figures."""
    return paper.write_figures(read_findings(store), store, folder, form)


def read_findings(store: Store) -> Findings:
    """Everything that the report of a store says. StoreError if the store holds no runs."""
    runs = store.runs(COLUMNS)
    if runs.empty:
        raise StoreError(f"{store.path}: nothing to report, the store holds no runs")
    return findings(runs)


def _body(store: Store, found: Findings, title: str, statistics: Statistics | None) -> str:
    def ask(queries: Iterable[str]) -> list[str]:
        where = shlex.quote(str(store.path))
        return [f"fp4dse query {shlex.quote(query)} --store {where}" for query in queries]

    several = len(found.titles) > 1
    axes = [query.format(axis=axis) for query in explore.QUERIES for axis in found.axes if "{axis}" in query]
    fronts = [query for query in explore.QUERIES if "{axis}" not in query]
    verdicts = "".join(words.verdict(found, i, name) for i, name in enumerate(found.titles.values()))
    says = _scope(found) + words.pooled(found) + verdicts + _HOW_TO_READ
    pooled = (words.POOLED,) if several else ()
    machines = machine.where(found.runs)
    sections = {
        "What came out": section("What came out", says, ask((*words.QUERIES, *pooled)), name="said"),
        "": explore.controls(found),
        "Trade-off": section(
            "Quality against overhead", explore.explorer(found), ask((*fronts, *axes)), name="trade-off"
        ),
        "Storage": section("At equal storage", storage.storage(found), ask(storage.QUERIES), storage.ABOUT, "storage"),
        "Techniques": section(
            "What each technique does",
            techniques.techniques(found),
            ask((*techniques.QUERIES, *pooled)),
            techniques.ABOUT,
            "techniques",
        ),
        "Interactions": section(
            "Which techniques work together",
            maps.interactions(found),
            ask(maps.INTERACTIONS),
            maps.ABOUT_INTERACTIONS,
            "interactions",
        ),
        "Divergence": section(
            "What diverged",
            maps.divergences(found),
            ask(maps.DIVERGENCE),
            maps.ABOUT_DIVERGENCE,
            "divergence",
        ),
        "Curves": section(
            "Loss curves of the front", curves.curves(found, store), ask(curves.QUERIES), curves.ABOUT, "curves"
        ),
    }
    if statistics:
        command = f"python -c {shlex.quote(SLOT_COMMAND.format(path=str(store.path)))}"
        sections["Operands"] = section(
            "Error of each operand", slots(found, statistics), [command], ABOUT_SLOTS, "slots"
        )
    recorded = lost.recorded(found, store)
    if len(recorded):
        body = lost.lost(found, recorded)
        sections["Clipped"] = section("What operands lost in training", body, ask(lost.QUERIES), lost.ABOUT, "lost")
    sections["Machines"] = section("What was run where", machines, ask(machine.WHERE), name="machines")
    sections["Again"] = section("How to run it again", machine.again(found), ask(machine.AGAIN), name="again")
    links = "".join(f'<a href="#{html.split(chr(34), 2)[1]}">{name}</a>' for name, html in sections.items() if name)
    head = f"<h1>{escape(title)}</h1><nav>{links}</nav>"
    return head + "\n".join(sections.values())


_HOW_TO_READ = f"""
<details><summary>How to read this</summary>
<p>The <b>gap</b> is log(validation loss / BF16 validation loss), in %: about the relative excess of the loss. Recipe
and BF16 are paired: in a seed both start from the same weights and see the same data in the same order, and each runs
at its own best learning rate of the same grid. Intervals are {CONFIDENCE:.0%} over the paired seeds. <b>Points</b>
count the techniques that a recipe switches on, with one for FP4 itself (arXiv 2509.17791). A recipe is on the
<b>front</b> if no other recipe that quantizes has a lower gap for as little overhead, or less overhead for as low a
gap. Its <b>chance</b> of the front is the share of 1,000 draws in which it is there, when every gap is drawn anew from
what its seeds say about it. The <b>noise floor</b> is how far BF16 is from BF16 when nothing but the seed differs.</p>
<p>The front is made of the luckiest recipes as well as of the best: with many recipes and few seeds the lowest gap is
lower than it would be on new seeds.</p></details>"""


def _scope(found: Findings) -> str:
    runs: pd.DataFrame = found.runs
    statuses = runs["status"].value_counts()
    recipes = runs.loc[~runs["is_baseline"], "config_id"].nunique()
    parts = [many(recipes, "recipe"), many(runs["task"].nunique(), "task"), many(len(runs), "trained lane")]
    parts += [f"{number(int(statuses.get(status, 0)))} {status}" for status in ("diverged", "failed")]
    for column, says in (("overhead_of", "step time modelled for"), ("measured_of", "emulated layers timed with")):
        if column in runs and runs[column].notna().any():
            models = "; ".join(sorted(runs[column].dropna().unique()))
            parts.append(f"{says} <code>{escape(models)}</code>")
    return f'<p class="muted">{", ".join(parts)}. Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC.</p>'
