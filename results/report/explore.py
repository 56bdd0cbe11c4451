"""The front that can be filtered: every recipe of every setting as compact columns for the script that draws them.

Numbers are base64 of little-endian arrays, and facts of a recipe stand once however many settings have it. A filter is
a bit for each of its values and each recipe. The script (explore.js) filters, sorts, finds the front and draws.
"""

from __future__ import annotations

import base64
import json
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fp4dse.dse.cost import BAND
from fp4dse.results.report.findings import Findings, as_texts
from fp4dse.results.report.panel import Panel
from fp4dse.results.stats.factors import AXES as RECIPE_AXES
from fp4dse.results.stats.factors import PLAIN
from fp4dse.results.stats.paired import bf16_cost
from fp4dse.results.stats.recipes.equal_time import slope_of
from fp4dse.results.stats.recipes.pareto import equal_costs
from fp4dse.results.stats.recipes.summary import ROLLOUT, TIME
from fp4dse.results.text.pareto_table import BETTER, metric_title

QUERIES = (
    "FROM recipes",
    "SELECT task, preset, config_id, p_front FROM front",
    "SELECT task, preset, device_class, config_id, avg({axis}) AS {axis} FROM runs GROUP BY ALL",
    "FROM noise_floor",
)
COLUMNS = 24
"""Costs that are at least this part of the axis apart count as columns."""
_FIELDS = ("rounding", "rotation", "adapt", "scaling", "outliers", "channels", "range", "arithmetic", "source")


def listing(found: Findings) -> str:
    """The table, empty, and the data (HTML)."""
    data = json.dumps(payload(found), allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<div class="wide"><table id="recipes-table"><thead></thead><tbody></tbody></table></div>'
        '<p class="pager"><button type="button" id="previous">previous</button> <span id="page-says"></span> '
        '<button type="button" id="next">next</button></p><p class="about" id="common"></p>'
        f'<script type="application/json" id="recipes">{data}</script>'
    )


def controls(found: Findings) -> str:
    """The bar of selects, one row (HTML); the script fills those of the filters."""
    settings = "".join(f'<option value="{i}">{escape(title)}</option>' for i, title in enumerate(found.titles.values()))
    axes = "".join(f'<option value="{i}">{escape(says)}</option>' for i, says in enumerate(found.axes.values()))
    return (
        '<form class="controls" id="controls" autocomplete="off">'
        f'<select id="setting" aria-label="task" title="task">{settings}</select>'
        f'<select id="axis" aria-label="overhead" title="overhead">{axes}</select><span id="filters"></span>'
        '<input id="words" type="search" aria-label="in words" placeholder="words: nvfp4 rht16">'
        '<button type="reset">reset</button></form>'
    )


def payload(found: Findings) -> dict[str, Any]:
    """The data that the script reads. All columns have the lines of `found.recipes` without BF16's, in its order."""
    lines = found.recipes[~found.recipes["is_baseline"]]
    recipes = as_texts(found.runs.drop_duplicates("config_id")).set_index("config_id")
    recipes = recipes.loc[lines["config_id"].drop_duplicates()]
    position = pd.Series(np.arange(len(recipes)), recipes.index)
    notes = list(dict.fromkeys(["", "diverged", *lines["note"]]))  # the script knows the first two
    note = lines["note"].map({text: i for i, text in enumerate(notes)})
    columns = {
        "setting": _packed(lines["setting"], np.uint16),
        "recipe": _packed(position.reindex(lines["config_id"]), np.uint32),
        **{name: _packed(lines[name], np.float64) for name in ("gap", *found.axes)},
        **{name: _packed(_equal_costs(lines, name), np.float64) for name in BAND},
        ROLLOUT: _packed(lines[ROLLOUT], np.float64),
        **{name: _packed(lines[name], np.float32) for name in ("gap_low", "gap_high", "gap_bf16", "p_front", TIME)},
        **{name: _packed(lines[name], np.float32) for name in ("val_loss", "val_metric", "lr")},
        **{name: _packed(lines[name], np.uint16) for name in ("pairs", "seeds", "diverged", "failed")},
        "note": _packed(note, np.uint8),
        "quantizes": _packed(lines["points"].gt(0), np.uint8),
    }
    labels, named, called = recipes["recipe_label"], recipes["recipe_name"].notna(), found.labels.of
    return {
        "columns": columns,
        "count": len(lines),
        "axes": [
            {"name": name, "title": title, "discrete": _discrete(lines[name])} for name, title in found.axes.items()
        ],
        "settings": [_setting(one) for one in found.settings],
        "notes": notes,
        "ids": list(recipes.index),
        "labels": labels.where(named, labels.map(called)).tolist(),
        "names": labels.map(called).where(named, "").tolist(),
        "common": found.labels.common,
        "filters": [_filter(*choice) for choice in choices(recipes)],
    }


