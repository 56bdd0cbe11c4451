"""The panel of each operand's quantizer on a bell curve: error, clipped and flushed shares, for recipes on a front."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import pandas as pd

from fp4dse.dse import recipe_from_dict
from fp4dse.dse.stages import SLOTS
from fp4dse.results.report.findings import Findings, Statistics
from fp4dse.results.report.markup import called, number
from fp4dse.results.report.page import table
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.stats.paired import OVERHEAD, SETTING
from fp4dse.results.stats.recipes.summary import summarize

COMMAND = (
    "from fp4dse.kernels.inspection.gaussian import gaussian_statistics; from fp4dse.results import open_store; "
    "from fp4dse.results.report.operand_errors import front_slots; "
    "print(front_slots(open_store({path!r}).runs(), gaussian_statistics).to_string())"
)
"""Python that prints the section's numbers."""
MOST = 12
ABOUT = f"""What the quantizer of each slot does to standard normal numbers: relative squared error in %, and below it
the shares of elements that are clipped and flushed to zero. A rotation is not part of it. The {MOST} cheapest
recipes of the front, the cheapest first."""
_SHOWN = ["bits", "mse", "clipped", "flushed"]


def front_slots(runs: pd.DataFrame, statistics: Statistics) -> pd.DataFrame:
    """SETTING, config_id, label, slot, bits, mse, clipped, flushed of the recipes on each front, cheapest first."""
    texts = runs.drop_duplicates("config_id").set_index("config_id")["recipe"]
    return slot_lines(summarize(runs), texts, cache(statistics))


def slot_lines(recipes: pd.DataFrame, texts: Mapping[str, str], statistics: Statistics) -> pd.DataFrame:
    """`front_slots` of the lines of `summarize`. texts: config_id -> recipe as JSON."""
    front = recipes[recipes["on_front"]].sort_values([*SETTING, OVERHEAD, "gap"])
    front = front.groupby(list(SETTING), sort=False).head(MOST)
    lines = []
    for line in front[[*SETTING, "config_id", "label"]].to_dict("records"):
        recipe = recipe_from_dict(json.loads(texts[line["config_id"]]))
        for slot in SLOTS:
            found = statistics(recipe.slot(slot))  # both callers remember those of a quantizer
            lines.append({**line, "slot": slot, **{name: found[name] for name in _SHOWN}})
    columns = [*SETTING, "config_id", "label", "slot", *_SHOWN]
    return pd.DataFrame(lines, columns=columns).astype(dict.fromkeys(_SHOWN, float))


def slots(found: Findings) -> str:
    """A table per setting (HTML): a line a recipe, a column a slot; empty without statistics."""
    return _of_setting(found) if found.statistics else ""


@for_each_setting
def _of_setting(found: Findings) -> str:
    assert found.statistics
    lines = slot_lines(found.recipes, found.recipe_texts, found.statistics)
    rows: list[list[tuple[str, object]]] = [
        [(called(part["label"].iloc[0], found.labels), part["label"].iloc[0]), *map(_cell, part.to_dict("records"))]
        for _, part in lines.groupby("config_id", sort=False)
    ]
    columns = [("recipe", "label"), *((slot, "n") for slot in SLOTS)]
    return table(columns, rows) if rows else "<p>There is no front here.</p>"


def _cell(found: Mapping[str, Any]) -> tuple[str, object]:
    if math.isnan(found["mse"]):
        return "–", None
    shares = [found[name] for name in ("clipped", "flushed")]
    small = "<br>".join(
        f"{number(share, f'{100 * share:.2g}')} % {word}"
        for share, word in zip(shares, ("clipped", "flushed"), strict=True)
        if share > 0
    )
    text = number(found["mse"], f"{100 * found['mse']:.3g}")
    return f'{text} %<br><span class="muted">{small}</span>', found["mse"]


PANEL = Panel("slots", "Operands", "Error of each operand", slots, about=ABOUT, code=COMMAND)
