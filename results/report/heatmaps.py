"""Two maps over pairs of technique levels: which work together or against each other, and where recipes diverge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.report.figures import AXIS, LAYOUT, ratio_ticks
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import number, typeset
from fp4dse.results.report.page import plot
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.text.ratios import change

ABOUT_INTERACTIONS = """What two techniques do to the loss together beyond what each does on average. Below zero they
help each other, above zero they stand in each other's way. A star marks what is told from nothing with all effects in
mind (of twenty stars, one is chance). Fields are empty where two techniques were not tried in all combinations: there,
what is missing would pass for working together."""
ABOUT_DIVERGENCE = """The share of recipes that diverged, in %, for each technique (on the diagonal) and each pair."""
MOST_LEVELS = 24
MOST_WITH_TEXT = 14
_PAIR = (("factor", "level"), ("with_factor", "with_level"))


@for_each_setting
def interactions(found: Findings) -> str:
    """A map per setting (HTML)."""
    lines = crossed(found.effects)
    if (lines["kind"].eq("interaction") & lines["effect"].notna()).any():
        return plot(interaction_figure(lines), "")
    notes = [note for note in lines["note"].unique() if "interactions" in note]
    return f"<p>{notes[0] if notes else 'There are no two techniques here whose pairs can be told'}.</p>"


def crossed(lines: pd.DataFrame) -> pd.DataFrame:
    """The lines of `effects`, of one setting, without interactions of factors that were not fully crossed."""
    pairs = lines["kind"].eq("interaction")
    whole = lines["recipes"].gt(0).groupby([lines["factor"], lines["with_factor"]], dropna=False).transform("all")
    return lines[~pairs | whole]


def interaction_figure(lines: pd.DataFrame) -> dict[str, Any]:
    """The map of interactions as plain Plotly data. lines: of effects, one setting."""
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
    """Names of levels, and in the lower triangle the interactions (log ratios) and whether they are told from nothing
    (q).

    lines: of effects, one setting. Levels without an interaction are left out, and those that others are measured from:
    they mirror the rest.
    """
    mains = lines[lines["kind"].eq("main")]
    mains = mains[mains["effect"].notna() & mains["level"].ne(mains["reference"])]
    pairs = lines[lines["kind"].eq("interaction")]
    pairs = pairs.assign(star=pairs["q"].lt(0.05))
    names, values, stars = _by_level(mains, pairs, "effect", "star")
    some = np.isfinite(values).any(axis=0) | np.isfinite(values).any(axis=1)
    names = [name for name, so in zip(names, some, strict=True) if so]
    return names, values[np.ix_(some, some)], stars[np.ix_(some, some)] > 0


def _by_level(alone: pd.DataFrame, pairs: pd.DataFrame, *columns: str) -> tuple[Any, ...]:
    """Names of the levels in `alone`, and each column of `pairs` as the lower triangle of a matrix of them."""
    levels = alone[["factor", "level"]].head(MOST_LEVELS).reset_index(drop=True)
    position = {level: i for i, level in enumerate(levels.itertuples(index=False, name=None))}
    sides = [zip(pairs[factor], pairs[level], strict=True) for factor, level in _PAIR]
    both = np.array([[position.get(level, -1) for level in side] for side in sides], int)
    column, row = np.sort(both, axis=0)
    shown = column >= 0
    matrices = []
    for name in columns:
        matrix = np.full((len(levels), len(levels)), np.nan)
        matrix[row[shown], column[shown]] = pairs[name].to_numpy(float)[shown]
        matrices.append(matrix)
    return [f"{factor}: {level}" for factor, level in position], *matrices


@for_each_setting
def divergences(found: Findings) -> str:
    """A map per setting (HTML), or a sentence where nothing diverged."""
    tried = found.recipes[found.recipes["points"].gt(0)]
    diverged = int(tried["note"].eq("diverged").sum())
    if not diverged:
        return "<p>No recipe diverged.</p>"
    says = f"<p>{number(diverged)} of {number(len(tried))} recipes diverged on some seed.</p>"
    return says + (plot(divergence_figure(found.divergence), "") if len(found.divergence) else "")


def divergence_figure(lines: pd.DataFrame) -> dict[str, Any]:
    """The map of divergence as plain Plotly data; levels that diverge most come first. lines: of one setting."""
    alone = lines[lines["with_factor"].isna()].sort_values("diverged", ascending=False, kind="stable")
    itself = lines.assign(with_factor=lines["with_factor"].fillna(lines["factor"]), percent=100 * lines["diverged"])
    itself["with_level"] = itself["with_level"].fillna(itself["level"])
    names, values = _by_level(alone, itself, "percent")
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


INTERACTIONS = Panel(
    "interactions",
    "Interactions",
    "Which techniques work together",
    interactions,
    ("SELECT * FROM effects WHERE kind = 'interaction'",),
    ABOUT_INTERACTIONS,
)
DIVERGENCE = Panel(
    "divergence",
    "Divergence",
    "What diverged",
    divergences,
    (
        "FROM divergence",
        "SELECT task, preset, count(*) AS recipes, count(*) FILTER (note = 'diverged') AS diverged FROM recipes "
        "WHERE points > 0 GROUP BY ALL",
    ),
    ABOUT_DIVERGENCE,
)
