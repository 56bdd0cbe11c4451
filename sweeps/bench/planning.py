"""Times what prepares a sweep and shows it: enumeration, planning against a large store, the mirror.

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
from fp4dse.sweeps.dashboard.mirror import mirror_trials
from fp4dse.sweeps.dashboard.storages import open_storage
from fp4dse.sweeps.dashboard.trials import TrialData
from fp4dse.sweeps.jobs.rows import lane_id
from fp4dse.sweeps.planning.setting import find_setting
from fp4dse.tasks.facts import rate_of
from fp4dse.tasks.job import Lane

COMBINATIONS, STORED, LANES, TRIALS = 100_000, 1_000_000, 100_000, 5_000
ROWS_PER_PART = 100_000


class Row(msgspec.Struct, frozen=True):
    """One line of the benchmark."""

    what: str
    measured: str
    target: str
    met: bool


def bench_plan() -> list[Row]:
    """The three measurements, each once."""
    return [time_enumeration(), time_planning(), time_mirror()]


def _timed(what: str, begin: float, target: float) -> Row:
    """The row of what was begun at `begin` and is to take `target` seconds at most."""
    seconds = time.perf_counter() - begin
    return Row(what, f"{seconds:.2f} s", f"≤ {target:g} s", seconds <= target)


def large_space() -> Space:
    """331,776 combinations, all different."""
    rounding = {f"{slot}.rounding": ["nearest", "stochastic"] for slot in SLOTS}
    rotation = {f"{stage}.rotation": ["none", "rht16", "rht32"] for stage in ("fprop", "dgrad", "wgrad")}
    formats = {"*.scale": ["e4m3", "ue5m3", "e5m2", "ue4m4", "bf16", "fp32"], "*.block": [16, 32, 64, 128]}
    rest = {"*.tensor_scale": ["none", "amax"], "*.g.range": ["full", "16/17"], "estimator.w.element": ["ste", "dge"]}
    return Space("large", axes={**formats, **rounding, **rotation, **rest})


def time_enumeration() -> Row:
    """Enumerate, canonicalise and hash; every combination is a recipe of its own."""
    begin = time.perf_counter()
    ids = set()
    for recipe, _ in zip(large_space().recipes(), range(COMBINATIONS), strict=False):
        ids.add(recipe.config_id)
    row = _timed(f"enumerate, canonicalise, hash {COMBINATIONS:,} combinations", begin, 3.0)
    assert len(ids) == COMBINATIONS
    return row


def time_planning() -> Row:
    """Plan a sweep of LANES lanes, of which half are in a store with STORED rows."""
    setting = find_setting([("regression", "small")])
    seeds = range(5)
    recipes = [recipe for recipe, _ in zip(large_space().recipes(), range(LANES // len(seeds)), strict=False)]
    task, context = setting.tasks[0], setting.contexts["regression", "small"]
    there = [
        lane_id(Lane(recipe=recipe.canonical(), lr=rate_of(task, recipe), seed=seed), context)
        for recipe in recipes[::2]
        for seed in seeds
    ]
    with tempfile.TemporaryDirectory() as folder:
        fill_store(Path(folder) / "store", [*there, *(f"{i:016x}" for i in range(STORED - len(there)))])
        begin = time.perf_counter()
        plan = setting.plan(recipes, seeds, None, open_store(Path(folder) / "store").done())
        row = _timed(f"plan {LANES:,} lanes against {STORED:,} rows", begin, 5.0)
    assert plan.stored == len(there)
    return row


def fill_store(path: Path, run_ids: list[str]) -> None:
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
    for start in range(0, len(run_ids), ROWS_PER_PART):
        ids = pa.array(run_ids[start : start + ROWS_PER_PART])
        columns = [
            ids if field.name == "run_id" else pa.repeat(pa.scalar(common.get(field.name), field.type), len(ids))
            for field in ROW
        ]
        write_part(store.path, pa.Table.from_arrays(columns, schema=ROW))


def time_mirror() -> Row:
    """Mirror so many recipes to the study that the dashboard shows."""
    names = [f"level {i}" for i in range(4)]
    draws = np.random.default_rng(0)
    lines = [
        TrialData(
            key=f"{i:016x}",
            params={f"axis {axis}": names[draws.integers(4)] for axis in range(8)},
            values=(float(draws.normal()), float(draws.integers(1, 9))),
            facts={"label": f"recipe {i}", "seeds": 3},
        )
        for i in range(TRIALS)
    ]
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        mirror_trials(open_storage(f"{folder}/study.journal"), "bench", lines)
        return _timed(f"mirror {TRIALS:,} trials to the dashboard's study", begin, 10.0)
