"""Layers that must stay in BF16: the gain of sparing each unit of a study, against its cost."""

from __future__ import annotations

from html import escape
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.report.figures import AXIS, LAYOUT, numbers, ratio_axis
from fp4dse.results.report.findings import Findings, as_texts
from fp4dse.results.report.markup import changed_with, number, typeset
from fp4dse.results.report.page import plot, table
from fp4dse.results.report.panel import Panel, for_each_setting
from fp4dse.results.stats.layers.sensitivity import measured_choice, sensitivity
from fp4dse.results.stats.layers.study import Spared, Study
from fp4dse.results.store.studies import read_studies
from fp4dse.results.text.sensitivity_table import NAMES, effect

CODE = """from fp4dse.results import open_store
from fp4dse.results.stats.layers.sensitivity import measured_choice, sensitivity
from fp4dse.results.store.studies import read_studies
store = open_store({path!r})
runs = store.runs()
for study in read_studies(store):
    print(sensitivity(runs, study).to_json(orient="records", double_precision=15))
    for choice in study.choices:
        print(choice.budget, choice.cost)
        print(measured_choice(runs, study, choice).to_json(orient="records", double_precision=15))
"""
ABOUT = """Each unit is a kind or role of layers in a part of the blocks. <b>Alone</b> is the loss of BF16 with it
quantized, against BF16; <b>sparing gains</b> what the recipe's gap falls by where this unit alone stays in BF16.
All are trained at one learning rate; intervals hold for all units at once. A choice is the set of units that gains
most within a budget, as far as the seeds of the study tell; it was trained on <b>fresh seeds</b>, on which the
prediction (the sum of its units' gains) is put to the test."""


def layers(found: Findings) -> str:
    """Units and choices of the studies of each setting (HTML); empty where there are none."""
    studies = read_studies(found.store)
    if not studies:
        return ""

    @for_each_setting
    def of_setting(one: Findings) -> str:
        runs = as_texts(one.runs)
        html = "".join(_study(runs, study) for study in studies)
        return html or "<p>Layers were not studied here.</p>"

    return of_setting(found)


def _study(runs: pd.DataFrame, study: Study) -> str:
    lines = sensitivity(runs, study)
    if lines.empty:
        return ""
    figure = plot(_figure(lines), "Up is what sparing a unit gains, right what it costs.")
    rows = [_unit(line, lines["step"].notna().any()) for line in lines.to_dict("records")]
    columns = [("unit", "label"), ("alone", "n"), ("sparing gains", "n"), ("of the multiply-adds", "n")]
    columns += [(f"of the step ({study.step_of})", "n")] if lines["step"].notna().any() else []
    html = f"<h3>{escape(study.label)}</h3>{figure}{table(columns, rows)}"
    return html + "".join(_choice(runs, study, choice) for choice in study.choices)


def _unit(line: dict[Any, Any], with_step: bool) -> list[tuple[str, object]]:
    cells: list[tuple[str, object]] = [(f"<b>{escape(line['unit'])}</b>", line["unit"])]
    cells += [_effect(line, "alone"), _effect(line, "gain"), _share(line["products"])]
    return [*cells, _share(line["step"])] if with_step else cells


def _choice(runs: pd.DataFrame, study: Study, choice: Spared) -> str:
    lines = measured_choice(runs, study, choice)
    if lines.empty:
        return ""
    units = escape("; ".join(study.units[i].label for i in choice.units))
    of = "the modelled step" if choice.spend == "step" else "the multiply-adds"
    budget, cost = (_share(value)[0] for value in (choice.budget, choice.cost))
    html = f"<p>For at most {budget} of {of}: <b>{units}</b> ({cost}). First and last blocks of that cost: "
    html += f"{escape(choice.ends_layers) or 'none is as cheap'}.</p>"
    columns = [("on fresh seeds", "label"), ("spared", "n"), ("against BF16", "n"), ("gain", "n"), ("predicted", "n")]
    rows = [
        [
            (NAMES[line["recipe"]], line["recipe"]),
            _share(line["products"]),
            *(_effect(line, name) for name in ("gap", "gain", "predicted", "missed")),
        ]
        for line in lines.to_dict("records")
    ]
    return html + table([*columns, ("measured less predicted", "n")], rows)


def _effect(line: dict[Any, Any], name: str) -> tuple[str, object]:
    value = float(line[name])
    if not np.isfinite(value):
        return effect(line, name), None
    return changed_with(value, line[f"{name}_low"], line[f"{name}_high"]), value


def _share(value: float) -> tuple[str, object]:
    if value is None or not np.isfinite(value):
        return "–", None
    return number(value, typeset(f"{100 * value:.1f} %")), value


def _figure(lines: pd.DataFrame) -> dict[str, Any]:
    """Gain against cost, a mark a unit."""
    cost = "step" if lines["step"].notna().all() else "products"
    says = {"step": "longer modelled step, %", "products": "multiply-adds spared, %"}[cost]
    error = {
        "type": "data",
        "symmetric": False,
        "array": numbers(lines["gain_high"] - lines["gain"]),
        "arrayminus": numbers(lines["gain"] - lines["gain_low"]),
        "color": "var(--muted)",
    }
    marks = {
        "type": "scatter",
        "mode": "markers+text",
        "x": numbers(100 * lines[cost]),
        "y": numbers(lines["gain"]),
        "text": [escape(unit) for unit in lines["unit"]],
        "textposition": "top center",
        "error_y": error,
        "marker": {"size": 9, "color": "var(--c0)"},
        "showlegend": False,
    }
    on_axis = lines[["gain", "gain_low", "gain_high"]].to_numpy(float)
    layout = {**LAYOUT, "height": 420, "xaxis": {**AXIS, "title": {"text": says}, "rangemode": "tozero"}}
    return {"data": [marks], "layout": {**layout, "yaxis": ratio_axis(on_axis, "sparing gains")}}


PANEL = Panel("layers", "Layers", "Which layers must stay in BF16", layers, (), ABOUT, CODE)
