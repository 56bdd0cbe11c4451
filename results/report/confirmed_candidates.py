"""The candidates on the seeds that chose them, beside what fresh seeds say of them."""

from __future__ import annotations

import math
from typing import Any

from fp4dse.results.report.equal_storage import VERDICTS
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import called, changed, changed_with
from fp4dse.results.report.page import table
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.stats.recipes.candidates import REACH
from fp4dse.results.text.labels import Labels

QUERIES = ("FROM confirmed",)
ABOUT = f"""A recipe is a candidate unless one that costs no more is better by more than {REACH:g} standard errors of
their difference. <b>Screened</b> is its loss against BF16 on the seeds of the sweep, which chose the candidates;
<b>confirmed</b> that on fresh seeds, and <b>moved</b> the difference: luck that did not last is above zero. The first
half of the fresh seeds chose the recipe to use (marked); the <b>estimate</b> is of the other half alone, and so is the
last column, which holds each candidate against the marked one."""


def candidates(found: Findings) -> str:
    """A table per setting (HTML), the lowest confirmed loss first; empty where nothing was confirmed."""
    return _of_setting(found) if len(found.confirmed) else ""


@for_each_setting
def _of_setting(found: Findings) -> str:
    rows = [_row(line, found.labels) for line in found.confirmed.to_dict("records")]
    columns = [("candidate", "label"), ("screened", "n"), ("confirmed", "n"), ("moved", "n"), ("estimate", "n")]
    columns.append(("against the marked one", ""))
    return table(columns, rows) if rows else "<p>Nothing was confirmed here.</p>"


def _row(line: dict[str, Any], labels: Labels) -> list[tuple[str, object]]:
    name = called(line["label"], labels)
    row: list[tuple[str, object]] = [(f"<b>{name}</b> ★" if line["recommended"] else name, line["label"])]
    row.append(_cell(line, "screened", "screened_low", "screened_high"))
    if math.isinf(line["gap"]):
        return [*row, ("diverged", None), ("–", None), ("–", None), ("diverged", "diverged")]
    row += [_cell(line, "gap", "gap_low", "gap_high"), _cell(line, "moved"), _cell(line, "estimate", "low", "high")]
    verdict = "the recipe to use" if line["recommended"] else VERDICTS.get(line["verdict"], "–")
    return [*row, (verdict, verdict)]


def _cell(line: dict[str, Any], name: str, low: str | None = None, high: str | None = None) -> tuple[str, object]:
    value = float(line[name])
    if not math.isfinite(value):
        return "–", None
    return (changed_with(value, line[low], line[high]) if low and high else changed(value)), value


PANEL = Panel("confirmed", "Confirmed", "Screened and confirmed", candidates, QUERIES, ABOUT)
