"""What each slot's quantizer does to a bell curve: error, clipped and flushed shares, per recipe on a front.

Quantizing is the business of another room, so whoever writes the report passes the function in.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape

from fp4dse.dse import Quantizer, recipe_from_dict
from fp4dse.dse.recipe import SLOTS
from fp4dse.results.page import table
from fp4dse.results.report.findings import Findings
from fp4dse.results.report.parts import number, of_setting

Statistics = Callable[[Quantizer], Mapping]
"""quantizer -> mse (relative, None if nothing is lost), clipped, flushed (shares, None for a plain operand), bits."""

QUERIES = (
    'python -c "from fp4dse.dse import load_recipe; from fp4dse.kernels.gaussian import gaussian_statistics; '
    "print(gaussian_statistics(load_recipe('CONFIG.toml').slot('fprop.x')))\"",
)
ABOUT = """What the quantizer of each slot does to standard normal numbers: relative squared error in %, and below it
the shares of elements that are clipped and flushed to zero. A rotation is not part of it. Recipes of the front, the
cheapest first."""
MOST = 12


def slots(found: Findings, statistics: Statistics) -> str:
    """A table per setting (HTML): a line a recipe, a column a slot."""
    parts = []
    texts = found.runs.drop_duplicates("config_id").set_index("config_id")["recipe"]
    known: dict[str, Mapping] = {}
    for setting in range(len(found.titles)):
        lines = found.recipes[found.recipes["setting"].eq(setting) & found.recipes["on_front"]]
        lines = lines.sort_values([next(iter(found.axes)), "gap"]).head(MOST)
        rows = []
        for config_id, label in zip(lines["config_id"], lines["label"], strict=True):
            recipe = recipe_from_dict(json.loads(texts[config_id]))
            row: list[tuple[str, object]] = [(escape(label), label)]
            for slot in SLOTS:
                quantizer = recipe.slot(slot)
                key = repr(quantizer)
                if key not in known:
                    known[key] = statistics(quantizer)
                row.append(_cell(known[key]))
            rows.append(row)
        columns = [("recipe", "label"), *((slot, "n") for slot in SLOTS)]
        parts.append(of_setting(setting, table(columns, rows) if rows else "<p>There is no front here.</p>"))
    return "".join(parts)


def _cell(found: Mapping) -> tuple[str, object]:
    if found["mse"] is None:
        return "–", None
    shares = [found[name] for name in ("clipped", "flushed")]
    small = ", ".join(
        f"{number(share, f'{100 * share:.2g}')} {word}"
        for share, word in zip(shares, ("clipped", "flushed"), strict=True)
        if share
    )
    text = number(found["mse"], f"{100 * found['mse']:.3g}")
    return f'{text} %<br><span class="muted">{small}</span>', found["mse"]
