"""How long it takes to prepare a sweep and to show it: enumeration, planning against a large store, the mirror.

Sizes and targets are those that a weekend on a GPU needs: 10⁵ combinations, 10⁶ stored rows, 5,000 trials.
"""

from __future__ import annotations

import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from fp4dse.dse import SLOTS, Recipe, Space
from fp4dse.results import open_store
from fp4dse.results.store.compaction import write_part
from fp4dse.results.store.schema import ROW, SCHEMA_VERSION, recipe_columns
from fp4dse.sweeps.pictures import Line
from fp4dse.sweeps.rows import lane_id
from fp4dse.sweeps.setting import find_setting
from fp4dse.sweeps.storages import open_storage
from fp4dse.sweeps.study import mirror_lines
from fp4dse.tasks.job import Lane

COMBINATIONS, STORED, LANES, TRIALS = 100_000, 1_000_000, 100_000, 5_000


class Row(msgspec.Struct, frozen=True):
    """One line of the benchmark."""

    what: str
    seconds: float
    target: float


def bench_plan(combinations: int = COMBINATIONS, stored: int = STORED, trials: int = TRIALS) -> list[Row]:
    """The three measurements, each once, at the given sizes."""
    return [time_enumeration(combinations), time_planning(stored), time_mirror(trials)]


def large_space() -> Space:
    """331,776 combinations, all different."""
    rounding = {f"{slot}.rounding": ["nearest", "stochastic"] for slot in SLOTS}
    rotation = {f"{stage}.rotation": ["none", "rht16", "rht32"] for stage in ("fprop", "dgrad", "wgrad")}
    formats = {"*.scale": ["e4m3", "ue5m3", "e5m2", "ue4m4", "bf16", "fp32"], "*.block": [16, 32, 64, 128]}
    rest = {"*.tensor_scale": ["none", "amax"], "*.g.range": ["full", "16/17"], "estimator.w.element": ["ste", "dge"]}
    return Space("large", axes={**formats, **rounding, **rotation, **rest})


def time_enumeration(combinations: int = COMBINATIONS) -> Row:
    """Enumerate, canonicalise and hash; every combination is a recipe of its own."""
    begin = time.perf_counter()
    ids = set()
    for recipe, _ in zip(large_space().recipes(), range(combinations), strict=False):
        ids.add(recipe.config_id)
    seconds = time.perf_counter() - begin
    assert len(ids) == combinations
    return Row(f"enumerate, canonicalise, hash {combinations:,} combinations", seconds, 3.0)


def time_planning(stored: int = STORED, lanes: int = LANES) -> Row:
    """Plan a sweep of `lanes` lanes, of which half are in a store with `stored` rows."""
    setting = find_setting([("regression", "small")])
    seeds = range(5)
    recipes = [recipe for recipe, _ in zip(large_space().recipes(), range(lanes // len(seeds)), strict=False)]
    task, context = setting.tasks[0], setting.contexts["regression", "small"]
    there = [
        lane_id(Lane(recipe=recipe.canonical(), lr=task.lr, seed=seed), context)
        for recipe in recipes[::2]
        for seed in seeds
    ]
    with tempfile.TemporaryDirectory() as folder:
        fill_store(Path(folder) / "store", [*there, *(f"{i:016x}" for i in range(stored - len(there)))])
        begin = time.perf_counter()
        plan = setting.plan(recipes, seeds, None, open_store(Path(folder) / "store").done())
        seconds = time.perf_counter() - begin
    assert plan.stored == len(there)
    return Row(f"plan {lanes:,} lanes against {stored:,} rows", seconds, 5.0)


def fill_store(path: Path, run_ids: list[str], rows_per_part: int = 100_000) -> None:
    """A store with a finished row for every id; what the ids do not need is one and the same."""
    store = open_store(path, create=True)
    (store.path / "parts").mkdir(exist_ok=True)
    common = {
        **find_setting([("regression", "small")]).contexts["regression", "small"],
        **recipe_columns(Recipe.named("nvfp4")),
        "schema_version": SCHEMA_VERSION,
        "lr": 1e-3,
        "seed": 0,
        "status": "done",
        "val_loss": 1.0,
        "created_at": datetime.now(UTC),
    }
    for start in range(0, len(run_ids), rows_per_part):
        ids = pa.array(run_ids[start : start + rows_per_part])
        columns = [
            ids if field.name == "run_id" else pa.repeat(pa.scalar(common.get(field.name), field.type), len(ids))
            for field in ROW
        ]
        write_part(store.path, pa.Table.from_arrays(columns, schema=ROW))


def time_mirror(trials: int = TRIALS) -> Row:
    """Mirror so many recipes to the study that the dashboard shows."""
    names = [f"level {i}" for i in range(4)]
    draws = np.random.default_rng(0)
    lines = [
        Line(
            key=f"{i:016x}",
            params={f"axis {axis}": names[draws.integers(4)] for axis in range(8)},
            values=(float(draws.normal()), float(draws.integers(1, 9))),
            facts={"label": f"recipe {i}", "seeds": 3},
        )
        for i in range(trials)
    ]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        mirror_lines(open_storage(f"{folder}/study.journal"), "bench", lines)
        seconds = time.perf_counter() - begin
    return Row(f"mirror {trials:,} trials to the dashboard's study", seconds, 10.0)
