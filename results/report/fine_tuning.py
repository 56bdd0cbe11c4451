"""The share that each way of fine-tuning gives back of what rounding to nearest loses."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import called
from fp4dse.results.report.page import table
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.stats.techniques.recovered import BASE
from fp4dse.results.text.labels import Labels

QUERIES = ("FROM recovered",)
ABOUT = """Rounding to nearest after training loses something, and training on with the same quantizers gives a share of
it back: of the distance to the <b>base</b>, the same weights in BF16, and of that to <b>BF16</b> that was trained on as
long. In brackets 95 % intervals (Fieller's): both ends of a share are means over seeds. All of a table begin with the
weights that stand above it: of weights that were given, intervals are over orders of data alone, and where these were
fitted to their quantizers, what that gave back is not in a share. Where nothing was lost there is no share (–)."""


def shares(found: Findings) -> str:
    """A table per setting (HTML), the largest share first; empty where nothing is rounded without training."""
    return _of_setting(found) if len(found.recovered) else ""


@for_each_setting
def _of_setting(found: Findings) -> str:
    rows = [_row(line, found.labels) for line in found.recovered.to_dict("records")]
    columns = [("recipe", "label"), ("of the base", "n"), ("of BF16", "n"), ("loss", "n"), ("rounded", "n")]
    columns += [("seeds", "n"), ("overhead", "n")]
    if not rows:
        return "<p>Nothing was rounded without training here.</p>"
    return f"<p>Measured from {_of_start(found.recovered['start'].iloc[0])}.</p>{table(columns, rows)}"


def _of_start(start: str) -> str:
    if start == BASE:
        return "the task's own base, rounded to nearest"
    return f"<b>{escape(start)}</b>, given by <code>--from</code>, rounded as it is"


def _row(line: dict[str, Any], labels: Labels) -> list[tuple[str, object]]:
    row: list[tuple[str, object]] = [(called(line["label"], labels), line["label"])]
    row += [(_share(line, name), line[name]) for name in ("of_base", "of_bf16")]
    row += [(f"{line[name]:.4g}", line[name]) for name in ("loss", "ptq")]
    return [*row, (str(line["pairs"]), line["pairs"]), (f"{line['overhead']:.2f}", line["overhead"])]


def _share(line: dict[str, Any], name: str) -> str:
    value, low, high = (float(line[f"{name}{end}"]) for end in ("", "_low", "_high"))
    if not math.isfinite(value):
        return "–"
    if math.isnan(low):
        return f"{value:.0%}"
    between = f"{low:.0%} to {high:.0%}" if math.isfinite(low) else "open"
    return f"{value:.0%} ({between})"


PANEL = Panel("recovered", "Recovered", "What fine-tuning gives back", shares, QUERIES, ABOUT)
