"""The report: what won, how sure that is, what it cost, and what was run where, as one HTML file."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime
from html import escape
from pathlib import Path

import numpy as np
import pandas as pd

from fp4dse.dse import StoreError, recipe_from_dict, recipe_to_toml
from fp4dse.results.figures import MOST_POINTS, curves_figure, front_figure
from fp4dse.results.files import write_atomic
from fp4dse.results.intervals import CONFIDENCE, counted, percent
from fp4dse.results.page import page, plot, table
from fp4dse.results.paired import SETTING, at_best_lr, outcomes
from fp4dse.results.store import Store
from fp4dse.results.summary import SUMMARIZED, noise_floor, summarize
from fp4dse.results.tables import baseline_text, count, gap_text, has_metric, number, setting_titles

MOST_LINES = 500
"""Recipes in a table; the store has them all."""
MOST_CURVES = 8
"""Members of the front whose curves are drawn, the cheapest first."""

MACHINE = ["device_name", "device", "threads", "dtype", "quantizer_backend", "gemm_backend", "host"]
SOFTWARE = ["torch_version", "python_version", "fp4dse_version", "git_commit"]
_COLUMNS = [*SUMMARIZED, "run_id", "recipe", "failure", "fallbacks", "lane_s", "created_at", *MACHINE, *SOFTWARE]


def write_report(store: Store, path: str | Path, title: str = "FP4 recipes: quality against overhead") -> None:
    """Write the report of a store to `path`, an HTML file that needs no network.

    StoreError if the store holds no runs or the file cannot be written.
    """
    runs = store.runs(_COLUMNS)
    if runs.empty:
        raise StoreError(f"{store.path}: nothing to report, the store holds no runs")
    summary, floors = summarize(runs), noise_floor(runs)
    summary["number"] = _numbers(summary)
    titles = setting_titles(summary)
    sections = []
    for keys, lines in summary.groupby(list(SETTING), sort=False):
        floor = floors[(floors[list(SETTING)] == list(keys)).all(axis="columns")]
        here = runs[(runs[list(SETTING)] == list(keys)).all(axis="columns")]
        sections.append((titles[keys], lines, floor, here))
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="muted">{escape(_scope(runs, summary))}</p>',
        "<h2>What came out</h2><ul>",
        *(f"<li>{_verdict(*section[:3])}</li>" for section in sections),
        f"</ul>{_HOW_TO_READ}",
        *(_section(store, *section) for section in sections),
        _provenance(runs),
        _reproduce(runs, summary, titles),
    ]
    write_atomic(Path(path), page(title, "\n".join(body)).encode())


_HOW_TO_READ = f"""
<details><summary>How to read this</summary>
<p>The <b>gap</b> is log(validation loss / BF16 validation loss), in %: about the relative excess of the loss. Recipe
and BF16 are paired: in a seed both start from the same weights and see the same data in the same order, and each runs
at its own best learning rate of the same grid. The number after ± is the {CONFIDENCE:.0%} t-interval over the paired
seeds. <b>Points</b> count the techniques that a recipe switches on, with one for FP4 itself (arXiv 2509.17791). A
recipe is on the <b>front</b> if no other recipe that quantizes has a lower gap for as few points, or fewer points for
as low a gap. The <b>noise floor</b> is how far BF16 is from BF16 when nothing but the seed differs.</p>
<p>The front is made of the luckiest recipes as well as of the best: with many recipes and few seeds the lowest gap is
lower than it would be on new seeds.</p></details>"""


def _scope(runs: pd.DataFrame, summary: pd.DataFrame) -> str:
    recipes = runs.loc[~runs["is_baseline"], "config_id"].nunique()
    statuses = runs["status"].value_counts()
    parts = [counted(recipes, "recipe"), counted(summary["task"].nunique(), "task"), f"{len(runs):,} trained lanes"]
    parts += [f"{statuses.get(status, 0)} {status}" for status in ("diverged", "failed")]
    return f"{', '.join(parts)}. Written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."


def _verdict(title: str, lines: pd.DataFrame, floor: pd.DataFrame) -> str:
    """What won in one setting and how sure that is, in words (HTML)."""
    tried = lines[lines["points"].gt(0)]
    ranked = tried[np.isfinite(tried["gap"])].sort_values("gap")
    if ranked.empty:
        says = ["No recipe that quantizes has a gap here."]
    else:
        best, cheap = ranked.iloc[0], ranked[ranked["on_front"]].sort_values("points").iloc[0]
        says = [f"Lowest gap: {_named(best)}.", *_certainty(best, ranked)]
        if cheap["config_id"] != best["config_id"]:
            says.append(f"Cheapest on the front: {_named(cheap)}.")
    says += [f"{escape(text)}." for text in (baseline_text(floor), count(lines))]
    return f"<b>{escape(title)}.</b> " + " ".join(says).replace(" %", "&nbsp;%")


def _named(line: pd.Series) -> str:
    """A recipe with its gap, interval and points (HTML)."""
    interval = "one seed, so no interval"
    if math.isfinite(line["gap_low"]):
        interval = f"{percent(line['gap_low'])} to {percent(line['gap_high'])} % over {line['pairs']} paired seeds"
    times = f", {math.exp(line['gap']):.1f} times the BF16 loss" if line["gap"] > 0.5 else ""
    gap = f"{percent(line['gap'])} % ({interval}){times}"
    return f"<b>{escape(line['label'])}</b> at {gap}, for {counted(line['points'], 'point')}"


def _certainty(best: pd.Series, ranked: pd.DataFrame) -> list[str]:
    """Whether the seeds tell the best recipe apart from BF16 and from the others."""
    if best["pairs"] < 2:
        return []
    alike = ["BF16"] if best["gap_low"] <= 0 <= best["gap_high"] else []
    if others := int(ranked["p_best"].iloc[1:].ge(1 - CONFIDENCE).sum()):
        share = "any" if others == len(ranked) - 1 else others
        alike.append(f"{share} of the {counted(len(ranked) - 1, 'other recipe')}")
    return [f"The seeds do not tell it apart from {' nor from '.join(alike)}."] if alike else []


def _section(store: Store, title: str, lines: pd.DataFrame, floor: pd.DataFrame, runs: pd.DataFrame) -> str:
    noise = floor["noise_floor"].iloc[0] if len(floor) else math.nan
    caption = "Lower is better, further left is cheaper. Within a column of equal points the recipes are spread "
    caption += "sideways only to keep them apart. Bars: interval over seeds. Grey band: noise floor. Line at 0: BF16."
    if len(lines) > MOST_POINTS:
        caption += f" Off the front, the {MOST_POINTS} lowest gaps are drawn."
    html = f"<h2>{escape(title)}</h2>" + plot(front_figure(lines, noise), caption) + _recipes(lines)
    curves = _front_curves(store, lines, runs)
    if len(curves):
        html += "<h3>Loss curves of the front against BF16</h3>"
        html += plot(curves_figure(curves), "Line: mean over seeds. Band: lowest to highest seed.")
    return html


def _recipes(lines: pd.DataFrame) -> str:
    metric = str(lines["metric_name"].dropna().iloc[0]) if has_metric(lines) else None
    columns = [("front", ""), ("recipe", "label"), ("gap to BF16, %", "n"), ("points", "n"), ("bits", "n")]
    columns += [(metric, "n")] if metric else []
    columns += [("val loss", "n"), ("lr", "n"), ("seeds", "n")]
    tried = lines[~lines["is_baseline"]].sort_values(["number"], kind="stable", na_position="last")
    rows, classes = [], []
    for _, line in tried.head(MOST_LINES).iterrows():
        place = int(line["number"]) if line["on_front"] else None
        name = f' <span class="muted">{escape(line["name"])}</span>' if isinstance(line["name"], str) else ""
        gap = line["gap"] if math.isfinite(line["gap"]) else None
        row: list[tuple[str, object]] = [(f'<span class="mark">{place}</span>' if place else "", place)]
        row += [(escape(line["label"]) + name * (line["name"] != line["label"]), line["label"])]
        row += [
            (escape(gap_text(line)), gap),
            (str(line["points"]), line["points"]),
            (f"{line['bits']:g}", line["bits"]),
        ]
        row += [(number(line["val_metric"]), line["val_metric"])] if metric else []
        row += [(number(line["val_loss"]), line["val_loss"]), (f"{line['lr']:g}", line["lr"])]
        rows.append([*row, (str(line["seeds"]), line["seeds"])])
        classes.append("front" if place else "")
    more = len(tried) - len(rows)
    note = f'<p class="muted">{more} more in the store, with higher gaps or none.</p>' if more else ""
    return table(columns, rows, classes) + note


def _numbers(summary: pd.DataFrame) -> pd.Series:
    """1, 2 … along each setting's front, cheapest first; null elsewhere."""
    front = summary[summary["on_front"]].sort_values(["points", "gap"])
    return (front.groupby(list(SETTING)).cumcount() + 1).reindex(summary.index).astype("Int64")


