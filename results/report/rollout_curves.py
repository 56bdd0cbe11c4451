"""Curves of reinforcement learning side by side: reward, divergence, entropy, and the parts of the weights' error.

They show what `sweep --record` stored of BF16 and of recipes on a front, and are left out where nothing of it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.report.curves import MOST
from fp4dse.results.report.figures import AXIS, COLOURS, DASHES, LAYOUT, numbers, wrapped
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.page import plot
from fp4dse.results.report.panel import Panel, where_any
from fp4dse.results.stats.paired import at_best_lr, outcomes
from fp4dse.results.stats.recorded import at_common_steps, steps_of
from fp4dse.results.stats.stages import screened

SERIES = {
    "reward": "reward",
    "mismatch_kl": "KL, rollout to trainer",
    "entropy": "entropy",
    "weight_error/scale": "weights: scale bias",
    "weight_error/dead": "weights: dead zone",
    "weight_error/grid": "weights: grid noise",
}
"""Name of what was recorded -> title of its plot, three in a row."""
COLUMNS = 3
NAMES = ", ".join(f"'{name}'" for name in SERIES)
QUERIES = (
    "SELECT task, preset, config_id, lr, name, step, avg(value) AS mean FROM recorded JOIN runs USING (run_id) WHERE "
    f"status = 'done' AND stage IS NULL AND name IN ({NAMES}) GROUP BY ALL ORDER BY ALL",
)
ABOUT = f"""Reward, divergence and entropy (nats a token) of the last rollout before a step, and the error of the
rollout's weights relative to the weights, in parts that add up to it with their cross terms; of BF16 and of up to
{MOST} recipes on the front, the cheapest first, at their best learning rates. Lines are means over seeds, at the steps
that all of these lanes recorded."""


def curves(found: Findings) -> str:
    """A figure per setting (HTML); empty where nothing was recorded of a rollout."""
    nothing = "<p>Nothing was recorded of rollouts here.</p>"
    return where_any(found, recorded, lambda lines: plot(figure(lines), ""), nothing)


def recorded(found: Findings) -> pd.DataFrame:
    """recipe (as the legend has it), name, step and mean over seeds, of one setting, in the order of the legend."""
    names = dict.fromkeys(found.recipes.loc[found.recipes["is_baseline"], "config_id"], "BF16")
    front = found.front.head(MOST)
    names |= {key: found.labels.of(label) for key, label in zip(front["config_id"], front["label"], strict=True)}
    runs = screened(found.runs)
    chosen = runs[at_best_lr(outcomes(runs)) & runs["config_id"].isin(list(names)) & runs["status"].eq("done")]
    of_run = chosen.set_index("run_id")["config_id"]
    stored = {run_id: of for run_id, of in found.store.recorded(list(of_run.index)).items() if "reward" in of}
    arrays = [{name: np.array(values, float) for name, values in of.items()} for of in stored.values()]
    lines = [
        (of_run[run_id], name, step, value)
        for run_id, of in zip(stored, at_common_steps(arrays, [True] * len(arrays), SERIES.__contains__), strict=True)
        for name in SERIES
        if name in of
        for step, value in zip(steps_of(of, name), of[name], strict=True)
        if np.isfinite(value)
    ]
    long = pd.DataFrame(lines, columns=["config_id", "name", "step", "mean"])
    long = long.groupby(["config_id", "name", "step"], sort=False)["mean"].mean().reset_index()
    order = {key: i for i, key in enumerate(names)}
    long = long.sort_values(["config_id", "step"], key=lambda of: of.map(order) if of.name == "config_id" else of)
    return long.assign(recipe=long["config_id"].map(names))


def figure(lines: pd.DataFrame) -> dict[str, Any]:
    """A plot for each of SERIES that there is, as plain Plotly data. lines: of `recorded`."""
    shown = [name for name in SERIES if lines["name"].eq(name).any()]
    rows = -(-len(shown) // COLUMNS)
    traces, layout = (
        [],
        {**LAYOUT, "height": 60 + 230 * rows, "legend": {"orientation": "h", "y": -0.12, "yanchor": "top"}},
    )
    annotations = []
    for place, name in enumerate(shown):
        row, column, end = place // COLUMNS, place % COLUMNS, str(place + 1) if place else ""
        across = [(column + 0.14) / COLUMNS, (column + 0.98) / COLUMNS]
        down = [1 - (row + 0.8) / rows, 1 - (row + 0.1) / rows]
        layout[f"xaxis{end}"] = {**AXIS, "domain": across, "anchor": f"y{end}", "title": {"text": "step"}}
        layout[f"yaxis{end}"] = {**AXIS, "domain": down, "anchor": f"x{end}", "tickformat": "~g", "rangemode": "tozero"}
        annotations.append(
            {"text": SERIES[name], "xref": "paper", "yref": "paper", "x": across[0], "y": down[1], "showarrow": False}
            | {"xanchor": "left", "yanchor": "bottom"}
        )
        for i, recipe in enumerate(lines["recipe"].unique()):
            part = lines[lines["name"].eq(name) & lines["recipe"].eq(recipe)]
            colour = "var(--fg)" if recipe == "BF16" else f"var(--c{(i - 1) % COLOURS})"
            line = {"color": colour, "width": 2, "dash": DASHES[i % len(DASHES)]}
            traces.append(
                {"type": "scatter", "mode": "lines", "legendgroup": recipe, "name": wrapped(recipe), "line": line}
                | {"showlegend": place == 0, "xaxis": f"x{end}", "yaxis": f"y{end}"}
                | {"x": numbers(part["step"]), "y": numbers(part["mean"]), "hovertemplate": "step %{x}: %{y:.4g}"}
            )
    return {"data": traces, "layout": {**layout, "annotations": annotations}}


PANEL = Panel("rollouts", "Rollouts", "Rollouts in training", curves, QUERIES, ABOUT)
