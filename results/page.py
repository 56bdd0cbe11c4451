"""The report's frame: one HTML file with its own style, script and plotting library, that asks the network for nothing.

Figures arrive as JSON with CSS variables for colours; the script fills them in when it draws and again when the
reader's system changes between light and dark.
"""

from __future__ import annotations

import json
from html import escape

STYLE = """
:root { color-scheme: light dark; --bg: #fff; --fg: #1b1f24; --muted: #67707b; --line: #e3e7eb; --accent: #1d5fd0;
  --bad: #b3261e; --band: rgba(120, 130, 145, .14); --soft: #f5f7f9;
  --c0: #1d5fd0; --c1: #c25100; --c2: #00806a; --c3: #a3369b; --c4: #8a6d00; --c5: #4b5563; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171b; --fg: #e6e9ec; --muted: #9aa4af; --line: #2c323a;
  --accent: #82aaff; --bad: #ff8a80; --band: rgba(160, 170, 185, .16); --soft: #1b1f25;
  --c0: #82aaff; --c1: #ffab70; --c2: #5fd3b8; --c3: #e39be0; --c4: #e0c65c; --c5: #aab4c0; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 2rem 1rem 4rem; background: var(--bg); color: var(--fg);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.3rem; margin: 3rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 .3rem; }
p, ul { max-width: 46rem; } li { margin: .4rem 0; }
.muted, figcaption, summary { color: var(--muted); } figcaption { font-size: .88rem; max-width: 46rem; }
figure { margin: 1rem 0; } .plot { min-height: 420px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { padding: .35rem .6rem; text-align: left; border-bottom: 1px solid var(--line); vertical-align: top; }
th { position: sticky; top: 0; background: var(--bg); font-weight: 600; white-space: nowrap; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid var(--accent); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.label { min-width: 13rem; } tr.front { background: var(--soft); } tr.front td.label { font-weight: 600; }
.mark { display: inline-block; min-width: 1.6em; border-radius: 1em; padding: 0 .4em; text-align: center;
  background: var(--accent); color: var(--bg); font-weight: 600; }
.tall { max-height: 36rem; overflow: auto; }
pre { background: var(--soft); padding: .8rem; overflow-x: auto; font-size: .85rem; }
summary { cursor: pointer; margin: .4rem 0; }
"""

SCRIPT = """
const style = getComputedStyle(document.documentElement);
const coarse = matchMedia("(pointer: coarse)").matches;
const value = (_, name) => style.getPropertyValue(name).trim();
const paint = v => typeof v === "string" ? v.replace(/var\\((--[\\w-]+)\\)/g, value)
  : Array.isArray(v) ? v.map(paint)
  : v && typeof v === "object" ? Object.fromEntries(Object.entries(v).map(([k, x]) => [k, paint(x)])) : v;
const config = {responsive: true, displayModeBar: coarse ? false : "hover",
  modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]], displaylogo: false};
const draw = () => document.querySelectorAll(".plot").forEach(plot => {
  const figure = paint(JSON.parse(plot.nextElementSibling.textContent));
  if (coarse) figure.layout.dragmode = false;  // a finger scrolls the page
  Plotly.react(plot, figure.data, figure.layout, config);
});
draw();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.querySelectorAll("th button").forEach(button => button.addEventListener("click", () => {
  const head = button.closest("th"), body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  head.parentNode.querySelectorAll("th").forEach(th => th.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const key = row => row.cells[head.cellIndex].dataset.v ?? row.cells[head.cellIndex].textContent;
  const order = (a, b) => a === b ? 0 : a === "" ? 1 : b === "" ? -1
    : (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b) * (up ? 1 : -1);
  body.append(...[...body.rows].sort((a, b) => order(key(a), key(b))));
}));
"""


def page(title: str, body: str) -> str:
    """The whole file. title: text; body: HTML."""
    from plotly.offline import get_plotlyjs

    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head += f"<title>{escape(title)}</title><style>{STYLE}</style>"
    scripts = f"<script>{get_plotlyjs()}</script><script>{SCRIPT}</script>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}{scripts}</body></html>\n'


def plot(figure: dict, caption: str) -> str:
    """A figure with its caption (HTML)."""
    data = json.dumps(figure, allow_nan=False).replace("<", "\\u003c")
    return (
        f'<figure><div class="plot"></div><script type="application/json">{data}</script>'
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
    return f'<div class="wide tall"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