def _equal_costs(lines: pd.DataFrame, name: str) -> pd.Series:
    """The costs of a column, those that differ in their last digits made equal within a setting, as fronts take them;
    NaN where lines have none."""
    if name not in lines:
        return pd.Series(np.nan, lines.index)
    return lines.groupby("setting", sort=False)[name].transform(equal_costs)


def choices(recipes: pd.DataFrame) -> list[tuple[str, dict[str, NDArray[np.bool_]]]]:
    """Per filter its heading, and for each value the recipes that have it. Values of all or of no recipes are left
    out."""
    out = []
    for heading, field in (("element format", "element"), ("scale format", "scale"), ("block", "block")):
        named = [name for name in RECIPE_AXES if name.endswith(f"_{field}") and not name.endswith("_tensor_scale")]
        out.append((heading, _having(recipes, named)))
    techniques: dict[str, NDArray[np.bool_]] = {}
    scaled = [name for name in RECIPE_AXES if name.endswith("_tensor_scale")]
    techniques["tensor scale"] = recipes[scaled].notna().any(axis="columns").to_numpy()
    for field in _FIELDS:
        columns = [name for name in RECIPE_AXES if name.endswith(f"_{field}")]
        found = {value: have for value, have in _having(recipes, columns).items() if value not in PLAIN}
        techniques |= {f"{field} {value}": have for value, have in found.items()}
    for operand in ("x", "w"):
        found = _having(recipes, [f"estimator_{operand}"])
        techniques |= {f"estimator {operand} {value}": have for value, have in found.items() if value not in PLAIN}
    out.append(("technique", techniques))
    some = [(heading, {v: have for v, have in values.items() if 0 < have.sum() < len(have)}) for heading, values in out]
    return [(heading, values) for heading, values in some if values]


def _having(recipes: pd.DataFrame, columns: list[str]) -> dict[str, NDArray[np.bool_]]:
    found: dict[str, NDArray[np.bool_]] = {}
    for name in columns:
        codes, values = pd.factorize(recipes[name])
        for i, value in enumerate(values):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            found[text] = found.get(text, np.zeros(len(recipes), bool)) | (codes == i)
    return dict(sorted(found.items()))


def _filter(heading: str, values: dict[str, NDArray[np.bool_]]) -> dict[str, Any]:
    bits = np.packbits(np.array(list(values.values())), axis=1, bitorder="little")
    return {"title": heading, "values": list(values), "bits": _packed(bits.ravel(), np.uint8)}


def _setting(found: Findings) -> dict[str, Any]:
    [title] = found.titles.values()
    noise = float(found.floors["noise_floor"].iloc[0]) if len(found.floors) else np.nan
    metric = metric_title(found.recipes)
    points = {"points": True} if found.verdicts[0].unit else {}
    rises = bool(metric and metric.endswith(BETTER["higher"]))
    slope = slope_of(found.verdicts[0].margin)
    facts = {"noise": noise if np.isfinite(noise) else None, "bf16": bf16_cost(found.recipes)}
    facts |= {"slope": slope if np.isfinite(slope) else None}
    return {"title": title, **facts, "metric": metric, "rises": rises, **points}


def _discrete(values: pd.Series) -> bool:
    """True if costs are so far apart that recipes of equal cost can be spread sideways."""
    distinct = np.unique(values.dropna())
    return len(distinct) < 2 or bool(np.diff(distinct).min() >= np.ptp(distinct) / COLUMNS)


def _packed(values: object, dtype: type) -> list[str]:
    """[dtype, base64] of the values; missing ones are NaN, or 0 in an integer column."""
    numbers = pd.Series(values).astype(float)
    numbers = numbers if np.issubdtype(dtype, np.floating) else numbers.fillna(0)
    array = numbers.to_numpy().astype(np.dtype(dtype).newbyteorder("<"))
    return [np.dtype(dtype).name, base64.b64encode(array.tobytes()).decode()]


PANEL = Panel("trade-off", "Recipes", "All recipes", listing, QUERIES)
