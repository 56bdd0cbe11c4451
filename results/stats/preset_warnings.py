"""Warnings of presets: that one is known not to resolve single recipes, or orders them otherwise than larger models do.

Verdicts and answers to questions ask here, so that they say the same of a preset; a verdict says what to ask before its
recipe is used, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pandas as pd

from fp4dse.dse import agreement, resolution
from fp4dse.results.stats.paired import SETTING


def preset_warnings(setting: tuple[Any, ...]) -> tuple[str, ...]:
    """A sentence (no full stop) where the preset is known not to resolve single recipes, and one where larger models
    are known to have another order of them, or nobody knows theirs. setting: values of SETTING."""
    return _says(setting, agreement.warning)


def _says(setting: tuple[Any, ...], of_order: Callable[[str, str, str], str | None]) -> tuple[str, ...]:
    of = dict(zip(SETTING, setting, strict=True))
    preset = of["task"], of["preset"], of["dataset_digest"]
    return tuple(filter(None, (resolution.warning(*preset, of["rev_task"]), of_order(*preset))))


def warnings_of_answers(lines: pd.DataFrame, tasks: Collection[str]) -> list[dict[str, str]]:
    """task (TASK:PRESET) and warning, each once, of the tasks that questions are answered by, in the order of a frame.
    What to ask instead is not said: which tasks decide is what the questions say. lines: with SETTING; tasks: these
    tasks (TASK:PRESET)."""
    told: dict[tuple[str, str], None] = {}
    for setting in lines[list(SETTING)].drop_duplicates().itertuples(index=False, name=None):
        if (task := f"{setting[0]}:{setting[1]}") in tasks:
            told |= {(task, says): None for says in _says(setting, agreement.other_order)}
    return [{"task": task, "warning": says} for task, says in told]
