"""What each technique does: main effects with intervals, and the same from matched pairs, as dots on lines."""

from __future__ import annotations

import pandas as pd

from fp4dse.results.figures import AXIS, LAYOUT, numbers
from fp4dse.results.page import plot
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.parts import of_setting

QUERIES = ("SELECT * FROM effects WHERE kind = 'main'", "FROM marginal")
POOLED = "SELECT * FROM pooled WHERE kind = 'main'"
ABOUT = """What a technique does to the loss on average over all recipes that were tried, in %; left of the line it
helps. A disc is the mean effect by a linear model of all techniques and their pairs, filled where its 95 % interval
leaves out zero. A diamond is the mean over pairs of recipes that differ in this technique alone."""
MOST_LINES = 40


def techniques(found: Findings) -> str:
    """The section's body (HTML): a figure per setting, and the pooled one where there are several."""
    parts = []
    for setting in range(len(found.titles)):
        mains = found.effects[found.effects["setting"].eq(setting) & found.effects["kind"].eq("main")]
        pairs = found.marginal[found.marginal["setting"].eq(setting)]
        if mains["effect"].notna().any():
            html = plot(dots(mains, pairs), "") + _untold(mains)
        else:
            html = f"<p>{_why(mains)}</p>"
        parts.append(of_setting(setting, html))
    if len(found.pooled) and found.pooled["effect"].notna().any():
        mains = found.pooled[found.pooled["kind"].eq("main")]
        caption = "Effect on the rank within a task, in places of a hundred: mean over the tasks."
        parts.append(f"<h3>All tasks together</h3>{plot(dots(mains, None, 'change of rank, %'), caption)}")
    return "".join(parts)


def dots(mains: pd.DataFrame, pairs: pd.DataFrame | None, says: str = "change of loss, %") -> dict:
    """Effects as plain Plotly data. mains: lines of effects or pooled_effects; pairs: of marginal."""
    lines = shown_effects(mains).head(MOST_LINES)
    names = [name_of(line) for line in lines.to_dict("records")]
    sure = lines["low"].gt(0) | lines["high"].lt(0)
    traces = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": "mean effect",
            "x": numbers(100 * lines["effect"]),
            "y": names,
            "marker": {
                "symbol": ["circle" if s else "circle-open" for s in sure],
                "size": 11,
                "color": "var(--accent)",
                "line": {"width": 2, "color": "var(--accent)"},
            },
            "error_x": _bars(lines, "effect", "var(--accent)"),
            "hovertemplate": "%{y}: %{x:+.3f}<extra>mean effect</extra>",
        }
    ]
    if pairs is not None and len(pairs):
        keyed = {(line["factor"], line["level"]): line for line in pairs.to_dict("records")}
        found = [(n, keyed.get((a, b))) for n, a, b in zip(names, lines["factor"], lines["level"], strict=True)]
        matched = pd.DataFrame([{"place": name, **line} for name, line in found if line])
        if len(matched):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": "matched pairs",
                    "x": numbers(100 * matched["difference"]),
                    "y": list(matched["place"]),
                    "marker": {"symbol": "diamond-open", "size": 9, "color": "var(--c1)"},
                    "error_x": {**_bars(matched, "difference", "var(--c1)"), "thickness": 1},
                    "customdata": [
                        f"{m} pairs, {100 * h:.0f} % of them gain"
                        for m, h in zip(matched["matches"], matched["helps"], strict=True)
                    ],
                    "hovertemplate": "%{y}: %{x:+.3f}<br>%{customdata}<extra>matched pairs</extra>",
                }
            )
    layout = {
        **LAYOUT,
        "height": 120 + 30 * len(names),
        "xaxis": {**AXIS, "title": {"text": says}, "zeroline": True, "zerolinecolor": "var(--fg)"},
        "yaxis": {**AXIS, "autorange": "reversed", "type": "category"},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom"},
    }
    return {"data": traces, "layout": layout}


def _bars(lines: pd.DataFrame, middle: str, colour: str) -> dict:
    return {
        "type": "data",
        "symmetric": False,
        "array": numbers(100 * (lines["high"] - lines[middle])),
        "arrayminus": numbers(100 * (lines[middle] - lines["low"])),
        "color": colour,
        "thickness": 2,
        "width": 4,
    }


def shown_effects(mains: pd.DataFrame) -> pd.DataFrame:
    """Those that could be told, without the levels that others are measured from."""
    return mains[mains["effect"].notna() & mains["level"].ne(mains["reference"])]


def name_of(line: dict) -> str:
    """A level and what it is measured from."""
    return f"{line['factor']}: {line['level']} (not {line['reference']})"


def _untold(mains: pd.DataFrame) -> str:
    """Why some effects are not there, or not alone (HTML)."""
    notes = mains[mains["note"].ne("") & mains["level"].ne(mains["reference"])]
    words = "; ".join(f"{', '.join(part['factor'].unique())}: {note}" for note, part in notes.groupby("note"))
    return f'<p class="muted">Not told: {words}.</p>' if words else ""


def _why(mains: pd.DataFrame) -> str:
    if mains.empty:
        return "Nothing was varied here but whole recipes, or there is one recipe: there are no effects."
    return f"No effect can be told: {', '.join(n for n in mains['note'].unique() if n) or 'too few recipes'}."
