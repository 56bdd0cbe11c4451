"""Two maps over pairs of technique levels: which work together or against each other, and where recipes diverge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.report.figures import AXIS, LAYOUT, ratio_ticks
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import number, of_setting, typeset
from fp4dse.results.report.page import plot
from fp4dse.results.text.ratios import change

INTERACTIONS = ("SELECT * FROM effects WHERE kind = 'interaction'",)
ABOUT_INTERACTIONS = """What two techniques do to the loss together beyond what each does on average. Below zero they
help each other, above zero they stand in each other's way. A star marks a 95 % interval that leaves out zero. Fields
are empty where two techniques were not tried in all combinations: there, what is missing would pass for working
together."""
DIVERGENCE = (
    "FROM divergence",
    "SELECT task, preset, count(*) AS recipes, count(*) FILTER (note = 'diverged') AS diverged FROM recipes "
    "WHERE points > 0 GROUP BY ALL",
)
ABOUT_DIVERGENCE = """The share of recipes that diverged, in %, for each technique (on the diagonal) and each pair."""
MOST_LEVELS = 24
MOST_WITH_TEXT = 14


def interactions(found: Findings) -> str:
    """A map per setting (HTML)."""
    parts = []
    for setting in range(len(found.titles)):
        lines = found.effects[found.effects["setting"].eq(setting)]
        lines = crossed(lines)
        pairs = lines[lines["kind"].eq("interaction") & lines["effect"].notna()]
        if pairs.empty:
            notes = [note for note in lines["note"].unique() if "interactions" in note]
            html = f"<p>{notes[0] if notes else 'There are no two techniques here whose pairs can be told'}.</p>"
        else:
            html = plot(interaction_figure(lines), "")
        parts.append(of_setting(setting, html))
    return "".join(parts)


def crossed(lines: pd.DataFrame) -> pd.DataFrame:
    """Without interactions of factors that were not tried in all combinations. lines: of effects, one setting."""
    pairs = lines["kind"].eq("interaction")
    whole = lines["recipes"].gt(0).groupby([lines["factor"], lines["with_factor"]], dropna=False).transform("all")
    return lines[~pairs | whole]


def interaction_figure(lines: pd.DataFrame) -> dict[str, Any]:
    """lines: of effects, one setting."""
    names, values, stars = interaction_values(lines)
    most = float(np.nanmax(np.abs(values))) if np.isfinite(values).any() else 1.0
    texts = _texts(values, lambda value: typeset(change(value)).replace("\u00a0", ""), stars)
    scale = [[0, "var(--low)"], [0.5, "var(--bg)"], [1, "var(--high)"]]
    figure = _map(names, values, texts, scale, (-most, most), "%{y}<br>with %{x}<br>%{customdata}<extra></extra>")
    trace = figure["data"][0]  # no level meets itself: the first row and the last column are empty
    trace |= {"x": names[:-1], "y": names[1:]}
    ticks, says = ratio_ticks(-most, most, 5)
    trace["customdata"] = [[typeset(change(v)) if np.isfinite(v) else "" for v in row] for row in values]
    trace["colorbar"] = {"thickness": 10, "outlinewidth": 0, "tickvals": ticks, "ticktext": says}
    trace |= {of: [row[:-1] for row in trace[of][1:]] for of in ("z", "text", "customdata")}
    return figure


def interaction_values(lines: pd.DataFrame) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Names of levels, and in the lower triangle the interactions (log ratios) and whether their intervals leave out
    zero.

    lines: of effects, one setting. Levels without an interaction are left out, and those that others are measured from:
    they mirror the rest.
    """
    mains = lines[lines["kind"].eq("main")]
    mains = mains[mains["effect"].notna() & mains["level"].ne(mains["reference"])]
    levels = list(zip(mains["factor"], mains["level"], strict=True))[:MOST_LEVELS]
    place = {level: i for i, level in enumerate(levels)}
    values = np.full((len(levels), len(levels)), np.nan)
    stars = np.zeros(values.shape, bool)
    for line in lines[lines["kind"].eq("interaction")].to_dict("records"):
        i, j = (place.get((line[f"{p}factor"], line[f"{p}level"])) for p in ("", "with_"))
        if i is not None and j is not None:
            i, j = max(i, j), min(i, j)
            values[i, j], stars[i, j] = line["effect"], line["low"] > 0 or line["high"] < 0
    some = np.isfinite(values).any(axis=0) | np.isfinite(values).any(axis=1)
    names = [f"{factor}: {level}" for (factor, level), so in zip(levels, some, strict=True) if so]
    return names, values[np.ix_(some, some)], stars[np.ix_(some, some)]


