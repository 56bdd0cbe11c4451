"""Times of the store and of the statistics at the sizes that they are made for, beside their targets."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fp4dse.results.bench.generated import as_rows, generated, screening
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.recipes.front_chance import front_chance, hypervolume
from fp4dse.results.stats.techniques.effects import effects
from fp4dse.results.stats.techniques.lasso import stability
from fp4dse.results.store.compaction import write_part
from fp4dse.results.store.inbox import encode_ipc
from fp4dse.results.store.integrity import file_name
from fp4dse.results.store.store import Store, open_store

ROWS = 1_000_000
FILES = 20_000
RECIPES = 6_666
"""With three seeds each."""
SCREENED = 3_600
"""Of a screening beside all named recipes, with three seeds each."""
LANES_PER_FILE = 4
POINTS = 64
"""Of a curve."""

GROUPED = "SELECT wgrad_rotation, fprop_x_scale, avg(val_loss), count(*) FROM runs WHERE status = 'done' GROUP BY ALL"
WITH_GAP = "SELECT wgrad_rotation, avg(gap) FROM runs GROUP BY ALL"


def bench(
    rows: int = ROWS, files: int = FILES, recipes: int = RECIPES, screened: int = SCREENED
) -> Iterator[dict[str, Any]]:
    """Lines of what, seconds, cpu_s (of all threads) and target_s (None without one), as they are measured.

    Everything is generated under a temporary folder, about a gigabyte for a million rows, and removed.
    """
    with tempfile.TemporaryDirectory(prefix="fp4dse-bench-") as folder:
        store = open_store(Path(folder) / "inbox", create=True)
        _fill_inbox(store, files)
        yield _timed(f"compaction of {files:,} inbox files", lambda: store.compact(1), 20.0)
        store = open_store(Path(folder) / "large", create=True)
        _fill_parts(store, rows)
        yield _timed(f"group-by over {rows:,} rows with curves", lambda: store.sql(GROUPED), 0.5)
        yield _timed(f"group-by of the gap over {rows:,} rows", lambda: store.sql(WITH_GAP), None)
    runs = generated(seeds=3, recipes=recipes, noise=0.02)
    size = f"{len(runs):,} rows"
    yield _timed(f"front with 1,000 resamples, {size}", lambda: front_chance(runs, "overhead"), 5.0)
    yield _timed(f"hypervolume with its interval, {size}", lambda: hypervolume(runs, "overhead"), 5.0)
    yield _timed(f"all effects and interactions, {size}", lambda: effects(runs), 5.0)
    named = screening(screened)
    size_named = f"{screened:,} recipes and all named ones × 3 seeds"
    yield _timed(f"all effects and interactions, {size_named}", lambda: effects(named), 5.0)
    yield _timed(f"every recipe against the best, {size}", lambda: against(runs), None)
    yield _timed(f"stability selection, {size}", lambda: stability(runs), None)


def _timed(what: str, action: Callable[[], object], target_s: float | None) -> dict[str, Any]:
    begin, cpu = time.perf_counter(), time.process_time()
    action()
    seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
    return {"what": what, "seconds": round(seconds, 2), "cpu_s": round(cpu_s, 2), "target_s": target_s}


def lanes(count: int, first: int = 0) -> pa.Table:
    """`count` rows with curves, the run_ids from `first` on."""
    runs = generated(("*.scale", "*.g.rounding", "wgrad.rotation"), seeds=count // 18 or 1, seed=first)
    chosen = runs.iloc[np.arange(count) % len(runs)].reset_index(drop=True)
    mixed = np.arange(first, first + count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)  # no two alike, as digests
    ids = np.array([f"{i:016x}" for i in mixed], object)
    chosen = chosen.assign(run_id=ids, seed=np.arange(first, first + count))
    losses = np.sort(np.random.default_rng(first).random((count, POINTS)), axis=1)[:, ::-1]
    return as_rows(chosen, losses)


def _fill_inbox(store: Store, files: int) -> None:
    table = lanes(files * LANES_PER_FILE)
    with store.lock():
        for i in range(files):
            lines = np.arange(i * LANES_PER_FILE, (i + 1) * LANES_PER_FILE)
            data = encode_ipc(table.take(lines))  # a slice would drag the offsets of the whole table along
            file = store.path / "inbox" / file_name(f"job-{i:06}", data, "arrow")
            file.write_bytes(data)  # as write_atomic does, without the waits
    os.sync()


def _fill_parts(store: Store, rows: int) -> None:
    step = 50_000
    with store.lock():
        for first in range(0, rows, step):
            write_part(store.path, lanes(min(step, rows - first), first))
