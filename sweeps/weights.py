"""Checkpoints: the weights that a lane ends with. Rows hold none, so a lane is trained again, once, and kept.

A checkpoint lies in the cache folder under its lane's run_id, which stands for all that its bits depend on: task, data,
start, recipe, rate, seed, device, software and revisions. Whoever deletes it gets the same bytes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from fp4dse.dse import ConfigError, StoreError, recipe_from_dict
from fp4dse.dse.program.cache import cache_folder
from fp4dse.results import Store
from fp4dse.results.store.schema import KEY
from fp4dse.sweeps.arguments import find_stored
from fp4dse.sweeps.jobs.machine import find_machine
from fp4dse.sweeps.jobs.rows import lane_id, task_context
from fp4dse.tasks import Lane, Progress, check_task, environment, find_facts
from fp4dse.tasks.start import ENDING

if TYPE_CHECKING:
    import pandas as pd

_OF_LANE = ("config_id", "lr", "seed")
_FIX = dict.fromkeys(("task", "preset", "dataset_digest"), "--task, --data and --from as in the sweep")


def checkpoint(
    asked: Sequence[str], lane: Lane, device: str = "cpu", report: Callable[[Progress], None] = lambda _: None
) -> Path:
    """The checkpoint of a lane, in the cache; it is trained in this process if it is not there. asked: arguments of
    get_task. ConfigErrors as of get_task, and for a lane that diverges."""
    facts = find_facts(*asked)
    threads = find_machine(device).threads
    context = task_context(facts, environment(device, threads))
    run_id = lane_id(lane, context)
    path = cache_folder() / "weights" / f"{run_id}{ENDING}"
    if path.exists():
        return path
    check_task(facts, device)
    from fp4dse.tasks.catalogue import get_task
    from fp4dse.tasks.start.make_weights import make_weights
    from fp4dse.tasks.start.weights import digest_of, write_weights
    from fp4dse.tasks.threads import torch_threads

    with torch_threads(threads):
        weights, result = make_weights(get_task(*asked), lane, device, report)
    said = {name: context[name] for name in (*KEY, "start_digest", "steps") if name not in _OF_LANE}
    said |= {"run_id": run_id, "config_id": lane.recipe.config_id, "recipe": lane.recipe.label()}
    said |= {"lr": lane.lr, "seed": lane.seed, "val_loss": result.val_loss, "digest": digest_of(weights)}
    write_weights(path, weights, said)
    return path


def checkpoint_of_row(
    store: Store,
    recipe: str,
    seed: int,
    *,
    asked: Sequence[str] | None = None,
    lr: float | None = None,
    device: str = "cpu",
    report: Callable[[Progress], None] = lambda _: None,
) -> Path:
    """The checkpoint of a lane that a store has, trained again here.

    recipe      as arguments.find_stored takes it
    asked       arguments of get_task; None: the store has one task, on bundled data
    lr          None: the store has the recipe at one

    ConfigError if none or several are meant, or if the lane cannot be trained here as it was; StoreError if it was, and
    its held-out loss is another.
    """
    runs = store.runs([*KEY, "run_id", "status", "val_loss", "recipe_label", "recipe_name", "is_baseline"])
    rows = runs[runs["status"].eq("done")]
    rows = _narrowed(rows, "recipe", "config_id", find_stored(recipe, runs))
    rows = _narrowed(rows, "--seed", "seed", seed)
    rows = rows if lr is None else _narrowed(rows, "--lr", "lr", lr)
    for option, name in (("--task", "task"), ("--task", "preset")):
        if asked is None:
            _check_single(rows, option, name)
    of = asked or tuple(rows.iloc[0][["task", "preset"]])
    here = task_context(find_facts(*of), environment(device, find_machine(device).threads))
    for name in KEY:
        if name not in _OF_LANE:
            rows = _narrowed(rows, name, name, here[name], _FIX.get(name, "such a machine and version"))
    _check_single(rows, "--lr", "lr")
    row = rows.iloc[0]
    text = store.recipe_texts([row["config_id"]])[row["config_id"]]
    lane = Lane(recipe_from_dict(msgspec.json.decode(text)), float(row["lr"]), seed)
    path = checkpoint(of, lane, device, report)
    if (again := about(path)["val_loss"]) != row["val_loss"]:
        said = f"val_loss {row['val_loss']!r} of run {row['run_id']}, but {again!r} when it was trained again"
        raise StoreError(f"{store.path}: {said}")
    return path


def fitted(
    asked: Sequence[str],
    lane: Lane,
    method: str,
    samples: int,
    device: str = "cpu",
    report: Callable[[int, int], None] = lambda *_: None,
) -> Path:
    """Weights that a lane would start from, fitted to its forward quantizers, in the cache; they are fitted in this
    process if they are not there. Arguments as of fit_weights and `checkpoint`."""
    facts = find_facts(*asked)
    threads = find_machine(device).threads
    context = task_context(facts, environment(device, threads))
    check_task(facts, device)
    from fp4dse.tasks.catalogue import get_task
    from fp4dse.tasks.fitted.fit import REV, fit_weights
    from fp4dse.tasks.start.weights import digest_of, write_weights
    from fp4dse.tasks.threads import torch_threads

    run_id = lane_id(lane, context)
    path = cache_folder() / "weights" / f"{run_id}-{method}-{samples}-{REV}{ENDING}"
    if path.exists():
        return path
    with torch_threads(threads):
        found = fit_weights(get_task(*asked), lane, method, samples, device, report)
    said = {name: context[name] for name in (*KEY, "start_digest") if name not in _OF_LANE}
    said |= {"config_id": lane.recipe.config_id, "recipe": lane.recipe.label(), "seed": lane.seed, "lr": lane.lr}
    said |= {"method": method, "samples": samples, "digest": digest_of(found.weights), "recovered": found.recovered}
    said |= {f"loss_{name}": value for name, value in found.losses.items()}
    for at, name in enumerate(("nearest", "fitted")):
        said[f"error_{name}"] = {layer: of[at] for layer, of in found.errors.items()}
    write_weights(path, found.weights, said)
    return path


def as_folder(path: Path, target: Path, source: Path) -> None:
    """Write a checkpoint, of a model whose folder is `source`, as such a folder. ConfigError as of write_folder."""
    from fp4dse.tasks.language.folder_out import write_folder
    from fp4dse.tasks.start.weights import read_weights

    write_folder(target, source, read_weights(path), about(path))


def about(path: Path) -> dict[str, Any]:
    """Facts of a checkpoint: its lane, its loss, the digest of its weights."""
    from fp4dse.tasks.start.weights import read_about

    return read_about(path)


def _narrowed(
    rows: pd.DataFrame, where: str, name: str, value: object, fix: str = "one that ended well"
) -> pd.DataFrame:
    """The rows with this value. ConfigError names the values of the others if there are none."""
    found = rows[rows[name].eq(value)]
    if found.empty:
        raise ConfigError(where, value, f"that of a row, {_values(rows[name])} ({fix})")
    return found


def _check_single(rows: pd.DataFrame, option: str, name: str) -> None:
    if rows[name].nunique() > 1:
        raise ConfigError(option, None, f"one of {_values(rows[name])}")


def _values(column: pd.Series) -> str:
    return ", ".join(sorted(map(str, set(column)))[:12]) or "of which there are none"
