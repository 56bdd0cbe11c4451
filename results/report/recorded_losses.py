"""The panel of clipped and flushed shares of each operand in training, for recipes on a front.

It shows what `sweep --record` stored, and is left out where nothing was recorded.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from fp4dse.dse.stages import SLOTS
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import called, number
from fp4dse.results.report.operand_errors import MOST
from fp4dse.results.report.page import table
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.stats.paired import SETTING, at_best_lr, outcomes
from fp4dse.results.stats.stages import screened
from fp4dse.results.text.labels import Labels

SHARES = ("flushed", "clipped")
NOISE = "gnr"
THRESHOLD = math.sqrt(3)
"""Of the gradient-to-noise ratio (2505.19115): below, the backward pass is better not quantized."""
QUERIES = (
    "SELECT task, preset, device_class, config_id, lr, name, step, avg(value) AS mean FROM recorded JOIN runs USING "
    "(run_id) WHERE status = 'done' AND stage IS NULL AND config_id IN (SELECT config_id FROM recipes WHERE on_front) "
    "AND (name = 'gnr' OR name LIKE 'flushed/%' OR name LIKE 'clipped/%') GROUP BY ALL",
    "SELECT task, preset, device_class, config_id, lr, count(*) FILTER (mean < sqrt(3)) AS below, count(mean) AS steps "
    "FROM (SELECT task, preset, device_class, config_id, lr, step, avg(value) AS mean FROM recorded JOIN runs USING "
    "(run_id) WHERE status = 'done' AND name = 'gnr' GROUP BY ALL) GROUP BY ALL",
)
ABOUT = """Share of a slot's elements, in %, that became zero though they were not (<b>flushed</b>) and that lay beyond
the largest value of their block (<b>clipped</b>), all layers together, mean over seeds. The number is that of the last
step; the bars before it are the recorded steps, all on one scale. A dash: the slot has no block scale.
<b>Gradient/noise</b> is the norm of the gradient relative to the change that the backward quantizers make to it, at the
last step, with the number of recorded steps at which it is below √3: the rule of arXiv 2505.19115 is not to quantize
the backward pass there. Recipes of the front, the cheapest first."""


def recorded(found: Findings) -> pd.DataFrame:
    """SETTING, config_id, label, name, step, mean over seeds: what the front's recipes recorded at their best learning
    rates, cheapest first. No line where nothing was recorded."""
    front = found.front.groupby("setting", sort=False).head(MOST)[["setting", *SETTING, "config_id", "label"]]
    runs = screened(found.runs)
    runs = runs[at_best_lr(outcomes(runs)) & runs["status"].eq("done")]
    chosen = front.merge(runs[[*SETTING, "config_id", "run_id"]], on=[*SETTING, "config_id"])
    lines = [
        (run_id, name, step, value)
        for run_id, of in found.store.recorded(list(chosen["run_id"])).items()
        for name, values in of.items()
        if name == NOISE or name.startswith(tuple(f"{share}/" for share in SHARES))
        for step, value in zip(of["step"], values, strict=True)
    ]
    long = chosen.merge(pd.DataFrame(lines, columns=["run_id", "name", "step", "mean"]), on="run_id")
    keys = ["setting", *SETTING, "config_id", "label", "name", "step"]
    return long.groupby(keys, sort=False)["mean"].mean().reset_index().sort_values("setting", kind="stable")


def lost(found: Findings) -> str:
    """A table per setting (HTML): a line a recipe, a column a slot; empty where nothing was recorded."""
    lines = recorded(found)
    top = lines.loc[lines["name"].ne(NOISE), "mean"].max()

    @for_each_setting
    def of_setting(one: Findings) -> str:
        here = lines[lines["setting"].isin(one.recipes["setting"])]
        rows = [_row(part, top, found.labels) for _, part in here.groupby("config_id", sort=False)]
        if not rows:
            return "<p>No recipe of this front was trained with <code>--record</code>.</p>"
        columns = [("recipe", "label"), ("share", "fixed"), *((slot, "n") for slot in SLOTS), ("gradient/noise", "n")]
        steps = ", ".join(number(step, f"{step:g}") for step in sorted(here["step"].unique()))
        return table(columns, rows) + f'<p class="about">Recorded at the steps {steps}.</p>'

    return of_setting(found) if len(lines) else ""


def _row(part: pd.DataFrame, top: float, labels: Labels) -> list[tuple[str, object]]:
    """Cells of one recipe."""
    series = {str(name): of.sort_values("step") for name, of in part.groupby("name")}
    label = str(part["label"].iloc[0])
    cells: list[tuple[str, object]] = [(called(label, labels), label), ("<br>".join(SHARES), None)]
    for slot in SLOTS:
        pair = [(word, series.get(f"{word}/{slot}")) for word in SHARES]
        known = [(word, of) for word, of in pair if of is not None and of["mean"].notna().any()]
        html = "<br>".join(f"{_strip(of, top)} {_share(of)} %" for _, of in known)
        cells.append((html or "–", _last(known[0][1]) if known else None))
    noise = series.get(NOISE)
    if noise is None or noise["mean"].isna().all():
        return [*cells, ("–", None)]
    known = noise["mean"].dropna()
    below = int(known.lt(THRESHOLD).sum())
    steps = f"{number(below)} of {number(len(known))} steps below √3"
    return [
        *cells,
        (f'{number(_last(noise), f"{_last(noise):.3g}")} <span class="muted">({steps})</span>', _last(noise)),
    ]


def _last(of: pd.DataFrame) -> float:
    return float(of["mean"].dropna().iloc[-1])


def _share(of: pd.DataFrame) -> str:
    return number(_last(of), f"{100 * _last(of):.1f}")


def _strip(of: pd.DataFrame, top: float) -> str:
    """A bar for each step; their values stand in the title."""
    says = ", ".join(f"step {s:g}: {100 * m:.1f} %" for s, m in zip(of["step"], of["mean"], strict=True))
    heights = np.nan_to_num(100 * of["mean"].to_numpy() / top) if top > 0 else np.zeros(len(of))
    bars = "".join(f'<i style="height:{height:.0f}%"></i>' for height in heights)
    return f'<span class="strip" title="{says}">{bars}</span>'


PANEL = Panel("lost", "Clipped", "What operands lost in training", lost, QUERIES, ABOUT)
