"""A study of layers as tables for people: the units by what sparing them gains, and what a budget bought."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from fp4dse.results.stats.layers.sensitivity import fisher_agreement, measured_choice, sensitivity
from fp4dse.results.stats.layers.study import Spared, Study
from fp4dse.results.text.frames import records
from fp4dse.results.text.ratios import UNKNOWN, change, change_with_range, correlation, counted, fine_change

NAMES = {"base": "the recipe itself", "chosen": "the choice", "ends": "first and last blocks"}
"""`recipe` of measured_choice in words."""


def unit_rows(lines: pd.DataFrame) -> list[dict[str, Any]]:
    """Lines of `sensitivity` as cells."""
    return [
        {
            "unit": line["unit"],
            "alone": effect(line, "alone"),
            "sparing gains": effect(line, "gain"),
            "of multiply-adds": share(line["products"]),
            "gain per 1 %": per_percent(line["gain_per_percent"]),
            **({"of the step": share(line["step"], signed=True)} if lines["step"].notna().any() else {}),
            **({"fisher": f"{line['fisher']:.3g}"} if lines["fisher"].notna().any() else {}),
        }
        for line in lines.to_dict("records")
    ]


def choice_rows(lines: pd.DataFrame) -> list[dict[str, Any]]:
    """Lines of `measured_choice` as cells."""
    return [
        {
            "recipe": NAMES[line["recipe"]],
            "spared": share(line["products"]),
            "vs BF16": effect(line, "gap"),
            "gain": effect(line, "gain", UNKNOWN),
            "predicted": effect(line, "predicted", ""),
            "measured less predicted": effect(line, "missed", ""),
        }
        for line in lines.to_dict("records")
    ]


def effect(line: dict[Any, Any], name: str, unknown: str = UNKNOWN) -> str:
    """A log ratio of a line with its interval, as people read it."""
    value = float(line[name])
    if math.isnan(value):
        return "diverged" if line.get(f"{name}_verdict") == "diverged" else unknown
    return "diverged" if math.isinf(value) else change_with_range(value, line[f"{name}_low"], line[f"{name}_high"])


def per_percent(gain: float) -> str:
    """The gain that a hundredth of the multiply-adds buys, with a digit more than `change` has."""
    return fine_change(gain)


def share(value: float, signed: bool = False) -> str:
    """A share in percent."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return f"{100 * value:{'+' if signed else ''}.1f} %"


def budget_sentence(study: Study, choice: Spared) -> str:
    """A budget and the units that it was spent on."""
    of = "the modelled step" if choice.spend == "step" else "the multiply-adds"
    names = "; ".join(study.units[i].label for i in choice.units)
    says = f"budget {share(choice.budget)} of {of}: spares {names} ({share(choice.cost)})"
    if choice.ends is None:
        return f"{says}; no layer of the first and last blocks is as cheap"
    return f"{says}; first and last blocks: {choice.ends_layers} ({share(choice.ends_products)} of the multiply-adds)"


def about(study: Study, lines: pd.DataFrame) -> str:
    """Recipe, task, rate and seeds of the table of units; the sums of the effects; what the step is of; agreement with
    the scores."""
    seeds = counted(len(study.seeds), "seed")
    says = (
        f"{study.label} on {study.task}:{study.preset}, lr {study.lr:g}, {seeds}; intervals hold for all units at once"
    )
    known = lines.dropna(subset=["alone", "gain"])
    if len(known) == len(lines) and len({unit.scope for unit in study.units}) == 1 and len(lines):
        alone, gain = (change(float(known[name].sum())) for name in ("alone", "gain"))
        says += f"\nsum over all units: alone {alone}, sparing gains {gain}"
    if lines["step"].notna().any():
        says += f"\nof the step: as modelled for {study.step_of}"
    if lines["fisher"].notna().any():
        alone, gain = (correlation(*of) for of in fisher_agreement(lines).values())
        says += f"\nFisher score of BF16: Spearman {alone} with alone, {gain} with the gain"
    return says


def study_facts(runs: pd.DataFrame, study: Study) -> dict[str, Any]:
    """A study for scripts."""
    choices = [
        {"units": [study.units[i].label for i in choice.units], "budget": choice.budget, "spend": choice.spend,
         "cost": choice.cost, "config_id": choice.config_id, "ends": choice.ends_layers,
         "measured": records(measured_choice(runs, study, choice))}
        for choice in study.choices
    ]  # fmt: skip
    facts = {"recipe": study.label, "task": f"{study.task}:{study.preset}", "lr": study.lr, "seeds": list(study.seeds)}
    facts["step_of"] = study.step_of
    return {**facts, "units": records(sensitivity(runs, study)), "choices": choices}
