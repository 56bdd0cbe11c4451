"""Tuned learning rates, as data: a file a preset, written by `python -m fp4dse.tasks.tuned.tune`.

A recipe takes the rate of its class (`dse.tuning`): the one of the lowest mean loss in the file's curve. Presets
without a file have the rate that somebody thought right; `fp4dse tasks` says which these are.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import msgspec

from fp4dse.dse.reading.files import decode_json

FOLDER = Path(__file__).parent


class Point(msgspec.Struct, frozen=True, omit_defaults=True):
    """One setting of a tuning: the held-out losses of the seeds, None where one diverged.

    of: a class of recipes (`dse.tuning.CLASSES`), or a named recipe; weight_decay, clip: None for the preset's own
    """

    of: str
    lr: float
    losses: list[float | None]
    weight_decay: float | None = None
    clip: float | None = None

    @property
    def is_own(self) -> bool:
        """True for the preset's own weight decay and clip."""
        return self.weight_decay is None and self.clip is None

    @property
    def mean(self) -> float:
        """Of the logarithms of the losses; infinite if a seed diverged."""
        return sum(math.inf if loss is None else math.log(loss) for loss in self.losses) / len(self.losses)


class Tuned(msgspec.Struct, frozen=True):
    """The findings of the tuning of a preset.

    data: of --data, empty for the preset's own; rev: of the task; seeds: of `curve`, from which rates are chosen;
    fresh_seeds: of `check`, at the chosen rates, from which the preset's resolution follows.
    """

    task: str
    preset: str
    data: str
    rev: int
    steps: int
    device: str
    seeds: list[int]
    curve: list[Point]
    fresh_seeds: list[int]
    check: list[Point]

    def best(self, of: str) -> Point | None:
        """The point of the lowest mean loss among those with the preset's own weight decay and clip; None without any
        that finished."""
        points = [point for point in self.curve if point.of == of and point.is_own]
        found = min(points, key=lambda p: p.mean, default=None)
        return found if found and math.isfinite(found.mean) else None

    @property
    def rates(self) -> dict[str, float]:
        """Class of recipes -> learning rate."""
        found = {of: self.best(of) for of in dict.fromkeys(point.of for point in self.curve)}
        return {of: point.lr for of, point in found.items() if point}


def file_name(task: str, preset: str, data: str = "") -> str:
    """Name of the file of a preset on its own data, or on named ones."""
    return "-".join(filter(None, (task, preset, data))) + ".json"


@cache
def tuned(task: str, preset: str, data: str = "") -> Tuned | None:
    """The tuned numbers of a preset on its own data or on others, None if it was never tuned on them."""
    if "/" in data or "?" in data:  # a path, or options: nobody tuned on these
        return None
    file = FOLDER / file_name(task, preset, data)
    return decode_json(file.read_bytes(), Tuned) if file.is_file() else None


def all_tuned() -> list[Tuned]:
    """Every file, by name."""
    return [decode_json(file.read_bytes(), Tuned) for file in sorted(FOLDER.glob("*.json"))]