def _front_curves(store: Store, lines: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """name, curve_step, curve_loss of the baseline and the front at their best learning rates."""
    front = lines[lines["on_front"]].sort_values("number").head(MOST_CURVES)
    names = dict(zip(front["config_id"], front["number"].astype(str) + " " + front["label"], strict=True))
    names = {**dict.fromkeys(lines.loc[lines["is_baseline"], "config_id"], "BF16"), **names}
    chosen = runs[at_best_lr(outcomes(runs)) & runs["config_id"].isin(list(names)) & runs["status"].eq("done")]
    curves = store.curves(list(chosen["run_id"])).merge(chosen[["run_id", "config_id"]])
    curves = curves[curves["curve_step"].str.len().gt(0)]
    curves["name"] = curves["config_id"].map(names)
    return curves.sort_values("config_id", key=lambda ids: ids.map({c: i for i, c in enumerate(names)}), kind="stable")


def _provenance(runs: pd.DataFrame) -> str:
    """Which machine, which versions, how long, and what did not go as wanted."""
    groups = runs.fillna(
        dict.fromkeys(["device_name", *SOFTWARE, "host", "quantizer_backend", "gemm_backend", "dtype"], "–")
    )
    groups = (
        groups.groupby([*MACHINE, *SOFTWARE], sort=False, dropna=False)["lane_s"].agg(["size", "sum"]).reset_index()
    )
    columns = [("lanes", "n"), ("time", "n"), *((name.replace("_", " "), "") for name in [*MACHINE, *SOFTWARE])]
    rows = []
    for line in groups.to_dict("records"):
        row: list[tuple[str, object]] = [(f"{line['size']:,}", line["size"]), (_duration(line["sum"]), line["sum"])]
        words = ["–" if pd.isna(line[name]) else str(line[name]) for name in [*MACHINE, *SOFTWARE]]
        rows.append([*row, *((escape(word), word) for word in words)])
    html = f"<h2>What was run where</h2>{table(columns, rows)}"
    html += _counts("Paths that were wanted and not taken", runs["fallbacks"].explode().dropna())
    return html + _counts("Lanes that failed (they are tried again by the same sweep)", runs["failure"].dropna())


def _counts(heading: str, sentences: pd.Series) -> str:
    if sentences.empty:
        return ""
    items = "".join(
        f"<li>{escape(text)} ({counted(n, 'lane')})</li>" for text, n in sentences.value_counts().head(20).items()
    )
    return f"<h3>{escape(heading)}</h3><ul>{items}</ul>"


def _duration(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 600
        else f"{seconds / 60:.0f} min"
        if seconds < 36000
        else f"{seconds / 3600:.1f} h"
    )


def _reproduce(runs: pd.DataFrame, summary: pd.DataFrame, titles: dict[tuple, str]) -> str:
    html = "<h2>How to run it again</h2><p>Install the version and commit named above. A lane is determined by its "
    html += (
        "recipe, learning rate, seed, and what stands here; the same sweep on the same class of device and software "
    )
    html += "gives the same bits, and trains only what the store lacks.</p><ul>"
    for keys, part in runs.groupby(list(SETTING), sort=False):
        facts = dict(zip(SETTING, keys, strict=True))
        rates = ", ".join(f"{lr:g}" for lr in sorted(part["lr"].unique()))
        seeds = ", ".join(str(seed) for seed in sorted(part["seed"].unique()))
        others = "; ".join(f"{name.replace('_', ' ')} {facts[name]}" for name in SETTING[2:])
        html += f"<li><b>{escape(titles[keys])}</b>: learning rates {rates}; seeds {seeds}; {escape(others)}</li>"
    html += "</ul><p>Recipes on a front, as files that <code>fp4dse</code> takes wherever it takes a recipe:</p>"
    front = summary[summary["on_front"]].drop_duplicates("config_id")
    texts = runs.drop_duplicates("config_id").set_index("config_id")["recipe"]
    for config_id, label in zip(front["config_id"], front["label"], strict=True):
        toml = recipe_to_toml(recipe_from_dict(json.loads(texts[config_id])))
        html += f"<details><summary>{escape(label)} ({config_id})</summary><pre>{escape(toml)}</pre></details>"
    return html
