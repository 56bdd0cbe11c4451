"""Times of a report of 20,000 recipes: to make, to open and to filter; and its size."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fp4dse.results.bench.browser import BUSY, timed
from fp4dse.results.bench.generated import as_rows, generated, screening
from fp4dse.results.bench.store import SCREENED
from fp4dse.results.report import write_report
from fp4dse.results.store.compaction import write_part
from fp4dse.results.store.store import Store, open_store

RECIPES = 20_000
TASKS = 2
SEEDS = 3
POINTS = 64
"""Of a curve."""


def bench(recipes: int = RECIPES, seeds: int = SEEDS, screened: int = SCREENED) -> Iterator[dict[str, Any]]:
    """Lines of what, value, unit and target, as they are measured.

    `recipes` lines in the report's table, over TASKS tasks; the first line is of a report of `screened` recipes and all
    named ones. What needs a browser has value None where selenium, chromium or its driver is missing.
    """
    with tempfile.TemporaryDirectory(prefix="fp4dse-bench-") as folder:
        store = open_store(Path(folder) / "store", create=True)
        fill(store, recipes, seeds)
        page = Path(folder) / "report.html"
        took = _seconds(store, page)
        of = f"report of {screened:,} recipes and all named ones × {seeds} seeds, to make"
        store = open_store(Path(folder) / "screened", create=True)
        _write(store, screening(screened, seeds))
        yield {"what": of, "value": _seconds(store, Path(folder) / "screened.html"), "unit": "s", "target": 20}
        of = f"report of {recipes:,} recipes"
        yield {"what": f"{of} × {seeds} seeds, to make", "value": took, "unit": "s", "target": 20}
        yield {"what": f"{of}, size", "value": round(page.stat().st_size / 1e6, 1), "unit": "MB", "target": 15}
        seen = timed(page)
        rows = (("first paint", "s", 2), ("front drawn", "s", None), ("filter", "ms", 200), (BUSY, "ms", None))
        for what, unit, target in rows:
            yield {"what": f"{of}, {what}", "value": seen.get(what), "unit": unit, "target": target}


def fill(store: Store, recipes: int, seeds: int = SEEDS) -> None:
    """Generated lanes of `recipes` lines: each task has recipes / TASKS of them; 1 % diverge."""
    frames = [
        generated(seeds=seeds, truth=_truth(task), recipes=recipes // TASKS, noise=0.01, seed=0, task=f"task-{task}")
        for task in range(TASKS)
    ]
    runs = pd.concat(frames, ignore_index=True)
    _write(store, runs)


def _seconds(store: Store, page: Path) -> float:
    """To make the report of a store."""
    begin = time.perf_counter()
    write_report(store, page)
    return round(time.perf_counter() - begin, 1)


def _write(store: Store, runs: pd.DataFrame) -> None:
    """Store runs as lanes with curves; 0.3 % diverge."""
    count = len(runs)
    rng = np.random.default_rng(0)
    diverged = (rng.random(count) < 0.003) & ~runs["is_baseline"].to_numpy()
    runs = runs.assign(status=np.where(diverged, "diverged", "done"))
    runs.loc[diverged, ["val_loss", "val_metric"]] = np.nan
    runs["recipe_label"] = "e2m1, blocks of 16, gradients 16/17 SR, wgrad rht16, " + runs["recipe_label"].astype(str)
    runs["run_id"] = [f"{i:016x}" for i in range(count)]
    losses = np.geomspace(2, 1, POINTS)[None] * runs["train_loss_final"].to_numpy()[:, None]
    with store.lock():
        write_part(store.path, as_rows(runs, losses))


def _truth(task: int) -> Any:
    def gap(codes: dict[str, np.ndarray]) -> np.ndarray:
        helps = -0.03 * (codes["*.g.rounding"] > 0) - 0.02 * (codes["wgrad.rotation"] > 0) * (1 + task)
        return 0.15 + helps + 0.04 * codes["forward.rounding"] + 0.02 * codes["*.scale"]

    return gap
