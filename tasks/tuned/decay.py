"""Weight decay and clipping, tried at the rates that were tuned."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from fp4dse.dse import ConfigError
from fp4dse.tasks.task import Task
from fp4dse.tasks.tuned import Point, Tuned
from fp4dse.tasks.tuned.trainer import Asked, Trainer, representatives

FACTOR = 2.0
"""Between neighbouring rates."""
WITH_DECAYS = ("bf16", "forward")
"""The classes of which decays and clips are tried."""
DECAYS, CLIP = (0.0, 0.1, 0.3), 1.0
BEYOND, MOST_TIMES = (1.0, 3.0), 8
"""Decays where the largest is the best, and how many times its rate a class is tried at, at most."""


def add_decay(trainer: Trainer, before: Tuned) -> Tuned:
    """The findings of rates, with weight decay and clipping tried on the same seeds. ConfigError if they are of another
    revision, length or device."""
    task = trainer.task
    check_same(before, task, {"device": trainer.device}, "tune its rates again")
    own = [point for point in before.curve if point.is_own]
    found = msgspec.structs.replace(before, curve=own)
    return msgspec.structs.replace(found, curve=sorted(own + decays_and_clips(trainer, found), key=in_order))


def has_decays(found: Tuned) -> bool:
    """True if decays and clips were tried of all classes of which they are."""
    tried = {point.of for point in found.curve if not point.is_own}
    return tried >= found.rates.keys() & set(WITH_DECAYS)


def check_same(before: Tuned, task: Task, more: Mapping[str, object], instead: str) -> None:
    """ConfigError if a preset's findings are of another revision or length, or differ in more. instead: another way."""
    for name, value in {"rev": task.rev, "steps": task.steps, **more}.items():
        if value != (then := getattr(before, name)):
            raise ConfigError(name, value, f"{then}, as the file of {task.name}:{task.preset} has it, or {instead}")


def decays_and_clips(trainer: Trainer, found: Tuned) -> list[Point]:
    """Other weight decays and clips at the best rate of a class and at twice that, on the seeds of the rates."""
    task, recipes = trainer.task, representatives()
    own = task.weight_decay
    more = [decay for decay in BEYOND if decay > own][:1] if own >= DECAYS[-1] else []  # none of DECAYS is beyond it
    decays = [None, *(decay for decay in (*DECAYS, *more) if decay != own)]
    clips = [None, *(clip for clip in (CLIP,) if clip != task.clip)]
    others = [pair for pair in itertools.product(decays, clips) if pair != (None, None)]
    asked = [
        Asked(of, recipes[of], found.rates[of] * times, decay, clip)
        for of in WITH_DECAYS
        if of in found.rates
        for times in (1, FACTOR)
        for decay, clip in others
    ]
    points: list[Point] = []
    while asked:
        points += trainer.points(asked, found.seeds)
        asked = [Asked(of, recipes[of], *setting) for of in found.rates for setting in further(points, found, of)]
    return points


def further(points: Sequence[Point], found: Tuned, of: str) -> list[tuple[float, float | None, float | None]]:
    """Rates, decays and clips to try next of a class: beyond the largest decay, or rate, where that is the best and
    better than the preset's own."""
    tried = [point for point in points if point.of == of]
    own = min(point.mean for point in found.curve if point.of == of and point.is_own)
    if not tried or (best := min(tried, key=lambda point: point.mean)).mean >= own:
        return []
    settings: list[tuple[float, float | None, float | None]] = []
    decay = best.weight_decay or 0.0
    if decay == max(point.weight_decay or 0.0 for point in tried) and decay < BEYOND[-1]:
        settings.append((best.lr, min(more for more in BEYOND if more > decay), best.clip))
    if best.lr == max(point.lr for point in tried) and best.lr < MOST_TIMES * found.rates[of]:
        settings.append((best.lr * FACTOR, best.weight_decay, best.clip))
    return settings


def in_order(point: Point) -> tuple[str, float, float, float]:
    """Where a point stands in a file."""
    return point.of, point.weight_decay or 0.0, point.clip or 0.0, point.lr
