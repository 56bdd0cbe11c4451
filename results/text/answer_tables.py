"""Answers to questions as tables for people: what each effect is on each task, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pandas as pd

from fp4dse.results.stats.techniques.questions import Questions
from fp4dse.results.text.ratios import change_with_range, noun, written_in

EVALUATED = {"quantized": "", "bf16": " in BF16"}
"""Evaluation -> what stands behind the loss, or the accuracy, that changes."""
TOGETHER, ALONE = ("low", "high", "tells"), ("own_low", "own_high", "repeats")
"""Columns of `effects_of` by which the task that screens is read, and a later one."""


def effect_tables(
    effects: pd.DataFrame, questions: Questions, units: Mapping[tuple[str, str], str] = MappingProxyType({})
) -> dict[str, list[dict[str, Any]]]:
    """Title -> rows, a question each, of lines of `effects_of`. units: as levels.units.

    A task is shown as the rule reads it, and `interval` says by which one: for all effects of the question at once, or
    on a later task for each effect alone.
    """
    tables = {}
    for question in questions.questions:
        rows = []
        mine = effects[effects["question"].eq(question.id)]
        for (task, preset, device, effect), lines in mine.groupby(
            ["task", "preset", "device_class", "effect"], sort=False, observed=True
        ):
            unit = units.get((task, preset))
            row = {"task": f"{task}:{preset}", "device": device, "effect": effect, "pairs": int(lines["pairs"].iloc[0])}
            low, high, told = ALONE if row["task"] in questions.later else TOGETHER
            row["interval"] = "for it alone" if row["task"] in questions.later else f"for all of {question.id}"
            for line in lines.to_dict("records"):
                with written_in(unit):
                    heading = f"{noun()}{EVALUATED[line['evaluation']]}"
                    row[heading] = change_with_range(line["difference"], line[low], line[high])
                row[f"{heading}: it"] = line[told]
            rows.append(row)
        if len({row["device"] for row in rows}) < 2:
            rows = [{name: value for name, value in row.items() if name != "device"} for row in rows]
        tables[f"{question.id}  {question.asks} Claimed: it {question.claim}."] = rows
    return tables


def answer_rows(answers: pd.DataFrame) -> list[dict[str, str]]:
    """A row for each effect, of the lines of `answers`; what both evaluations answer alike stands once."""
    rows = []
    for (question, effect), lines in answers.groupby(["question", "effect"], sort=False):
        found = {line["evaluation"]: (line["answer"], line["why"]) for line in lines.to_dict("records")}
        own, other = found["quantized"], found["bf16"]
        apart = "" if own == other else f"; evaluated in BF16 {other[0]}: {other[1]}"
        rows.append({"question": question, "effect": effect, "answer": own[0], "why": own[1] + apart})
    return rows
