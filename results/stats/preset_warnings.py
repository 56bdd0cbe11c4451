"""Warnings of presets: that one is known not to resolve single recipes, or orders them otherwise than larger models do.

Verdicts and answers to questions ask here, so that they say the same of a preset.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from fp4dse.dse import agreement, resolution
from fp4dse.results.stats.paired import SETTING


def preset_warnings(setting: tuple[Any, ...]) -> tuple[str, ...]:
    """A sentence (no full stop) where the preset is known not to resolve single recipes, and one where larger models
    are known to have another order of them, or nobody knows theirs. setting: values of SETTING."""
    of = dict(zip(SETTING, setting, strict=True))
    preset = of["task"], of["preset"], of["dataset_digest"]
    says = resolution.warning(*preset, of["rev_task"]), agreement.warning(*preset)
    return tuple(filter(None, says))


def warnings_of_tasks(lines: pd.DataFrame) -> list[dict[str, str]]:
    """task (TASK:PRESET) and warning, each once, of the settings of a frame, in its order. lines: with SETTING."""
    settings = lines[list(SETTING)].drop_duplicates().itertuples(index=False, name=None)
    told = [(f"{setting[0]}:{setting[1]}", says) for setting in settings for says in preset_warnings(setting)]
    return [{"task": task, "warning": says} for task, says in dict.fromkeys(told)]
