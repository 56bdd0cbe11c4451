"""The report's two figures as plain Plotly data: the trade-off, and the loss curves of the recipes on the front.

Colours are CSS variables, `var(--name)`, which the page replaces when it draws, so that one figure serves light and
dark. Nothing depends on colour: the front is numbered, and shapes and dashes differ.
"""

from __future__ import annotations

import textwrap
from html import escape

import numpy as np
import pandas as pd

from fp4dse.results.intervals import counted
from fp4dse.results.tables import gap_text, has_metric, number

MOST_POINTS = 2000
"""Recipes off the front that are drawn; those with the lowest gaps."""

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
COLOURS = 6
"""How many of --c0, --c1 … the page defines."""

_FONT = {"family": "system-ui, sans-serif", "size": 13, "color": "var(--fg)"}
AXIS = {"gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False, "automargin": True}
LAYOUT = {
    "font": _FONT,
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
    "hoverlabel": {"bgcolor": "var(--bg)", "bordercolor": "var(--muted)", "font": _FONT, "align": "left"},
    "hovermode": "closest",
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "var(--muted)", "activecolor": "var(--accent)"},
}


def front_figure(lines: pd.DataFrame, noise_floor: float) -> dict:
    """Gap against points. lines: one setting of summarize, with `number`: place on the front, null off it.

    Recipes with the same points are spread sideways just enough not to cover each other. A few gaps far above the
    rest are drawn at the upper edge, diverged recipes above it; the hover tells the truth.
    """
    tried = lines[lines["points"].gt(0)]
    finite = tried[np.isfinite(tried["gap"])]
    finite = finite[finite["on_front"] | finite["gap"].rank(method="first").le(MOST_POINTS)]
    low, high = _limits(finite, noise_floor)
    span = high - low
    above, diverged = finite["gap"].gt(high), tried[tried["note"].eq("diverged")].head(MOST_POINTS)
    inside = finite[~above].assign(y=lambda f: 100 * f["gap"])
    inside = inside.assign(x=_spread(inside, 0.024 * 100 * span))
    front = inside[inside["on_front"]].sort_values("points")
    edge = finite[above].assign(y=100 * (high + 0.04 * span))
    out = diverged.assign(y=100 * (high + 0.09 * span))
    traces = [
        _points(inside[~inside["on_front"]], "other recipes", "diamond-open", "var(--muted)", size=8),
        _points(edge.assign(x=_spread(edge, 1)), "far above, not to scale", "triangle-up-open", "var(--muted)", size=9),
        _points(out.assign(x=_spread(out, 1)), "diverged", "x-thin-open", "var(--bad)", size=9),
        {
            **_points(front, "on the front, numbered by cost", "circle", "var(--accent)", size=20),
            "mode": "lines+markers+text",
            "line": {"shape": "hv", "width": 1.5, "dash": "dot", "color": "var(--accent)"},
            "text": [str(n) for n in front["number"]],
            "textfont": {"color": "var(--bg)", "size": 11},
            "error_y": {
                "type": "data",
                "array": _list(100 * (front["gap_high"] - front["gap"])),
                "color": "var(--accent)",
                "thickness": 1.5,
                "width": 5,
            },
        },
    ]
    shapes = [{"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": {"color": "var(--fg)"}}]
    notes = [_note("BF16", 0 if low <= 0 else 100 * low, "bottom")]
    if low > 0:
        notes[0]["text"] = f"BF16 (0 %) lies {100 * low:.0f} % below this edge"
    if np.isfinite(noise_floor):
        band = {"y0": -100 * noise_floor, "y1": 100 * noise_floor, "fillcolor": "var(--band)", "line": {"width": 0}}
        shapes.insert(0, {"type": "rect", "xref": "paper", "x0": 0, "x1": 1, "layer": "below", **band})
    most = int(tried["points"].max()) if len(tried) else 1
    layout = {
        **LAYOUT,
        "height": 460,
        "xaxis": {**AXIS, "title": {"text": "overhead, points"}, "dtick": 1, "range": [0.5, most + 0.5]},
        "yaxis": {**AXIS, "title": {"text": "gap to BF16, %"}, "range": [100 * low, 100 * (high + 0.13 * span)]},
        "shapes": shapes,
        "annotations": notes,
        "legend": {"orientation": "h", "y": -0.18, "yanchor": "top"},
    }
    return {"data": [trace for trace in traces if trace["x"]], "layout": layout}


