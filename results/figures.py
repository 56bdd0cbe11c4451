"""The look that all figures share, as plain Plotly data.

Colours are CSS variables, `var(--name)`, which the page replaces when it draws, so that one figure serves light and
dark. Nothing depends on colour: marks have shapes or numbers, lines have dashes.
"""

from __future__ import annotations

import textwrap
from html import escape

import numpy as np
import pandas as pd

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


def numbers(values: pd.Series) -> list[float | None]:
    """Plain numbers, None where there is none."""
    return [float(v) if np.isfinite(v) else None for v in values]


def wrapped(text: str, width: int = 40) -> str:
    """A label in lines (HTML)."""
    lines = textwrap.wrap(escape(text, quote=False), width, break_long_words=False, break_on_hyphens=False)
    return "<br>".join(lines)