def divergences(found: Findings) -> str:
    """A map per setting (HTML), or a sentence where nothing diverged."""
    parts = []
    for setting in range(len(found.titles)):
        lines = found.divergence[found.divergence["setting"].eq(setting)]
        tried = found.recipes[found.recipes["setting"].eq(setting) & found.recipes["points"].gt(0)]
        blown = int(tried["note"].eq("diverged").sum())
        if not blown:
            html = "<p>No recipe diverged.</p>"
        else:
            html = f"<p>{number(blown)} of {number(len(tried))} recipes diverged on some seed.</p>"
            if len(lines):
                html += plot(divergence_figure(lines), "")
        parts.append(of_setting(setting, html))
    return "".join(parts)


def divergence_figure(lines: pd.DataFrame) -> dict[str, Any]:
    """lines: of divergence, one setting; the levels that diverge most come first."""
    alone = lines[lines["with_factor"].isna()].sort_values("diverged", ascending=False, kind="stable")
    levels = list(zip(alone["factor"], alone["level"], strict=True))[:MOST_LEVELS]
    place = {level: i for i, level in enumerate(levels)}
    values = np.full((len(levels), len(levels)), np.nan)
    for line in lines.to_dict("records"):
        i = place.get((line["factor"], line["level"]))
        j = i if pd.isna(line["with_factor"]) else place.get((line["with_factor"], line["with_level"]))
        if i is not None and j is not None:
            values[max(i, j), min(i, j)] = 100 * line["diverged"]
    names = [f"{factor}: {level}" for factor, level in levels]
    scale = [[0, "var(--bg)"], [1, "var(--bad)"]]
    texts = _texts(values, "{:.0f}".format, np.zeros(values.shape, bool))
    return _map(names, values, texts, scale, (0, 100), "%{y}<br>with %{x}<br>%{z:.1f} % diverged<extra></extra>")


def _texts(values: np.ndarray, form: Callable[[float], str], stars: np.ndarray) -> list[list[str]]:
    few = len(values) <= MOST_WITH_TEXT
    return [
        [
            "" if not np.isfinite(v) else (form(v) if few else "") + "*" * bool(s)
            for v, s in zip(row, marks, strict=True)
        ]
        for row, marks in zip(values, stars, strict=True)
    ]


def _map(
    names: list[str], values: np.ndarray, texts: list[list[str]], scale: list[Any], limits: tuple[Any, ...], hover: str
) -> dict[str, Any]:
    numbers = [[float(v) if np.isfinite(v) else None for v in row] for row in values]
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": names,
        "y": names,
        "z": numbers,
        "text": texts,
        "texttemplate": "%{text}",
    }
    trace |= {"colorscale": scale, "zmin": limits[0], "zmax": limits[1], "hoverongaps": False, "xgap": 1, "ygap": 1}
    trace |= {"hovertemplate": hover, "colorbar": {"thickness": 10, "outlinewidth": 0, "ticksuffix": " %"}}
    axis = {**AXIS, "type": "category", "showgrid": False}
    layout = {
        **LAYOUT,
        "margin": {"l": 8, "r": 8, "t": 32, "b": 8},  # the buttons stand above the colours
        "height": 215 + 30 * len(names),
        "xaxis": {**axis, "tickangle": -40},
        "yaxis": {**axis, "autorange": "reversed"},
    }
    return {"data": [trace], "layout": layout}
