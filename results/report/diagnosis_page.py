"""The output of `fp4dse diagnose`: its tables, worst first, and a page with the curves.

A diagnosis is the record of tasks/inspection/diagnosis.py as plain dicts and lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fp4dse.results.report.figures import AXIS, COLOURS, DASHES, LAYOUT
from fp4dse.results.report.page import page, plot, table
from fp4dse.results.stats.recipes.causes import THRESHOLDS, causes, flat_from, sentence
from fp4dse.results.store.atomic import write_atomic
from fp4dse.results.text.ratios import change

Row = dict[str, Any]

_MEAN = """Squared error of the mean of n passes over one batch, relative to the squared gradient: points with standard
errors, the fit bias² + variance/n as a line. An unbiased gradient falls as 1/n, which is straight here; a biased one
flattens at its bias². Backward: against the same forward pass with a BF16 backward pass. Forward: that against BF16 in
both."""
_LOSSES = "Training loss of the recipe and of BF16 on the same batches, at log-spaced steps."


def facts(diagnosis: Row) -> Row:
    """Losses relative to BF16's, and where the lane parted from it, by name."""
    d, base = diagnosis, diagnosis["baseline_val_loss"]
    out = {
        "recipe": d["recipe"],
        "task": f"{d['task']}:{d['preset']}, {d['steps']} steps, seed {d['seed']}",
        "learning rate": f"{d['lr']:g}, BF16 {d['baseline_lr']:g}",
        "loss against BF16": _against(d["val_loss"], base),
        "its weights in BF16": _against(d["val_loss_bf16"], base),
        "training loss above BF16's": f"from step {d['apart']} on" if d["apart"] else "not at the end",
    }
    if (ended := d["diverged"]) is not None:
        out["diverged"] = f"step {ended['step']}" + (f", {ended['slot']} of {ended['layer']}" if ended["slot"] else "")
    return out


def cause_rows(diagnosis: Row) -> list[Row]:
    """A line a cause, the main one first."""
    return [
        {
            "cause": cause.cause,
            "measured": _short(cause.value),
            "threshold": _short(THRESHOLDS[cause.cause].limit),
            "times": _short(cause.times),
            "in": cause.where,
            "at step": cause.step,
        }
        for cause in causes(diagnosis)
    ]


def layer_rows(moment: Row) -> list[Row]:
    """A line for the whole gradient, then one a layer, that of the largest error first."""
    backward, forward = moment["backward"]["layers"], moment["forward"]["layers"]
    names = sorted(backward, key=lambda name: -_total(backward[name], forward[name]))
    whole = _layer_row("(all)", moment["backward"]["whole"], moment["forward"]["whole"])
    return [whole, *(_layer_row(name, backward[name], forward[name]) for name in names)]


def _layer_row(name: str, backward: Row, forward: Row) -> Row:
    return {
        "layer": name,
        "forward bias²": _short(forward["bias2"]),
        "forward variance": _short(forward["variance"]),
        "backward error": _short(backward["error"]),
        "cosine": _short(backward["cosine"], 4),
        "bias²": _short(backward["bias2"]),
        "bias² se": _short(backward["bias2_se"], 2),
        "variance": _short(backward["variance"]),
        "variance se": _short(backward["variance_se"], 2),
        "flat from n": _short(flat_from(backward)),
    }


def operand_rows(moment: Row) -> list[Row]:
    """A line a layer and slot, that of the largest error first."""
    rows = sorted(moment["operands"], key=lambda row: -(row["mse"] or 0.0))
    return [
        {
            "layer": row["layer"],
            "slot": row["slot"],
            "MSE": _short(row["mse"]),
            "gain": _short(row["gain"], 4),
            "clip%": _percent(row["clipped"]),
            "flush%": _percent(row["flushed"]),
            "clip MSE": _short(row["clipped_error"]),
            "flush MSE": _short(row["flushed_error"]),
        }
        for row in rows
    ]


def curve_rows(diagnosis: Row) -> list[Row]:
    """A line a number of passes: the error of the mean of the whole backward gradient at each step looked at."""
    curves = {moment["step"]: moment["backward"]["whole"]["curve"] for moment in diagnosis["moments"]}
    numbers = [point["n"] for point in next(iter(curves.values()), [])]
    return [
        {"passes": n} | {f"step {step}": _with_error(curve[i]) for step, curve in curves.items()}
        for i, n in enumerate(numbers)
    ]


def write_diagnosis_page(diagnosis: Row, path: Path) -> None:
    """Sentence, pictures and tables as one HTML file that needs no network. StoreError if it cannot be written."""
    title = f"Why {diagnosis['recipe']} loses on {diagnosis['task']}:{diagnosis['preset']}"
    body = [f"<h1>{escape(title)}</h1>", f"<p><b>{escape(sentence(diagnosis))}</b></p>", _definitions(diagnosis)]
    if diagnosis["moments"]:
        body += ["<h2>Causes</h2>", _table(cause_rows(diagnosis)), _reasons()]
        body += ["<h2>The error of the mean of n passes</h2>", plot(curve_figure(diagnosis), _MEAN)]
    if len(diagnosis["curve_step"]):
        body += ["<h2>Training</h2>", plot(loss_figure(diagnosis), _LOSSES)]
    for moment in reversed(diagnosis["moments"]):
        body += [f"<h2>Layers at step {moment['step']}</h2>", _table(layer_rows(moment))]
        body += [f"<h2>Operands at step {moment['step']}</h2>", _table(operand_rows(moment))]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, page(title, "\n".join(body)).encode())


