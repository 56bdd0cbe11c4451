"""The panel of effects: matched pairs with intervals, beside the mean of a linear model, as dots on lines."""

from __future__ import annotations

from typing import Any

import pandas as pd

from fp4dse.results.report.figures import AXIS, LAYOUT, numbers, ratio_axis
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import typeset
from fp4dse.results.report.page import plot
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.text.ratios import change_with_range, noun

QUERIES = ("FROM marginal", "SELECT * FROM effects WHERE kind = 'main'")
ABOUT = """What changing one technique alone does to the loss; left of the line it helps. A diamond is the mean over
pairs of recipes that differ in nothing else, filled where it is told from no change with all techniques in mind (of
twenty such, one is chance), grey where one of the two levels was tried with something that the other never met. A
circle is the mean over all combinations by a linear model, shown only where all of them can be compared."""
MOST_LINES = 40
LEAST_SHARE = 1e-4
"""Of the variance between recipes; a mean effect that explains less was not told from the others."""


@for_each_setting
def techniques(found: Findings) -> str:
    """A figure per setting (HTML)."""
    pairs = found.marginal[found.marginal["difference"].notna()]
    mains = found.effects[found.effects["kind"].eq("main")]
    return plot(dots(pairs, mains), "") + _partly(pairs) if len(pairs) else f"<p>{_why(mains)}</p>"


def dots(pairs: pd.DataFrame, mains: pd.DataFrame) -> dict[str, Any]:
    """Effects as plain Plotly data. pairs: lines of marginal; mains: of effects, of the same setting."""
    lines = shown_effects(pairs)
    names = [name_of(line) for line in lines.to_dict("records")]
    partly = lines["untried"].ne("")
    sure = lines["q"].lt(0.05)
    traces: list[dict[str, Any]] = []
    for of, colour, what in (
        (~partly, "var(--accent)", "matched pairs"),
        (partly, "var(--muted)", "tried in part only"),
    ):
        part = lines[of]
        if len(part):
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": what,
                    "x": numbers(part["difference"]),
                    "y": [name for name, so in zip(names, of, strict=True) if so],
                    "marker": {
                        "symbol": ["diamond" if s else "diamond-open" for s in sure[of]],
                        "size": 11,
                        "color": colour,
                        "line": {"width": 2, "color": colour},
                    },
                    "error_x": _bars(part, "difference", colour),
                    "text": [_hover(line) for line in part.to_dict("records")],
                    "hovertemplate": "%{y}<br>%{text}<extra></extra>",
                }
            )
    means = lines[["factor", "level", "untried"]].assign(position=names).merge(mains, on=["factor", "level"])
    means = means[means["effect"].notna() & means["untried"].eq("") & means["share"].ge(LEAST_SHARE)]
    if len(means):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "mean over all combinations",
                "x": numbers(means["effect"]),
                "y": list(means["position"]),
                "marker": {"symbol": "circle-open", "size": 9, "color": "var(--c1)"},
                "error_x": {**_bars(means, "effect", "var(--c1)"), "thickness": 1},
                "text": [typeset(change_with_range(*bounds)) for bounds in _bounds(means, "effect")],
                "hovertemplate": "%{y}<br>%{text}<extra>mean over all combinations</extra>",
            }
        )
    ends = pd.concat([lines["difference"], lines["low"], lines["high"], means["effect"]])
    layout = {
        **LAYOUT,
        "height": 130 + 30 * len(names),
        "xaxis": {
            **ratio_axis(ends, f"{noun()} with it against {noun()} without it (← helps)"),
            "zeroline": True,
            "zerolinecolor": "var(--fg)",
        },
        "yaxis": {**AXIS, "autorange": "reversed", "type": "category", "categoryarray": names},
        "legend": {"orientation": "h", "y": 1, "yanchor": "bottom"},
    }
    return {"data": traces, "layout": layout}


def _hover(line: dict[str, Any]) -> str:
    text = typeset(change_with_range(line["difference"], line["low"], line["high"]))
    text += f"<br>{line['matches']} pairs, {100 * line['helps']:.0f} % of them gain"
    return text + (f"<br>one of the two was never tried with {line['untried']}" if line["untried"] else "")


def _bounds(lines: pd.DataFrame, middle: str) -> list[tuple[float, float, float]]:
    return list(lines[[middle, "low", "high"]].itertuples(index=False, name=None))


def _bars(lines: pd.DataFrame, middle: str, colour: str) -> dict[str, Any]:
    return {
        "type": "data",
        "symmetric": False,
        "array": numbers(lines["high"] - lines[middle]),
        "arrayminus": numbers(lines[middle] - lines["low"]),
        "color": colour,
        "thickness": 2,
        "width": 4,
    }


def shown_effects(pairs: pd.DataFrame) -> pd.DataFrame:
    """The lines of `marginal` that are drawn: what can be compared first, large before small."""
    order = pairs.assign(partly=pairs["untried"].ne(""), size=-pairs["difference"].abs())
    order = order[order["difference"].notna()].sort_values(["partly", "size"], kind="stable")
    return order.drop(columns=["partly", "size"]).head(MOST_LINES)


def name_of(line: dict[str, Any]) -> str:
    """A level and what it is measured from."""
    return f"{line['factor']}: {line['level']} (not {line['reference']})"


def _partly(pairs: pd.DataFrame) -> str:
    """The explanation of grey diamonds (HTML); empty where there are none."""
    some = pairs[pairs["untried"].ne("")]
    if some.empty:
        return ""
    return (
        '<p class="muted">Grey: the recipes do not cover what a fair comparison needs, so these are no general '
        "effects. Point at a mark to see what was never tried.</p>"
    )


def _why(mains: pd.DataFrame) -> str:
    if mains.empty:
        return "Nothing was varied here but whole recipes, or there is one recipe: there are no effects."
    return "No two recipes that finished differ in one technique alone, so no effect can be told from the others."


PANEL = Panel("techniques", "Techniques", "What each technique does", techniques, QUERIES, ABOUT)
