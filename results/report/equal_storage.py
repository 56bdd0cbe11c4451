"""The best recipe for each number of stored bits, beside the best other one that needs as many."""

from __future__ import annotations

from typing import Any

import numpy as np

from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import called, changed, changed_with
from fp4dse.results.report.page import table
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.stats.recipes.equal_cost import TOLERANCE
from fp4dse.results.stats.recipes.margins import margin_text
from fp4dse.results.text.labels import Labels
from fp4dse.results.text.ratios import noun

QUERIES = ("FROM matched",)
ABOUT = f"""A format with finer blocks stores more bits, so it should win. Here each number of stored bits per operand
element has its own winner, and beside it the best other recipe that needs as many, up to {100 * TOLERANCE:g} %.
Difference: the winner's loss against that one's, with its 95 % interval."""
MOST = 20
VERDICTS = {
    "lower": "better",
    "higher": "worse",
    "same": "the same within {margin}",
    "open": "not told apart",
}


@for_each_setting
def storage(found: Findings) -> str:
    """A table per setting (HTML): a line for each number of bits, fewest first."""
    best = found.matched.sort_values(["value", "gap"], kind="stable").drop_duplicates("value").head(MOST)
    rows = [_row(line, found.labels) for line in best.to_dict("records")]
    columns = [
        ("bits", "n"),
        ("best recipe", "label"),
        (f"{noun()} against BF16", "n"),
        ("best other of as many bits", "label"),
    ]
    columns += [("difference", "n"), ("verdict", "")]
    return table(columns, rows) if rows else "<p>No recipe that quantizes has a gap here.</p>"


def _row(line: dict[str, Any], labels: Labels) -> list[tuple[str, object]]:
    bits, gap = line["value"], line["gap"]
    best = called(line["label"], labels)
    row: list[tuple[str, object]] = [(f"{bits:.4g}", bits), (best, line["label"]), (changed(gap), gap)]
    if not line["rivals"]:
        return [*row, ("none", ""), ("–", None), ("alone", "alone")]
    finite = np.isfinite(line["difference"])
    size = changed_with(*(line[name] for name in ("difference", "low", "high"))) if finite else "–"
    verdict = VERDICTS.get(line["verdict"], line["verdict"]).format(margin=margin_text(line["margin"]))
    known = line["difference"] if np.isfinite(line["difference"]) else None
    return [*row, (called(line["rival_label"], labels), line["rival_label"]), (size, known), (verdict, verdict)]


PANEL = Panel("storage", "Storage", "At equal storage", storage, QUERIES, ABOUT)