def curves_figure(curves: pd.DataFrame) -> dict:
    """Training loss against step, the mean over seeds as a line, lowest to highest seed as a band.

    curves: rows with `name` (what the legend says, in the order of drawing; the first is the baseline), curve_step
    and curve_loss.
    """
    long = pd.DataFrame(
        {
            "name": np.repeat(curves["name"].to_numpy(), curves["curve_step"].str.len()),
            "step": _joined(curves["curve_step"]),
            "loss": _joined(curves["curve_loss"]),
        }
    )
    by_step = long.groupby(["name", "step"], sort=False)["loss"].agg(["mean", "min", "max"]).reset_index()
    traces = []
    for i, name in enumerate(curves["name"].unique()):
        part = by_step[by_step["name"].eq(name)].sort_values("step")
        colour = "var(--fg)" if i == 0 else f"var(--c{(i - 1) % COLOURS})"
        there_and_back = [*part["step"], *part["step"][::-1]], [*part["max"], *part["min"][::-1]]
        band = {"fill": "toself", "fillcolor": colour, "opacity": 0.12, "line": {"width": 0}, "hoverinfo": "skip"}
        traces.append(
            {"type": "scatter", "mode": "lines", "legendgroup": name, "showlegend": False, **band}
            | {"x": _list(pd.Series(there_and_back[0])), "y": _list(pd.Series(there_and_back[1]))}
        )
        line = {"color": colour, "width": 3 if i == 0 else 2, "dash": DASHES[i % len(DASHES)]}
        traces.append(
            {"type": "scatter", "mode": "lines", "legendgroup": name, "name": _wrapped(name), "line": line}
            | {"x": _list(part["step"]), "y": _list(part["mean"]), "hovertemplate": "step %{x}: %{y:.4g}"}
        )
    y: dict = {"type": "linear"}
    if long["loss"].min() > 0:
        decades = np.log10(long["loss"].max() / long["loss"].min())
        y = {"type": "log", "dtick": 1 if decades > 3 else "D2", "tickformat": "~g"}
    layout = {
        **LAYOUT,
        "height": 420,
        "xaxis": {**AXIS, "title": {"text": "step"}, "type": "log", "dtick": 1},
        "yaxis": {**AXIS, "title": {"text": "training loss"}, **y},
        "legend": {"orientation": "h", "y": -0.18, "yanchor": "top"},
    }
    return {"data": traces, "layout": layout}


def _limits(finite: pd.DataFrame, noise_floor: float) -> tuple[float, float]:
    """The y range, as gaps: the front with its intervals, and the rest unless a few are far above it."""
    if finite.empty:
        return 0.0, 0.1
    front = finite[finite["on_front"]]
    low = np.nanmin([finite["gap"].min(), front["gap_low"].min()])
    high = np.nanmax([finite["gap"].max(), front["gap_high"].max()])
    usual = np.nanmax([finite["gap"].quantile(0.9, interpolation="lower"), front["gap"].max()])
    if high - low > 3 * (usual - low) > 0:
        high = low + 1.5 * (usual - low)
    span = max(high - low, 1e-3)
    low -= 0.05 * span
    if 0 < low < span:  # BF16 itself, where that does not squeeze the recipes into less than half of the height
        low = -0.02 * high
    if np.isfinite(noise_floor) and low <= 0:
        low = min(low, max(-noise_floor, -0.3 * span))
    return float(low), float(max(high, low + span))


def _spread(points: pd.DataFrame, height: float) -> list[float]:
    """x per point: its `points` plus the smallest sideways step that keeps it clear of others within `height` of y."""
    x = pd.Series(points["points"].astype(float), index=points.index)
    steps = 0.05 * np.array([0, 1, -1, 2, -2, 3, -3, 4, -4, 5, -5, 6, -6, 7, -7])
    for _, column in points.groupby("points"):
        placed: list[tuple[float, float, float]] = []  # y, sideways step, how wide
        for row in column.sort_values(["on_front", "y"], ascending=[False, True]).itertuples():
            width = 0.08 if row.on_front else 0.045
            near = [(s, max(w, width)) for y, s, w in placed if abs(y - row.y) < height * (2 if w > 0.05 else 1)]
            free = [step for step in steps if all(abs(step - s) >= w for s, w in near)]
            step = free[0] if free else steps[len(placed) % len(steps)]
            placed.append((row.y, step, width))
            x[row.Index] += step
    return _list(x)


def _points(lines: pd.DataFrame, name: str, symbol: str, colour: str, size: int) -> dict:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": _list(lines["x"]) if "x" in lines else [],
        "y": _list(lines["y"]),
        "hovertext": [_hover(line) for _, line in lines.iterrows()],
        "hoverinfo": "text",
        "marker": {"symbol": symbol, "size": size, "color": colour, "line": {"width": 1.5, "color": colour}},
    }


def _hover(line: pd.Series) -> str:
    rows = [f"<b>{_wrapped(line['label'])}</b>", f"gap {gap_text(line)}" + " %" * (not line["note"])]
    rows.append(f"{counted(line['points'], 'point')}, {line['bits']:g} bits an element")
    metric = f"{line['metric_name']} {number(line['val_metric'])}, " if has_metric(line.to_frame().T) else ""
    rows.append(f"{metric}val loss {number(line['val_loss'])}")
    rows.append(f"lr {line['lr']:g}, {counted(line['seeds'], 'seed')} finished")
    return "<br>".join(rows)


def _wrapped(text: str) -> str:
    return "<br>".join(textwrap.wrap(escape(text, quote=False), 40, break_long_words=False, break_on_hyphens=False))


def _note(text: str, y: float, anchor: str) -> dict:
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": y, "yanchor": anchor}
    return {"text": text, "showarrow": False, "font": {"color": "var(--muted)", "size": 12}, **place}


def _joined(arrays: pd.Series) -> np.ndarray:
    return np.concatenate([np.asarray(a, float) for a in arrays]) if len(arrays) else np.empty(0)


def _list(values: pd.Series) -> list:
    """Plain numbers, None where there is none."""
    return [float(v) if np.isfinite(v) else None for v in values]
