"""Measured times of this project's layers on a device, relative to BF16's: the column `measured` of runs.

Such a figure belongs to a recipe and a device, not to a lane, so it is not in the rows but beside them, in
measured.json, and is joined to the rows when they are read. It is taken when somebody asks for it, after a sweep and on
a quiet device: the lanes of a population share their launches, so that what a population took says nothing about one of
its recipes.

    {"mlp on Some CPU, 1 thread, torch 2.13": {"device_name": "Some CPU", "overheads": {config_id: 2.31, …}}, …}

A *series* is what was timed with one model on one device; the newest stands last. A run has the figure of the newest
series of its own device, or null: figures of two models never stand beside each other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from fp4dse.dse import ConfigError, Recipe, StoreError, recipe_from_dict
from fp4dse.results.store.remote import AnyPath
from fp4dse.results.text.ratios import counted

if TYPE_CHECKING:
    from fp4dse.results.store.store import Store

JOINED = ["config_id", "device_name"]
"""The columns of runs that MEASURED is joined by."""

Series = dict[str, Any]
"""measured.json as plain data."""


def series(model: str, environment: Mapping[str, Any]) -> str:
    """The name of the series of this model in this environment (row columns)."""
    threads = f", {counted(environment['threads'], 'thread')}" if environment["device"] == "cpu" else ""
    return f"{model} on {environment['device_name']}{threads}, {environment['software_class']}"


def checked_series(data: Series, file: AnyPath) -> Series:
    """The content of measured.json. StoreError names what is wrong with it."""
    for of, one in data.items():
        if not isinstance(one, dict) or not isinstance(one.get("device_name"), str):
            raise _malformed(file, f"{of}: device_name", one, "a series with the name of a device")
        overheads = one.get("overheads")
        if not isinstance(overheads, dict):
            raise _malformed(file, f"{of}: overheads", overheads, "config_ids with their figures")
        for config_id, figure in overheads.items():
            is_number = isinstance(figure, int | float) and not isinstance(figure, bool)
            if not is_number or not 0 < figure < math.inf:
                raise _malformed(file, f"{of}: {config_id}", figure, "a time relative to BF16's, above 0")
    return data


def _malformed(file: AnyPath, where: str, found: object, accepted: str) -> StoreError:
    fix = "mend it, or delete the file and run `fp4dse store measure` again"
    return StoreError(f"{file}: {where}: found {str(found)[:60]!r}; accepted: {accepted}; {fix}")


def with_figure(known: Series, of: str, device_name: str, config_id: str, overhead: float) -> Series:
    """The series with one figure more; the one that it belongs to is the newest now."""
    had = known.get(of, {"overheads": {}})["overheads"]
    others = {name: one for name, one in known.items() if name != of}
    return {**others, of: {"device_name": device_name, "overheads": {**had, config_id: overhead}}}


def merged(ours: Series, theirs: Series) -> Series:
    """The series of both. Our figures win, and our series are the newer ones."""
    lacking = {name: one for name, one in theirs.items() if name not in ours}
    both = {}
    for name, one in ours.items():
        more = theirs[name]["overheads"] if name in theirs else {}
        both[name] = {**one, "overheads": {**more, **one["overheads"]}}
    return {**lacking, **both}


def figures(known: Series) -> pd.DataFrame:
    """JOINED and MEASURED: the newest series of each device, a line a recipe."""
    newest = {one["device_name"]: (of, one["overheads"]) for of, one in known.items()}
    lines = [
        (config_id, device, overhead, of)
        for device, (of, overheads) in newest.items()
        for config_id, overhead in overheads.items()
    ]
    types = {"config_id": str, "device_name": str, "measured": float, "measured_of": str}
    return pd.DataFrame(lines, columns=list(types)).astype(types)


def measure(store: Store, of: str, device_name: str, timed: Callable[[Recipe], float]) -> Iterator[dict[str, Any]]:
    """Time every recipe that has rows of this device and no figure in the series `of`: config_id, label, measured.

    Each figure is stored as soon as it is there; NaN, a time that is not steady, is not. Nobody else writes to the
    store meanwhile, so that no sweep of it disturbs the times; StoreError if somebody does. ConfigError if no row is of
    this device.
    """
    with store.lock():
        runs = store.runs(["config_id", "recipe", "recipe_label", "is_baseline", "device_name"])
        here = runs[runs["device_name"].eq(device_name)].drop_duplicates("config_id")
        if here.empty:
            found = ", ".join(sorted(set(runs["device_name"].dropna()))) or "none: it is empty"
            raise ConfigError("--device", device_name, f"a device that rows of this store are of ({found})")
        known = store.measured().get(of, {"overheads": {}})["overheads"]
        for line in here[~here["config_id"].isin(known)].to_dict("records"):
            recipe = recipe_from_dict(json.loads(line["recipe"]))
            overhead = 1.0 if line["is_baseline"] else timed(recipe)
            if math.isfinite(overhead):
                store.add_measured(of, device_name, line["config_id"], overhead)
            yield {"config_id": line["config_id"], "label": line["recipe_label"], "measured": overhead}
