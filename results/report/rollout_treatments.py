"""Effects of each fix, correction and injected part on the numbers of reinforcement learning, a table per setting.

They are those of `sweep --record`, and are left out where nothing was recorded of rollouts, or no two recipes make a
pair.
"""

from __future__ import annotations

import math

import pandas as pd

from fp4dse.results.report.findings import Findings
from fp4dse.results.report.markup import number, typeset
from fp4dse.results.report.page import table
from fp4dse.results.report.panel import Panel, where_any
from fp4dse.results.stats.levels import are_shares
from fp4dse.results.stats.paired import DERIVED, NEEDED
from fp4dse.results.stats.rollouts.effects import rollout_effects
from fp4dse.results.stats.rollouts.numbers import OF_RATIOS

SHOWN = {
    "accuracy": "accuracy, points",
    "mismatch_kl": "KL, rollout to trainer",
    "mismatch_kl_slope": "its slope, per 100 updates",
    "entropy_at_reward": "entropy at equal reward",
    "gradient_error": "gradient error",
}
"""Number -> heading. The gradient's errors by block follow, the first and the last."""
BY_BLOCK = "gradient_error/"
QUERIES = ("FROM rollout_effects",)
ABOUT = """What changes where a recipe has a treatment that another one, the same in all else, has not: mean over such
pairs at one learning rate, and in brackets 95 % intervals over seeds; <b>bold</b> where q, p adjusted for all lines of
the view, is below 0.05. Where all seeds tie, neither is known. Entropies and KL are in nats a token. An error of the
gradient is relative to that of BF16 products, its means are geometric, and × is what the treatment multiplies it by; 0:
both have none."""


def effects(found: Findings) -> str:
    """A table per setting (HTML), a line a treatment and kind of trainer; empty where there is no pair."""
    return where_any(found, effects_of, _table, "<p>No two recipes with records make a pair here.</p>")


def effects_of(found: Findings) -> pd.DataFrame:
    """The lines of `rollout_effects` of the runs of a setting; none, at once, where no gap is in points."""
    runs = found.runs[[*NEEDED, *DERIVED, "run_id"]]
    runs = runs[are_shares(runs)]
    if runs.empty:
        return rollout_effects(runs)
    recorded = found.store.recorded(list(runs["run_id"]))
    texts = found.store.recipe_texts(list(runs["config_id"].unique()))
    records = pd.Series([recorded.get(run_id) for run_id in runs["run_id"]], runs.index, dtype=object)
    return rollout_effects(runs.assign(recorded=records, recipe=[texts.get(key) for key in runs["config_id"]]))


def _table(lines: pd.DataFrame) -> str:
    blocks = sorted((name for name in lines["number"].unique() if name.startswith(BY_BLOCK)), key=_depth)
    ends = dict.fromkeys([*blocks[:1], *blocks[-1:]])
    shown = {name: title for name, title in SHOWN.items() if lines["number"].eq(name).any()}
    shown |= {name: f"of block {_depth(name)}" for name in ends}
    rows = []
    for (treatment, trainer, lr), part in lines.groupby(["treatment", "trainer", "lr"], sort=False):
        of = part.set_index("number")
        row: list[tuple[str, object]] = [(str(treatment), treatment), (str(trainer), trainer)]
        row.append((number(lr, f"{lr:g}"), lr))
        row += [_cell(of.loc[name], name) if name in of.index else ("–", None) for name in shown]
        rows.append([*row, (number(part["seeds"].max()), part["seeds"].max())])
    columns = [
        ("treatment", "label"),
        ("trainer", "label"),
        ("learning rate", "n"),
        *((title, "n") for title in shown.values()),
        ("seeds", "n"),
    ]
    return table(columns, rows)


def _depth(name: str) -> int:
    return int(name.rpartition(".")[2])


def _cell(line: pd.Series, name: str) -> tuple[str, object]:
    mean, low, high = (float(line[column]) for column in ("difference", "low", "high"))
    if mean == 0 and math.isnan(low):  # by definition, say: the gradient's error under a BF16 trainer
        return number(0.0, "0"), 0.0
    says = _written(mean, name)
    if not math.isnan(low):
        says += f" ({_written(low, name)} to {_written(high, name)})"
    elif line["seeds"] > 1:
        says += " (seeds tie)"
    return (f"<b>{says}</b>" if line["q"] < 0.05 else says), mean


def _written(value: float, name: str) -> str:
    if name.startswith(OF_RATIOS):
        return number(value, typeset(f"× {math.exp(value):.2f}"))
    return number(value, typeset(f"{100 * value:+.2f}" if name == "accuracy" else f"{value:+.2g}"))


PANEL = Panel("treatments", "Treatments", "What treatments of rollouts do", effects, QUERIES, ABOUT)
