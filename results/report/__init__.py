"""The report: what won, how sure that is, what it cost, and what was run where, as one HTML file.

One module a section; the first screen is the answer beside its chart. `findings` works everything out, by the functions
that the views of `fp4dse query` call, and each section ends with the queries that print its numbers. The page's script
is in page.js and explore.js.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import pandas as pd

from fp4dse.dse import StoreError
from fp4dse.results.report import (
    answer,
    curves,
    equal_storage,
    explore,
    heatmaps,
    highlights,
    paper_figures,
    provenance,
    recorded_losses,
    techniques,
)
from fp4dse.results.report.findings import COLUMNS, Findings, findings
from fp4dse.results.report.markup import many, number, section
from fp4dse.results.report.operand_errors import ABOUT as ABOUT_SLOTS
from fp4dse.results.report.operand_errors import COMMAND as SLOT_COMMAND
from fp4dse.results.report.operand_errors import Statistics, slots
from fp4dse.results.report.page import page
from fp4dse.results.stats.intervals import CONFIDENCE
from fp4dse.results.store.atomic import write_atomic
from fp4dse.results.store.spaces import spaces, store_name
from fp4dse.results.store.store import Store

__all__ = ["write_figures", "write_report"]

ORDER = ["task", "preset", "run_id"]
"""The order of rows that reports are made in, so that those of equal rows are equal, whichever files hold them."""


def write_report(
    store: Store,
    path: str | Path,
    title: str | None = None,
    statistics: Statistics | None = None,
) -> None:
    """Write the report of a store to `path`, an HTML file that needs no network.

    title: by default what the space that was swept last asks, else the store's name. statistics: what a quantizer does
    to a bell curve (see slots.Statistics); without it the report has no such section. StoreError if the store holds no
    runs or the file cannot be written.
    """
    found = read_findings(store)
    names = spaces(store)
    asks = title or next(reversed(names.values()), "") or store_name(store)
    name = "" if title else ", ".join(names) or "store"
    html = page(asks, _body(store, found, asks, name, statistics), ("explore.js",))
    write_atomic(Path(path), html.encode())


def write_figures(store: Store, folder: str | Path, form: str = "pdf") -> list[Path]:
    """The report's pictures as files for a paper; returns their paths. See paper_figures.write_figures."""
    return paper_figures.write_figures(read_findings(store), store, folder, form)


def read_findings(store: Store) -> Findings:
    """Everything that the report of a store says. StoreError if the store holds no runs."""
    runs = store.runs(COLUMNS, categories=True)
    if runs.empty:
        raise StoreError(f"{store.path}: nothing to report, the store holds no runs")
    return findings(runs.sort_values(ORDER, ignore_index=True))  # sums depend on the order, and that on the files


def _body(store: Store, found: Findings, title: str, name: str, statistics: Statistics | None) -> str:
    def ask(queries: Iterable[str]) -> list[str]:
        where = shlex.quote(str(store.path))
        return [f"fp4dse query {shlex.quote(query)} --store {where}" for query in queries]

    axes = [query.format(axis=axis) for query in explore.QUERIES for axis in found.axes if "{axis}" in query]
    fronts = [query for query in explore.QUERIES if "{axis}" not in query]
    front = found.recipes.loc[found.recipes["on_front"], "config_id"].unique()
    texts = store.recipe_texts(list(front))
    sections = {
        "Answer": section("", explore.first_screen(answer.answers(found)), ask(answer.QUERIES), name="answer"),
        "Recipes": section("All recipes", explore.listing(found), ask((*fronts, *axes)), name="trade-off"),
        "Helps": section(
            "What helps, what harms", highlights.said(found), ask(highlights.QUERIES), highlights.ABOUT, "said"
        ),
        "Techniques": section(
            "What each technique does",
            techniques.techniques(found),
            ask(techniques.QUERIES),
            techniques.ABOUT,
            "techniques",
        ),
        "Interactions": section(
            "Which techniques work together",
            heatmaps.interactions(found),
            ask(heatmaps.INTERACTIONS),
            heatmaps.ABOUT_INTERACTIONS,
            "interactions",
        ),
        "Storage": section(
            "At equal storage", equal_storage.storage(found), ask(equal_storage.QUERIES), equal_storage.ABOUT, "storage"
        ),
        "Divergence": section(
            "What diverged",
            heatmaps.divergences(found),
            ask(heatmaps.DIVERGENCE),
            heatmaps.ABOUT_DIVERGENCE,
            "divergence",
        ),
        "Curves": section(
            "Loss curves of the front", curves.curves(found, store), ask(curves.QUERIES), curves.ABOUT, "curves"
        ),
    }
    if statistics:
        command = f"python -c {shlex.quote(SLOT_COMMAND.format(path=str(store.path)))}"
        sections["Operands"] = section(
            "Error of each operand", slots(found, texts, statistics), [command], ABOUT_SLOTS, "slots"
        )
    recorded = recorded_losses.recorded(found, store)
    if len(recorded):
        body = recorded_losses.lost(found, recorded)
        sections["Clipped"] = section(
            "What operands lost in training", body, ask(recorded_losses.QUERIES), recorded_losses.ABOUT, "lost"
        )
    machines = provenance.where(found.runs)
    sections["Machines"] = section("What was run where", machines, ask(provenance.WHERE), name="machines")
    sections["Again"] = section(
        "How to run it again", provenance.again(found, texts), ask(provenance.AGAIN), name="again"
    )
    links = "".join(f'<a href="#{html.split(chr(34), 2)[1]}">{name}</a>' for name, html in sections.items())
    head = f'<header><p class="overline">{_scope(found, name)}</p><h1>{escape(title)}</h1></header>'
    return f"{head}{explore.controls(found)}<nav>{links}</nav>" + "\n".join(sections.values()) + _HOW_TO_READ


_HOW_TO_READ = f"""
<section><h2>How to read this</h2>
<p>Losses are <b>held-out losses with the quantizers on</b>. Recipe and BF16 are paired: in a seed both start from the
same weights and see the same data in the same order. A loss is shown against BF16's: a change in %, or from half and
twice on the ratio, × 2.4; queries and files hold its logarithm, the <b>gap</b>. Intervals are {CONFIDENCE:.0%} over the
paired seeds. <b>Points</b> count the techniques that a recipe switches on, with one for FP4 itself (arXiv 2509.17791).
A recipe is on the <b>front</b> if no other recipe that quantizes has a lower loss for as little overhead, or less
overhead for as low a loss. Its <b>chance</b> of the front is the share of 1,000 draws in which it is there, when every
gap is drawn anew from what its seeds say about it. The <b>noise floor</b> is how far BF16 is from BF16 when nothing but
the seed differs.</p>
<p>The front is made of the luckiest recipes as well as of the best: with many recipes and few seeds the lowest loss is
lower than it would be on new seeds.</p></section>"""


def _scope(found: Findings, name: str) -> str:
    """What was run, in one line (HTML)."""
    runs: pd.DataFrame = found.runs
    statuses = runs["status"].value_counts()
    recipes = runs.loc[~runs["is_baseline"], "config_id"].nunique()
    parts = [f"<b>{escape(name)}</b>"] if name else []
    parts += [many(recipes, "recipe"), many(runs["task"].nunique(), "task"), many(len(runs), "trained lane")]
    counts = ((status, int(statuses.get(status, 0))) for status in ("diverged", "failed"))
    parts += [f"{number(count)} {status}" for status, count in counts if count]
    return f"{' · '.join(parts)} · {datetime.now(UTC):%Y-%m-%d}"
