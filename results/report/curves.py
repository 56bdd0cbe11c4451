"""Loss against step for BF16 and the members of the front: the mean over seeds, and the band from lowest to highest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.report.figures import AXIS, COLOURS, DASHES, LAYOUT, numbers, wrapped
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.page import plot
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.stats.paired import at_best_lr, outcomes
from fp4dse.results.stats.stages import screened

QUERIES = ("SELECT config_id, task, seed, curve_step, curve_loss FROM runs JOIN curves USING (run_id)",)
MOST = 8
"""Members of the front that are drawn."""
ABOUT = f"""Training loss of BF16 and of recipes on the front, the cheapest first, at their best learning rates; of more
than {MOST}, as many from the cheapest to the dearest. Line: mean over seeds. Band: lowest to highest seed."""


@for_each_setting
def curves(found: Findings) -> str:
    """A figure per setting (HTML)."""
    lines = front_curves(found)
    return plot(curves_figure(lines), "") if len(lines) else "<p>The store holds no curves of these recipes.</p>"


def front_curves(found: Findings) -> pd.DataFrame:
    """name, curve_step, curve_loss of the baseline and the front at their best learning rates. found: of a setting."""
    front = found.front
    if len(front) > MOST:
        front = front.iloc[np.linspace(0, len(front) - 1, MOST).round().astype(int)]
    names = {
        config_id: found.labels.of(label) for config_id, label in zip(front["config_id"], front["label"], strict=True)
    }
    names = {**dict.fromkeys(found.recipes.loc[found.recipes["is_baseline"], "config_id"], "BF16"), **names}
    runs = screened(found.runs)
    chosen = runs[at_best_lr(outcomes(runs)) & runs["config_id"].isin(list(names)) & runs["status"].eq("done")]
    lines = found.store.curves(list(chosen["run_id"])).merge(chosen[["run_id", "config_id"]])
    lines = lines[lines["curve_step"].str.len().gt(0)]
    lines = lines.assign(name=lines["config_id"].map(names))
    order = {config_id: i for i, config_id in enumerate(names)}
    place = lines["config_id"].astype(object).map(order)  # a categorical would be sorted by its categories
    return lines.iloc[np.argsort(place.to_numpy(), kind="stable")]


def curves_figure(curves: pd.DataFrame) -> dict[str, Any]:
    """Training loss against step, the mean over seeds as a line, lowest to highest seed as a band.

    curves: rows with `name` (what the legend says, in the order of drawing; the first is the baseline), curve_step
    and curve_loss.
    """
    by_step = over_seeds(curves)
    traces = []
    for i, name in enumerate(curves["name"].unique()):
        part = by_step[by_step["name"].eq(name)].sort_values("step")
        colour = "var(--fg)" if i == 0 else f"var(--c{(i - 1) % COLOURS})"
        there_and_back = [*part["step"], *part["step"][::-1]], [*part["max"], *part["min"][::-1]]
        band = {"fill": "toself", "fillcolor": colour, "opacity": 0.12, "line": {"width": 0}, "hoverinfo": "skip"}
        traces.append(
            {"type": "scatter", "mode": "lines", "legendgroup": name, "showlegend": False, **band}
            | {"x": numbers(pd.Series(there_and_back[0])), "y": numbers(pd.Series(there_and_back[1]))}
        )
        dash = DASHES[1 + (i - 1) % (len(DASHES) - 1)] if i else "solid"  # which is BF16's alone
        line = {"color": colour, "width": 3 if i == 0 else 2, "dash": dash}
        traces.append(
            {"type": "scatter", "mode": "lines", "legendgroup": name, "name": wrapped(name), "line": line}
            | {"x": numbers(part["step"]), "y": numbers(part["mean"]), "hovertemplate": "step %{x}: %{y:.4g}"}
        )
    y: dict[str, Any] = {"type": "linear"}
    if by_step["min"].min() > 0:
        decades = np.log10(by_step["max"].max() / by_step["min"].min())
        y = {"type": "log", "dtick": 1 if decades > 3 else "D2", "tickformat": "~g"}
    step = {"type": "log", "dtick": "D2" if by_step["step"].max() < 1000 else 1, "tickformat": "~g"}
    layout = {
        **LAYOUT,
        "height": 440,
        "xaxis": {**AXIS, "title": {"text": "step"}, **step},
        "yaxis": {**AXIS, "title": {"text": "training loss"}, **y},
        "legend": {"orientation": "h", "y": -0.22, "yanchor": "top"},
    }
    return {"data": traces, "layout": layout}


def over_seeds(curves: pd.DataFrame) -> pd.DataFrame:
    """name, step, and the mean, min and max of the loss over seeds."""
    long = pd.DataFrame(
        {
            "name": np.repeat(curves["name"].to_numpy(), curves["curve_step"].str.len()),
            "step": _joined(curves["curve_step"]),
            "loss": _joined(curves["curve_loss"]),
        }
    )
    return long.groupby(["name", "step"], sort=False)["loss"].agg(["mean", "min", "max"]).reset_index()


def _joined(arrays: pd.Series) -> np.ndarray:
    return np.concatenate([np.asarray(a, float) for a in arrays]) if len(arrays) else np.empty(0)


PANEL = Panel("curves", "Curves", "Loss curves of the front", curves, QUERIES, ABOUT)
