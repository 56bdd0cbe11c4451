"""Tunes a preset and writes its file: `python -m fp4dse.tasks.tuned.tune language:1M --device cuda`.

Each class of recipes, by one recipe of it, is trained at rates a factor of two apart; the grid grows until no class has
its best rate at an edge, and the rates beside the best are tried last. Then weight decay and clipping are tried at the
best rate and at twice that, and beyond the largest where that is the best. The resolution of the preset comes from
other seeds: BF16, NVFP4 and MXFP4 at their rates. `--fresh 0` ends with the rates, and `--decay` adds weight decay and
clipping to a file that ended there. Where the preset has a file, classes that are not tuned again keep their curves in
it. `--jobs 8` trains populations in so many workers (worker.py) at a time, dealt out among the GPUs; what is finished
in the folder of `--work` is not trained again, so that the same command goes on from there. `--lacking` leaves out
presets whose file has all that is asked for.
It needs the packages of a worker alone, so that it runs on any machine that trains.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.reading.files import decode_json
from fp4dse.dse.tuning import CLASSES
from fp4dse.tasks.catalogue import get_task
from fp4dse.tasks.task import Task
from fp4dse.tasks.threads import torch_threads
from fp4dse.tasks.tuned import FOLDER, Point, Tuned, file_name
from fp4dse.tasks.tuned.decay import FACTOR, WITH_DECAYS, add_decay, check_same, decays_and_clips, has_decays, in_order
from fp4dse.tasks.tuned.trainer import Asked, Trainer, representatives

FIRST_SEED, FIRST_FRESH = 1000, 2000
"""Seeds that no sweep has by itself."""
FEWEST, MOST = 5, 24
"""Rates of a class, fewest and most; SGD's are a thousand times those of AdamW."""
USUAL = ("bf16", "forward", "backward", "stable-spam", "stable-spam-bf16")
CHECKED = ("bf16", "nvfp4", "mxfp4")


