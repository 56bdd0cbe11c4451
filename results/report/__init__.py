"""The report: the best recipe, how sure that is, its cost, and the machines, as one HTML file.

Each panel is a module; the first screen is the answer beside its chart. `findings` computes everything, with the same
functions as the views of `fp4dse query`, and each panel ends with the queries that print its numbers. The scripts of
the page are page.js and explore.js.
"""

from __future__ import annotations

from datetime import UTC, datetime
from html import escape
from pathlib import Path

from fp4dse.dse import StoreError
from fp4dse.results.report import (
    answer,
    confirmed_candidates,
    curves,
    equal_storage,
    explore,
    fine_tuning,
    heatmaps,
    highlights,
    layer_sensitivity,
    operand_errors,
    paper_figures,
    provenance,
    recorded_losses,
    rollout_curves,
    rollout_treatments,
    techniques,
)
from fp4dse.results.report.findings import COLUMNS, Findings, Statistics, findings
from fp4dse.results.report.markup import many, number
from fp4dse.results.report.page import page
from fp4dse.results.stats.estimates.intervals import CONFIDENCE
from fp4dse.results.store.atomic import write_atomic
from fp4dse.results.store.spaces import spaces, store_name
from fp4dse.results.store.store import Store

__all__ = ["write_figures", "write_report"]

PANELS = (
    answer.PANEL,
    confirmed_candidates.PANEL,
    fine_tuning.PANEL,
    explore.PANEL,
    layer_sensitivity.PANEL,
    highlights.PANEL,
    techniques.PANEL,
    heatmaps.INTERACTIONS,
    equal_storage.PANEL,
    heatmaps.DIVERGENCE,
    curves.PANEL,
    rollout_treatments.PANEL,
    rollout_curves.PANEL,
    operand_errors.PANEL,
    recorded_losses.PANEL,
    provenance.MACHINES,
    provenance.REPEAT,
)
"""The sections, in the order of the page."""

ORDER = ["task", "preset", "run_id"]
"""The order of rows that reports are made in, so that those of equal rows are equal, whichever files hold them."""


def write_report(
    store: Store,
    path: str | Path,
    title: str | None = None,
    statistics: Statistics | None = None,
) -> None:
    """Write the report of a store to `path`, an HTML file that needs no network.

    title: by default what the one space asks that was swept, else the name of the store. statistics: the effect of a
    quantizer on a bell curve (see findings.Statistics); without it the report has no such section. StoreError if the
    store holds no runs or the file cannot be written.
    """
    found = read_findings(store, statistics)
    names = spaces(store)
    only = next(iter(names.values())) if len(names) == 1 else ""
    asks = title or only or store_name(store)
    name = "" if title else ", ".join(names) or "store"
    html = page(asks, _body(found, asks, name), ("explore.js",))
    write_atomic(Path(path), html.encode())


def write_figures(store: Store, folder: str | Path, form: str = "pdf") -> list[Path]:
    """The report's pictures as files for a paper; returns their paths. See paper_figures.write_figures."""
    paper_figures.check_form(form)  # before the store is read, which takes longer
    return paper_figures.write_figures(read_findings(store), folder, form)


def read_findings(store: Store, statistics: Statistics | None = None) -> Findings:
    """The findings of a store's runs. StoreError if the store holds no runs."""
    runs = store.runs(COLUMNS, categories=True)
    if runs.empty:
        raise StoreError(f"{store.path}: nothing to report, the store holds no runs")
    rows = runs.sort_values(ORDER, ignore_index=True)  # sums depend on the order, and that on the files
    return findings(rows, store, statistics)


def _body(found: Findings, title: str, name: str) -> str:
    shown = {panel: html for panel in PANELS if (html := panel.html(found))}
    links = "".join(f'<a href="#{panel.name}">{panel.link}</a>' for panel in shown)
    shared = f'<p class="about">{escape(text)}.</p>' if (text := found.labels.says()) else ""
    head = f'<header><p class="overline">{_scope(found, name)}</p><h1>{escape(title)}</h1>{shared}</header>'
    return f"{head}{explore.controls(found)}<nav>{links}</nav>" + "\n".join(shown.values()) + _HOW_TO_READ


_HOW_TO_READ = f""" <section><h2>How to read this</h2> <p>Losses are <b>held-out losses with the quantizers on</b>,
and with rounding to nearest where training rounds by chance. Recipe and BF16 are paired: in a seed both start from the
same weights and see the same data in the same order. A loss is shown against BF16's: a change in %, or from half and
twice on the ratio, × 2.4; queries and files hold its logarithm, the <b>gap</b>. <b>Both in BF16</b> is the loss of the
same weights without quantizers, against BF16's. BF16 is also trained with every optimizer, clip, loss scale and
schedule that recipes here have: the effect of such a technique is what it does to FP4 beyond what it does to BF16.
Intervals are {CONFIDENCE:.0%} over the paired seeds. <b>Points</b> count the techniques that a recipe switches on,
with one for FP4 itself (arXiv 2509.17791). A recipe is on the <b>front</b> if no other recipe that quantizes, and not
BF16 itself, has a lower loss for as little overhead, or less overhead for as low a loss, under one assumption about
software at least (the <b>band</b> of an overhead has the best and the worst at its ends). Its <b>chance</b> of the
front is the share of 1,000 draws in which it is there, when every gap is drawn from what its seeds, its factors and
the other recipes say about it. The <b>noise floor</b> is how far BF16 is from BF16 when nothing but the seed
differs. The <b>time to BF16's loss</b> is the overhead times the tokens that make up for the gap, if more of them do
for a recipe what they do for BF16; what these are worth follows from BF16's own training, and where nothing tells it,
or four times the tokens would not do, there is none.</p>
<p>The front is made of the luckiest recipes as well as of the best: with many recipes and few seeds the lowest loss is
lower than it would be on new seeds. The loss beside the recommended recipe is the one that new seeds are expected to
give; losses in tables and charts are means of the seeds that were run.
Where candidates were <b>confirmed</b> on fresh seeds the answer is from those; all else on this page is of the screened
ones.</p></section>"""


def _scope(found: Findings, name: str) -> str:
    """One line (HTML) with the counts of recipes, tasks and lanes, and the date."""
    runs = found.runs
    statuses = runs["status"].value_counts()
    recipes = runs.loc[~runs["is_baseline"], "config_id"].nunique()
    parts = [f"<b>{escape(name)}</b>"] if name else []
    parts += [many(recipes, "recipe"), many(runs["task"].nunique(), "task"), many(len(runs), "trained lane")]
    counts = ((status, int(statuses.get(status, 0))) for status in ("diverged", "failed"))
    parts += [f"{number(count)} {status}" for status, count in counts if count]
    return f"{' · '.join(parts)} · {datetime.now(UTC):%Y-%m-%d}"
