"""The output of `fp4dse tensor`: the rows of an inspection as table, remarks, and a page with a picture of the error.

A row is a dict with tensor, shape, dtype, quantizer, bits, mse, sqnr_db, gain, clipped, flushed, zeroed, saturated,
decomposition (shares by part and by cross term `a·b`) and note. None stands for what is not defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from fp4dse.results.report.figures import AXIS, LAYOUT
from fp4dse.results.report.page import page, plot, table
from fp4dse.results.store.atomic import write_atomic

COLUMNS = ["quantizer", "bits", "MSE", "dB", "gain", "clip%", "flush%", "zero%", "scale%", "dead%", "grid%", "cross%"]
"""Decomposition columns are shares of the squared error and sum to 100."""

PARTS = {  # name -> colour, pattern: told apart without colour
    "scale": ("var(--c1)", ""),
    "dead": ("var(--c3)", "x"),
    "grid": ("var(--c0)", "/"),
    "cross": ("var(--c2)", "."),
    "not split": ("var(--muted)", ""),
}
_OVERLAY = {"fillmode": "overlay", "fgcolor": "var(--bg)", "size": 6, "solidity": 0.15}

_CAPTION = """Each bar is the relative squared error Σ(x̂−x)²/Σx² of one tensor under one quantizer, split into what
storing the block scale costs (scale), the elements that the unrounded scale would already round to zero (dead), the
rounding of all others (grid), and their cross terms, which are negative where one error undoes another. The mark is
the sum."""


def tensor_table(rows: Sequence[dict[str, Any]], skipped: dict[str, str]) -> str:
    """Per tensor a heading and a line a quantizer, with COLUMNS or why there are none; then the other remarks."""
    lines: list[str] = []
    cells = [_cells(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *cells, strict=True)]
    for row, texts in zip(rows, cells, strict=True):
        heading = f"{row['tensor']}  {'×'.join(map(str, row['shape']))} {row['dtype']}"
        if heading not in lines:
            lines += ["", heading, _aligned(COLUMNS, widths)]
        refused = row["mse"] is None and row["note"]
        lines.append(f"  {texts[0]:<{widths[0]}}  {refused}" if refused else _aligned(texts, widths))
    left_out = remarks([row for row in rows if row["mse"] is not None], skipped)
    return "\n".join([*lines[1:], *([""] if left_out else []), *left_out])


def remarks(rows: Sequence[dict[str, Any]], skipped: dict[str, str]) -> list[str]:
    """Everything that was left out and why, one line a reason."""
    lines = []
    for note in dict.fromkeys(row["note"] for row in rows if row["note"]):
        of = [row for row in rows if row["note"] == note]
        what = "no decomposition" if all(row["mse"] is not None for row in of) else "not quantized"
        where = [_some([row[key] for row in of]) for key in ("quantizer", "tensor")]
        lines.append(f"{what}, {' of '.join(where)}: {note}")
    reasons = dict.fromkeys(skipped.values())
    return lines + [f"skipped, {why}: {_some([name for name in skipped if skipped[name] == why])}" for why in reasons]


def write_tensor_page(rows: Sequence[dict[str, Any]], skipped: dict[str, str], title: str, path: Path) -> None:
    """Picture, table and remarks as one HTML file that needs no network. StoreError if it cannot be written."""
    columns = [("tensor", "label"), ("quantizer", ""), *((name, "n") for name in COLUMNS[1:])]
    lines: list[list[tuple[str, object]]] = [
        [(escape(text), text if text != "–" else None) for text in (row["tensor"], *_cells(row))] for row in rows
    ]
    left_out = "".join(f"<li>{escape(line)}</li>" for line in remarks(rows, skipped))
    body = [f"<h1>{escape(title)}</h1>", plot(error_figure(rows), _CAPTION), table(columns, lines)]
    write_atomic(path, page(title, "\n".join([*body, f"<ul>{left_out}</ul>"])).encode())


def error_figure(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Relative error of each tensor under each quantizer, stacked by parts, as plain Plotly data."""
    drawn = [row for row in rows if row["mse"] is not None]
    labels = [[row["tensor"] for row in drawn], [row["quantizer"] for row in drawn]]
    lengths: dict[str, list[float | None]] = {name: [] for name in PARTS}
    for row in drawn:
        parts = _parts(row["decomposition"]) if row["decomposition"] else {"not split": 1.0}
        for name, values in lengths.items():
            values.append(100 * row["mse"] * parts[name] if name in parts else None)
    traces = [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": labels,
            "x": lengths[name],
            "marker": {"color": colour, "pattern": _OVERLAY | {"shape": pattern}},
            "hovertemplate": "%{x:.3g} %",
        }
        for name, (colour, pattern) in PARTS.items()
        if any(length is not None for length in lengths[name])
    ]
    mark = {"symbol": "line-ns", "size": 14, "line": {"width": 3, "color": "var(--fg)"}}
    total = {"type": "scatter", "mode": "markers", "name": "relative MSE", "marker": mark, "y": labels}
    total |= {"x": [100 * row["mse"] for row in drawn], "hovertemplate": "%{x:.4g} %"}
    layout = {
        **LAYOUT,
        "height": 120 + 24 * len(drawn),
        "barmode": "relative",
        "bargap": 0.25,
        "xaxis": {**AXIS, "title": {"text": "Σ(x̂−x)²/Σx², %"}, "zeroline": True, "zerolinecolor": "var(--fg)"},
        "yaxis": {**AXIS, "type": "multicategory", "autorange": "reversed", "dividercolor": "var(--line)"},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "traceorder": "normal"},
    }
    return {"data": [*traces, total], "layout": layout}


def _cells(row: dict[str, Any]) -> list[str]:
    parts = _parts(row["decomposition"] or {})
    return [
        row["quantizer"],
        _text(row["bits"], "{:.4g}"),
        _text(row["mse"], "{:.2e}"),
        _text(row["sqnr_db"], "{:.2f}"),
        _text(row["gain"], "{:.4f}"),
        *(_percent(row[name]) for name in ("clipped", "flushed", "zeroed")),
        *(_percent(parts.get(name)) for name in ("scale", "dead", "grid", "cross")),
    ]


def _aligned(texts: Sequence[str], widths: Sequence[int]) -> str:
    """The first text to the left, numbers to the right of their columns."""
    numbers = (f"{text:>{width}}" for text, width in zip(texts[1:], widths[1:], strict=True))
    return "  ".join([f"  {texts[0]:<{widths[0]}}", *numbers])


def _parts(shares: dict[str, float]) -> dict[str, float]:
    """The shares of the three parts, and of their cross terms together."""
    parts = {name: share for name, share in shares.items() if "·" not in name}
    return parts | {"cross": sum(shares[name] for name in shares if "·" in name)} if shares else {}


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _percent(share: float | None) -> str:
    return _text(share and 100 * share, "{:.3g}")


def _some(names: Sequence[str]) -> str:
    """The first three different names, and how many more."""
    different = list(dict.fromkeys(names))
    return ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