def tune(
    trainer: Trainer,
    data: str = "",
    classes: Sequence[str] = USUAL,
    seeds: int = 3,
    fresh: int = 5,
    before: Tuned | None = None,
) -> Tuned:
    """Tune a task, from its rate `task.lr` on. fresh: seeds of the check; 0: rates alone, without decay, clipping and
    check; before: what there is of the preset: its other classes stay, and so does its check unless BF16 or the forward
    class is tuned again."""
    task, device, chosen = trainer.task, trainer.device, list(range(FIRST_SEED, FIRST_SEED + seeds))
    before = kept(before, task, device, classes, chosen) if before else None
    recipes = representatives()
    middle = _rounded(task.lr)
    grids = {of: [middle + i - FEWEST // 2 for i in range(FEWEST)] for of in classes}
    curve: list[Point] = []
    while any(grids.values()):
        asked = [Asked(of, recipes[of], _rate(i)) for of, grid in grids.items() for i in grid]
        curve += trainer.points(asked, chosen)
        grids = {of: _beyond(curve, of) for of in classes}
    found = Tuned(task.name, task.preset, data, task.rev, task.steps, device, chosen, curve, [], [])
    if not fresh:
        found = msgspec.structs.replace(found, curve=sorted(curve, key=in_order))
        return merged(found, before) if before else found
    curve += decays_and_clips(trainer, found)
    if before and not {*WITH_DECAYS} & {*classes}:
        return merged(msgspec.structs.replace(found, curve=curve), before)
    later = list(range(FIRST_FRESH, FIRST_FRESH + fresh))
    known = merged(found, before).rates if before else found.rates  # a class that stays is checked at its own rate
    rates = {name: known.get("bf16" if name == "bf16" else "forward", task.lr) for name in CHECKED}
    check = trainer.points([Asked(name, Recipe.named(name), rates[name]) for name in CHECKED], later)
    found = msgspec.structs.replace(found, curve=sorted(curve, key=in_order), fresh_seeds=later, check=check)
    return merged(found, before) if before else found


def has_all(before: Tuned, task: Task, device: str, classes: Sequence[str], seeds: int, fresh: int) -> bool:
    """True if a tuning would find nothing that there is not: of this revision, length and device, the rates of all
    classes by as many seeds or more; and, unless `fresh` is 0, other decays or clips and a check by as many seeds."""
    same = (before.rev, before.steps, before.device) == (task.rev, task.steps, device)
    enough = len(before.seeds) >= seeds and len(before.fresh_seeds) >= fresh
    enough &= not fresh or has_decays(before)
    return same and enough and {*classes} <= before.rates.keys()


def kept(before: Tuned, task: Task, device: str, classes: Sequence[str], seeds: Sequence[int]) -> Tuned | None:
    """The findings that a tuning of some classes adds to; None if it replaces them all. ConfigError if others would
    stay that were tuned on another revision, device or other seeds: their curves would not be comparable."""
    others = sorted({point.of for point in before.curve} - {*classes})
    if not others:
        return None
    more = {"device": device, "seeds": [*seeds]}
    check_same(before, task, more, f"--classes with {', '.join(others)}, too")
    return before


def merged(found: Tuned, before: Tuned) -> Tuned:
    """The findings, with the curves of those before for classes that were not tuned again, and their check if there is
    no new one."""
    new = {point.of for point in found.curve}
    curve = sorted([*found.curve, *(point for point in before.curve if point.of not in new)], key=in_order)
    check = found if found.check else before
    return msgspec.structs.replace(found, curve=curve, fresh_seeds=check.fresh_seeds, check=check.check)


def _rounded(lr: float) -> int:
    """The number of the rate of the grid that is nearest."""
    return round(math.log2(lr))


def _rate(number: int) -> float:
    """2^number with two digits, so that it reads well."""
    return float(f"{FACTOR**number:.2g}")


def _beyond(curve: Sequence[Point], of: str) -> list[int]:
    """Rates to try next: those beyond an edge at which the class has its best one."""
    points = sorted((p for p in curve if p.of == of and p.is_own), key=lambda p: p.lr)
    numbers = [_rounded(point.lr) for point in points]
    best = min(range(len(points)), key=lambda i: points[i].mean)
    if len(points) >= MOST:
        return []
    if best == 0:
        return [numbers[0] - 1, numbers[0] - 2]
    return [numbers[-1] + 1, numbers[-1] + 2] if best == len(points) - 1 else []


def write(found: Tuned, folder: Path) -> Path:
    """Write the file of a preset, a line a point."""
    file = folder / file_name(found.task, found.preset, found.data)
    text = msgspec.json.encode(found).decode()
    for name in ("curve", "fresh_seeds", "check"):
        text = text.replace(f',"{name}"', f',\n"{name}"')
    file.write_text(text.replace('{"of"', '\n  {"of"') + "\n")
    return file


def main(arguments: list[str] | None = None) -> None:
    """Tune each preset that is named."""
    parser = argparse.ArgumentParser(prog="python -m fp4dse.tasks.tuned.tune", description=__doc__)
    parser.add_argument("presets", nargs="+", metavar="TASK:PRESET[@DATA]")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--classes", nargs="+", default=USUAL, choices=CLASSES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--fresh", type=int, default=5)
    parser.add_argument("--decay", action="store_true", help="only weight decay and clipping, at the file's rates")
    parser.add_argument("--most", type=int, default=64, help="lanes that train together")
    parser.add_argument("--jobs", type=int, default=1, help="workers at a time")
    parser.add_argument("--work", type=Path, help="folder of their jobs, from which the same command goes on")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--lacking", action="store_true", help="only presets whose file lacks what is asked for")
    asked = parser.parse_args(arguments)
    for text in asked.presets:
        name, _, data = text.partition("@")
        task, _, preset = name.partition(":")
        one = get_task(task, preset, data or None)
        named = data.partition("?")[0]
        file = asked.folder / file_name(one.name, one.preset, named)
        before = decode_json(file.read_bytes(), Tuned) if file.is_file() else None
        if asked.decay:
            full = before is not None and has_decays(before)
        else:
            full = before is not None and has_all(before, one, asked.device, asked.classes, asked.seeds, asked.fresh)
        if asked.lacking and full and before:
            print(file, "has all of it:", before.rates, flush=True)
            continue
        trainer = Trainer(one, asked.device, asked.most, asked.jobs, asked.work)
        if asked.decay:
            if before is None:
                raise ConfigError("preset", text, f"one whose rates are tuned: {file} is not there")
            found = add_decay(trainer, before)
        else:
            found = tune(trainer, named, asked.classes, asked.seeds, asked.fresh, before)
        print(write(found, asked.folder), found.rates, flush=True)


if __name__ == "__main__":
    with torch_threads(1):
        main()
