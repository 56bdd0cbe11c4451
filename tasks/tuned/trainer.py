"""Training of a tuning: points, each a recipe of a class at a rate, on some seeds, in this process or in workers."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from fp4dse.dse import Recipe
from fp4dse.dse.optimizer import SGD
from fp4dse.dse.training import Training
from fp4dse.tasks.engine import train
from fp4dse.tasks.job import Job, JobResult, Lane
from fp4dse.tasks.task import Task
from fp4dse.tasks.tuned import Point
from fp4dse.tasks.tuned.workers import train_in_workers


def representatives() -> dict[str, Recipe]:
    """Class -> the recipe that it is tuned with."""
    bf16, nvfp4 = Recipe.named("bf16"), Recipe.named("nvfp4")
    spam, sgd = Recipe.named("nvfp4-stable-spam").training, Training(optimizer=SGD())
    muon = Recipe.named("nvfp4-muon").training
    return {
        "bf16": bf16,
        "forward": nvfp4,
        "backward": msgspec.structs.replace(nvfp4, fprop=bf16.fprop),
        "stable-spam": msgspec.structs.replace(nvfp4, training=spam),
        "stable-spam-bf16": msgspec.structs.replace(bf16, training=spam),
        "sgd": msgspec.structs.replace(nvfp4, training=sgd),
        "sgd-bf16": msgspec.structs.replace(bf16, training=sgd),
        "muon": msgspec.structs.replace(nvfp4, training=muon),
        "muon-bf16": msgspec.structs.replace(bf16, training=muon),
    }


class Asked(NamedTuple):
    """A point to be trained; weight_decay, clip: as in Point."""

    of: str
    recipe: Recipe
    lr: float
    weight_decay: float | None = None
    clip: float | None = None

    def lane(self, seed: int) -> Lane:
        """The point as a lane of a seed."""
        numbers = {"weight_decay": self.weight_decay, "clip": self.clip}
        given = {name: value for name, value in numbers.items() if value is not None}
        training = msgspec.structs.replace(self.recipe.training, **given)
        return Lane(msgspec.structs.replace(self.recipe, training=training), self.lr, seed)


class Trainer:
    """Trains points of one preset, at most so many lanes at a time, and says how far it is on standard error. jobs:
    workers at a time; work: the folder of their jobs, None for one that is deleted; with one job and no folder this
    process trains itself."""

    def __init__(self, task: Task, device: str, most: int, jobs: int = 1, work: Path | None = None) -> None:
        self.task, self.device, self.most, self.begin = task, device, most, time.monotonic()
        self.jobs, self.work = jobs, work

    def points(self, asked: Sequence[Asked], seeds: Sequence[int]) -> list[Point]:
        """The points, each on the seeds."""
        populations: dict[object, list[tuple[int, Lane]]] = {}
        for number, one in enumerate(asked):
            members = populations.setdefault(one.recipe.signature(), [])
            members.extend((number, one.lane(seed)) for seed in seeds)
        parts = [
            members[start : start + self.most]
            for members in populations.values()
            for start in range(0, len(members), self.most)
        ]
        losses: list[list[float | None]] = [[] for _ in asked]
        results = self._results([[lane for _, lane in part] for part in parts])
        for part, result in zip(parts, results, strict=True):
            for (number, _), lane in zip(part, result.lanes, strict=True):
                losses[number].append(lane.val_loss)
            said = f"{time.monotonic() - self.begin:7.0f} s: {len(part)} lanes in {result.train_s:.0f} s"
            print(said, file=sys.stderr)
        return [Point(a.of, a.lr, loss, a.weight_decay, a.clip) for a, loss in zip(asked, losses, strict=True)]

    def _results(self, populations: Sequence[Sequence[Lane]]) -> Iterator[JobResult]:
        """The result of each population."""
        if self.jobs == 1 and self.work is None:
            yield from (train(self.task, lanes, self.device) for lanes in populations)
            return
        task = self.task
        with tempfile.TemporaryDirectory() as own:
            jobs = [
                Job(task.name, task.preset, list(lanes), self.device, origin=task.origin, digest=task.digest)
                for lanes in populations
            ]
            yield from train_in_workers(jobs, self.work or Path(own), self.jobs)
