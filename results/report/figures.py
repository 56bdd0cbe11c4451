"""The look that all figures share, as plain Plotly data.

Colours are CSS variables, `var(--name)`, which the page replaces when it draws, so that one figure serves light and
dark. Nothing depends on colour: marks have shapes or numbers, lines have dashes.
"""

from __future__ import annotations

import textwrap
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.results.text.ratios import in_points

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
COLOURS = 6
"""Number of colours --c0, --c1 … that the page defines."""

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


def numbers(values: pd.Series) -> list[float | None]:
    """Plain numbers, None where there is none."""
    return [float(v) if np.isfinite(v) else None for v in values]


def ratio_ticks(low: float, high: float, most: int = 7) -> tuple[list[float], list[str]]:
    """Positions (log ratios between low and high) and texts of the ticks of an axis of log ratios: changes in %, or
    ratios where the axis spans them; or points of accuracy. Zero, no change, is among them if it is on the axis."""
    span = max(high - low, 1e-9)
    if in_points():
        points = _even_steps(100 * low, 100 * high, most)
        return [float(v) for v in points / 100], [f"{-p + 0.0:+g}".replace("-", "−") if p else "0" for p in points]
    if max(abs(low), abs(high)) < np.log(2):
        percents = _even_steps(100 * np.expm1(low), 100 * np.expm1(high), most)
        step = percents[1] - percents[0] if len(percents) > 1 else 1.0
        digits = max(0, -int(np.floor(np.log10(step) + 1e-9)))
        texts = ["0 %" if p == 0 else f"{p:+.{digits}f} %".replace("-", "−") for p in percents]
        return [float(v) for v in np.log1p(percents / 100)], texts
    if span < np.log(4):  # too few powers of two: even steps of the ratio itself
        ratios = _even_steps(float(np.exp(low)), float(np.exp(high)), most)
        return [float(v) for v in np.log(ratios)], [f"× {ratio:.6g}" for ratio in ratios]
    step = next(s for s in (np.log(2), np.log(4), *np.log(10) * np.arange(1, 400)) if span / s <= most)
    if step == np.log(2) and span / step < 3:
        step = np.log(2) / 2  # × 1.41
    values = step * np.arange(np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9) + 1)
    return [float(v) for v in values], [f"× {np.exp(v):.3g}" for v in values]


def _even_steps(low: float, high: float, most: int) -> NDArray[np.float64]:
    """Round numbers from low to high, evenly apart; at most so many and one."""
    steps = (m * 10.0**e for e in range(-6, 400) for m in (1, 2, 5))
    step = next(s for s in steps if (high - low) / s <= most)
    return step * np.arange(np.ceil(low / step - 1e-9), np.floor(high / step + 1e-9) + 1)


def ratio_axis(values: object, says: str) -> dict[str, Any]:
    """A Plotly axis of log ratios with its title. values: all that has to be on it; NaN is left out."""
    known = np.asarray(values, float)
    known = np.append(known[np.isfinite(known)], 0.0)
    room = 0.06 * max(float(np.ptp(known)), 1e-3)
    low, high = float(known.min()) - room, float(known.max()) + room
    positions, texts = ratio_ticks(low, high)
    return {**AXIS, "title": {"text": says}, "range": [low, high], "tickvals": positions, "ticktext": texts}


def usual_limit(values: object, at_least: float) -> float | None:
    """The limit above which values are clipped so that they do not squash the rest: Tukey's fence; None where that
    would save less than half of the range. values: [n]; at_least: what has to stay, the highest of the front, say."""
    known = np.asarray(values, float)
    known = known[np.isfinite(known)]
    if len(known) < 4:
        return None
    first, third = np.quantile(known, [0.25, 0.75])
    fence = max(third + 1.5 * (third - first), at_least)
    return float(fence) if known.max() - known.min() > 2 * (fence - known.min()) > 0 else None


def wrapped(text: str, width: int = 40) -> str:
    """A label in lines (HTML)."""
    lines = textwrap.wrap(escape(text, quote=False), width, break_long_words=False, break_on_hyphens=False)
    return "<br>".join(lines)