def curve_figure(diagnosis: Row) -> Row:
    """Error of the mean against the number of passes, both passes at every step looked at, as plain Plotly data."""
    traces: list[Row] = []
    for i, moment in enumerate(diagnosis["moments"]):
        for way, symbol in (("backward", "circle"), ("forward", "square")):
            of = moment[way]["whole"]
            shown = [point for point in of["curve"] if (point["error"] or 0) > 0]
            if not shown:
                continue
            numbers, name = [point["n"] for point in shown], f"{way}, step {moment['step']}"
            line = {"color": f"var(--c{i % COLOURS})", "dash": DASHES[i % len(DASHES)]}
            fit = [max(of["bias2"] + of["variance"] / n, 1e-300) for n in numbers]
            bars = {"type": "data", "array": [point["se"] for point in shown], "color": line["color"]}
            mark = {"symbol": symbol, "size": 8, "color": line["color"]}
            traces += [
                {"type": "scatter", "mode": "markers", "name": name, "x": numbers, "marker": mark, "error_y": bars,
                 "y": [point["error"] for point in shown], "hovertemplate": "n = %{x}: %{y:.3g}"},
                {"type": "scatter", "mode": "lines", "x": numbers, "y": fit, "line": line, "showlegend": False,
                 "hoverinfo": "skip"},
            ]  # fmt: skip
    layout = _log_layout("passes n", "‖mean error‖² / ‖gradient‖²")
    layout["xaxis"] |= {"tickvals": [row["passes"] for row in curve_rows(diagnosis)]}
    return {"data": traces, "layout": layout}


def loss_figure(diagnosis: Row) -> Row:
    """Training losses of recipe and BF16, as plain Plotly data."""
    d = diagnosis
    lines = (("recipe", d["curve_loss"], "c1", "solid"), ("BF16", d["baseline_curve_loss"], "c0", "dash"))
    traces = [
        {"type": "scatter", "mode": "lines", "name": name, "x": d["curve_step"], "y": [_finite(y) for y in losses],
         "line": {"color": f"var(--{colour})", "dash": dash}, "hovertemplate": "step %{x}: %{y:.4g}"}
        for name, losses, colour, dash in lines
    ]  # fmt: skip
    return {"data": traces, "layout": _log_layout("step", "training loss")}


def _log_layout(x: str, y: str) -> Row:
    axis = {**AXIS, "type": "log", "exponentformat": "power"}
    legend = {"orientation": "h", "y": 1, "yanchor": "bottom"}
    axes = {"xaxis": {**axis, "title": {"text": x}}, "yaxis": {**axis, "title": {"text": y}}}
    return {**LAYOUT, "height": 420, "legend": legend, **axes}


def _definitions(diagnosis: Row) -> str:
    """Facts as lines (HTML)."""
    lines = (f"<li>{escape(name)}: {escape(str(value))}</li>" for name, value in facts(diagnosis).items())
    return f"<ul>{''.join(lines)}</ul>"


def _reasons() -> str:
    """The thresholds with their reasons (HTML)."""
    lines = (f"<li>{escape(f'{name} {t.limit:.2g}: {t.says}; {t.why}')}</li>" for name, t in THRESHOLDS.items())
    return f"<ul>{''.join(lines)}</ul>"


def _table(rows: Sequence[Row]) -> str:
    """Rows of one kind as a table (HTML), their columns those of the first."""
    texts = {"layer", "slot", "cause", "in"}
    columns = [(name, "" if name in texts else "n") for name in (rows[0] if rows else ())]
    cells: list[list[tuple[str, object]]] = [[(escape(_cell(value)), value) for value in row.values()] for row in rows]
    return table(columns, cells)


def _cell(value: object) -> str:
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _total(backward: Row, forward: Row) -> float:
    """Error of one pass by both, relative."""
    return (backward["error"] or 0.0) + (forward["error"] or 0.0)


def _against(loss: float | None, base: float | None) -> str:
    return change(math.log(loss / base)) if loss and base else "none"


def _with_error(point: Row) -> str:
    error = "–" if point["error"] is None else f"{point['error']:.3g}"
    return error if point["se"] is None else f"{error} ± {point['se']:.1g}"


def _short(value: float | None, digits: int = 3) -> float | None:
    """With so many significant digits; what is below 1e-12 is rounding of sums, and 0."""
    if value is None:
        return None
    return float(f"{value:.{digits}g}") if abs(value) > 1e-12 else 0.0


def _percent(share: float | None) -> float | None:
    return _short(None if share is None else 100 * share)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
