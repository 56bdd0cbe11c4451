"""The frame of a page: one HTML file with its style, scripts and plotting library, that asks the network for nothing.

Figures arrive as JSON with CSS variables for colours; the script fills them in when it draws and again when the
reader's system changes between light and dark. Style and scripts are files in report/. The plotting library comes as
text that the script reads once the page is on the screen.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

_FILES = Path(__file__).parent


def page(title: str, body: str, scripts: tuple[str, ...] = ()) -> str:
    """The whole file. title: text; body: HTML; scripts: files of report/ beside page.js."""
    from plotly.offline import get_plotlyjs

    style = (_FILES / "page.css").read_text(encoding="utf-8")
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{style}</style>"
    texts = [(_FILES / name).read_text(encoding="utf-8") for name in ("page.js", *scripts)]
    ends = "".join(f"<script>{text}</script>" for text in texts)
    ends = f'<script type="text/plain" id="plotly">{get_plotlyjs()}</script>{ends}'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{ends}</body></html>\n'


def plot(figure: dict[str, Any], caption: str) -> str:
    """A figure with its caption (HTML)."""
    data = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    height = figure["layout"].get("height", 420)
    return (
        f'<figure><div class="plot" style="height:{height}px"></div><script type="application/json">{data}</script>'
        f"<figcaption>{caption}</figcaption></figure>"
    )


def table(
    columns: list[tuple[str, str]], rows: list[list[tuple[str, object]]], classes: list[str] | None = None
) -> str:
    """A table that sorts by any column. columns: (heading, class); rows: (HTML, sort key) per cell.

    A cell whose key is None sorts last. classes: of the rows.
    """
    head = "".join(f'<th class="{kind}"><button type="button">{escape(name)}</button></th>' for name, kind in columns)
    lines = []
    for i, row in enumerate(rows):
        cells = (
            f'<td class="{kind}" data-v="{"" if key is None else escape(str(key))}">{html}</td>'
            for (html, key), (_, kind) in zip(row, columns, strict=True)
        )
        lines.append(f'<tr class="{classes[i] if classes else ""}">{"".join(cells)}</tr>')
    opening = '<div class="wide tall"><table class="sortable">'
    return f"{opening}<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
