"""The panel of highlights: what helps, what harms, how learning rates were chosen, how much was tried."""

from __future__ import annotations

import math
from html import escape

import pandas as pd

from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import called, many, number, spoken, typeset
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.report.technique_findings import everywhere, helps
from fp4dse.results.text.pareto_table import metric_title
from fp4dse.results.text.pareto_table import number as digits
from fp4dse.results.text.ratios import best, size

QUERIES = (
    "SELECT count(DISTINCT config_id) FILTER (NOT is_baseline) AS recipes, count(DISTINCT task) AS tasks, count(*) AS "
    "lanes, count(*) FILTER (status = 'diverged') AS diverged, count(*) FILTER (status = 'failed') AS failed FROM runs",
    "FROM marginal",
    "FROM versus_best",
    "FROM noise_floor",
    "FROM learning_rates",
    "SELECT task, preset, any_value(rates) AS rates, sum(at_edge::INT) AS at_edge, "
    "sum((NOT same_grid AND source IS DISTINCT FROM 'preset')::INT) AS other_grid, "
    "sum((source = 'preset' AND NOT is_baseline)::INT) AS untuned FROM learning_rates GROUP BY ALL",
    "SELECT task, preset, count(*) AS recipes, sum(on_front::INT) AS on_front, "
    "count(*) FILTER (note = 'diverged') AS diverged, count(*) FILTER (note = 'pruned') AS pruned, "
    "count(*) FILTER (note = 'failed') AS failed, max(seeds) AS seeds FROM recipes WHERE NOT is_baseline GROUP BY ALL",
)
ABOUT = """Effects are means over pairs of recipes that differ in nothing else, in % of loss, with 95 % intervals over
seeds. A technique helps, or harms, where it is told from no change with all techniques in mind (of twenty such, one is
chance) and four of five pairs agree; it is said of these pairs."""


def highlights(found: Findings) -> str:
    """The effects that hold in every task, then a card per setting (HTML)."""
    return everywhere(found) + _card(found)


@for_each_setting
def _card(found: Findings) -> str:
    [(title, verdict)] = zip(found.titles.values(), found.verdicts, strict=True)
    says = [*helps(found), *_undecided(found)]
    says.append(f"<b>Learning rates</b>: {spoken(verdict.rates.sentence())}.")
    says.append(f"<b>BF16</b>: {_baseline(found.floors)}")
    says.append(f"<b>Tried</b>: {_tried(found.recipes)}")
    text = "".join(f"<li>{line}</li>" for line in says)
    return f'<div class="verdict"><h3>{escape(title)}</h3><ul>{text}</ul></div>'


def _undecided(found: Findings) -> list[str]:
    """The recipe that the fewest more seeds would tell from the best, if there is one."""
    others = found.versus_best
    bases = found.recipes.loc[found.recipes["is_baseline"], "config_id"]
    still = others[others["verdict"].eq("open") & ~others["config_id"].isin(bases)]
    still = still[still["more_seeds"].astype(float).lt(math.inf)].sort_values("difference")
    if still.empty:
        return []
    near = still.iloc[0]
    more = many(near["more_seeds"], "more seed")
    return [f"<b>More seeds</b>: {more} would tell {called(near['label'], found.labels)} from {best()}."]


def _tried(lines: pd.DataFrame) -> str:
    tried = lines[~lines["is_baseline"]]
    notes = {note: int(tried["note"].eq(note).sum()) for note in ("diverged", "pruned", "failed")}
    counts = [f"{number(int(tried['on_front'].sum()))} on the front"]
    counts += [f"{number(n)} {note}" for note, n in notes.items() if n]
    seeds = int(tried["seeds"].max()) if len(tried) else 0
    return f"{many(len(tried), 'recipe')}, up to {many(seeds, 'seed')} each: {', '.join(counts)}."


def _baseline(floor: pd.DataFrame) -> str:
    if floor.empty or not floor["seeds"].iloc[0]:
        return "no baseline was finished here, so there are no gaps."
    line = floor.iloc[0]
    title = metric_title(floor)
    metric = f", {escape(title)} {number(line['val_metric'], digits(line['val_metric']))}" if title else ""
    noise = "with one seed its noise floor is unknown"
    if math.isfinite(line["noise_floor"]):
        floor_text = number(line["noise_floor"], typeset(size(line["noise_floor"])))
        noise = f"from seed to seed it differs by {floor_text} (noise floor)"
    reached = f"a loss of {number(line['val_loss'], digits(line['val_loss']))}"
    return f"{reached}{metric}; {noise}."


PANEL = Panel("said", "Helps", "What helps, what harms", highlights, QUERIES, ABOUT)
