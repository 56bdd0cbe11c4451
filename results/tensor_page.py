"""What `fp4dse tensor` shows: the rows of an inspection as table, remarks, and a page with a picture of the error.

A row is a dict with tensor, shape, dtype, quantizer, bits, mse, sqnr_db, gain, clipped, flushed, zeroed, saturated,
decomposition (shares by part and by cross term `a·b`) and note. None stands for what is not defined.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from fp4dse.results.figures import AXIS, LAYOUT
from fp4dse.results.files import write_atomic
from fp4dse.results.page import page, plot, table

PERCENT = {"clipped": "clipped %", "flushed": "flushed %", "zeroed": "zeroed %"}
COLUMNS = ["tensor", "quantizer", "bits", "MSE", "SQNR dB", "gain", *PERCENT.values()]
COLUMNS += ["scale %", "dead %", "grid %", "cross %"]

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


def tensor_cells(rows: Sequence[dict]) -> list[dict[str, str]]:
    """One dict of COLUMNS a row, as text. Decomposition columns are shares of the error's energy and sum to 100."""
    return [_cells(row) for row in rows]


def remarks(rows: Sequence[dict], skipped: dict[str, str]) -> list[str]:
    """Everything that was left out and why, one line a reason."""
    lines = []
    for note in dict.fromkeys(row["note"] for row in rows if row["note"]):
        of = [row for row in rows if row["note"] == note]
        what = "no decomposition" if all(row["mse"] is not None for row in of) else "not quantized"
        where = [_some([row[key] for row in of]) for key in ("quantizer", "tensor")]
        lines.append(f"{what}, {' of '.join(where)}: {note}")
    for why in dict.fromkeys(skipped.values()):
        lines.append(f"skipped, {why}: {_some([name for name, reason in skipped.items() if reason == why])}")
    return lines


def write_tensor_page(rows: Sequence[dict], skipped: dict[str, str], title: str, path: Path) -> None:
    """Picture, table and remarks as one HTML file that needs no network. StoreError if it cannot be written."""
    columns = [(name, "label" if name in ("tensor", "quantizer") else "n") for name in COLUMNS]
    lines: list[list[tuple[str, object]]] = [
        [(escape(text), text if text != "–" else None) for text in cells.values()] for cells in tensor_cells(rows)
    ]
    left_out = "".join(f"<li>{escape(line)}</li>" for line in remarks(rows, skipped))
    body = [f"<h1>{escape(title)}</h1>", plot(error_figure(rows), _CAPTION), table(columns, lines)]
    write_atomic(path, page(title, "\n".join([*body, f"<ul>{left_out}</ul>"])).encode())


def error_figure(rows: Sequence[dict]) -> dict:
    """Relative error of each tensor under each quantizer, stacked by parts, as plain Plotly data."""
    drawn = [row for row in rows if row["mse"] is not None]
    place = [[row["tensor"] for row in drawn], [row["quantizer"] for row in drawn]]
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
            "y": place,
            "x": lengths[name],
            "marker": {"color": colour, "pattern": _OVERLAY | {"shape": pattern}},
            "hovertemplate": "%{x:.3g} %",
        }
        for name, (colour, pattern) in PARTS.items()
        if any(length is not None for length in lengths[name])
    ]
    mark = {"symbol": "line-ns", "size": 14, "line": {"width": 3, "color": "var(--fg)"}}
    total = {"type": "scatter", "mode": "markers", "name": "relative MSE", "marker": mark, "y": place}
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


def _cells(row: dict) -> dict[str, str]:
    parts = _parts(row["decomposition"] or {})
    texts = [
        row["tensor"],
        row["quantizer"],
        _text(row["bits"], "{:.4g}"),
        _text(row["mse"], "{:.2e}"),
        _text(row["sqnr_db"], "{:.2f}"),
        _text(row["gain"], "{:.4f}"),
        *(_percent(row[name]) for name in PERCENT),
        *(_percent(parts.get(name)) for name in ("scale", "dead", "grid", "cross")),
    ]
    return dict(zip(COLUMNS, texts, strict=True))


def _parts(shares: dict[str, float]) -> dict[str, float]:
    """The shares of the three parts, and of their cross terms together."""
    parts = {name: share for name, share in shares.items() if "·" not in name}
    return parts | {"cross": sum(shares[name] for name in shares if "·" in name)} if shares else {}


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _percent(share: float | None) -> str:
    return "<0.01" if share is not None and 0 < share < 5e-5 else _text(share and 100 * share, "{:.2f}")


def _some(names: Sequence[str]) -> str:
    """The first three different names, and how many more."""
    different = list(dict.fromkeys(names))
    return ", ".join(different[:3]) + (f" and {len(different) - 3} more" if len(different) > 3 else "")
