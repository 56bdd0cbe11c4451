"""All tasks and presets with what it takes to train one: for people who choose, and for the tab key."""

from __future__ import annotations

import math

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.tasks.remembered import recall, remembered

QUESTION = "all tasks"

SECONDS = {
    "regression:smoke": 0.3,
    "regression:quickstart": 0.3,
    "regression:small": 2.0,
    "regression:deep": 1.0,
    "regression:mlp": 20.0,
    "regression:gaussian-smoke": 0.1,
    "vision:smoke": 0.2,
    "vision:quickstart": 0.7,
    "vision:small": 6.0,
    "vision:teacher": 2.0,
    "vision:resnet-smoke": 0.6,
    "vision:resnet-small": 11.0,
    "vision:cnn-smoke": 0.2,
    "vision:cnn-small": 4.0,
    "diffusion:smoke": 2.0,
    "diffusion:small": 110.0,
    "diffusion:dit-smoke": 0.5,
    "diffusion:dit-small": 100.0,
    "diffusion:teacher": 5.0,
    "language:smoke": 0.8,
    "language:tiny": 17.0,
    "language:small": 120.0,
    "language:moe-smoke": 1.0,
    "language:moe-small": 170.0,
    "language:moe8-smoke": 1.5,
    "rl:smoke": 2.0,
    "rl:walks-smoke": 1.0,
    "rl:edits-smoke": 4.0,
    "rl:carries-smoke": 5.0,
    "rl:moe-smoke": 3.0,
    "finetune:smoke": 0.5,
}
"""Seconds of one NVFP4 lane among four on one core of a CPU: roughly, to choose by. What has none is for a GPU."""

_CEILING = "BF16 solves 94 % of the problems or more: little room is left above it"
NOTES = {
    "vision:small": "memorises: loss 0.004 in training, 0.11 held out; BF16 differs by 27 % from seed to seed",
    "rl:small": _CEILING,
    "rl:medium": _CEILING,
    "rl:edits-small": _CEILING,
    "rl:carries-small": _CEILING,
    "rl:dapo-small": _CEILING,
    "rl:walks-medium": "BF16 ends at 91 % of the problems, where 75 to 90 were wanted",
    "rl:clip-higher-small": "nobody has trained it yet: its learning rate is that of rl:small",
}
"""Remarks on presets whose results need care."""


class Listed(msgspec.Struct, frozen=True):
    """A preset. parameters: of one lane, None where they depend on the data; lr: BF16's learning rate, tuned or not;
    seconds: see SECONDS; data: `bundled`, or what --data must name."""

    task: str
    about: str
    parameters: int | None
    steps: int
    batch: int
    lr: float
    tuned: bool
    seconds: float | None
    data: str
    note: str


def list_tasks() -> list[Listed]:
    """Every preset of every task. Remembered, as it takes torch."""
    return remembered(QUESTION, _look, list[Listed])


def known_names() -> list[str]:
    """`task:preset` of all that were ever listed here; where none was, the tasks' own names."""
    known = recall(QUESTION, list[Listed])
    return [one.task for one in known] if known else ["regression", "vision", "diffusion", "language", "rl", "finetune"]


def _look() -> list[Listed]:
    from fp4dse.tasks.catalogue import TASKS, get_task  # imports torch

    lines = []
    for name, presets in TASKS.items():
        for preset, task in presets.items():
            size, data = task.size or None, "bundled"
            try:
                size = size or sum(math.prod(t.shape[1:]) for t in task.problem([0]).init.values())
            except ConfigError as error:  # the data are the user's
                data = f"--data {error.accepted.removeprefix('a ').partition(':')[0]}"
            if data == "bundled" and task.samples is not None and task.samples() < task.batch:
                data = f"--data PATH with {task.batch:,} samples or more"
            of, tuned = f"{name}:{preset}", get_task(name, preset)
            numbers = task.steps, task.batch, tuned.lr, bool(tuned.rates)
            lines.append(Listed(of, task.summary, size, *numbers, SECONDS.get(of), data, NOTES.get(of, "")))
    return lines
