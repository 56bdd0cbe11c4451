"""How long a report of 20,000 recipes takes: to make, to open, to filter; and how large it is."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from fp4dse.results.generated import generated
from fp4dse.results.parquet import encode
from fp4dse.results.report import write_report
from fp4dse.results.schema import ROW, SCHEMA_VERSION
from fp4dse.results.store import Store, open_store

RECIPES = 20_000
TASKS = 2
SEEDS = 3
POINTS = 64
"""Of a curve."""
_FILTERS = 7


def bench(recipes: int = RECIPES, seeds: int = SEEDS) -> Iterator[dict]:
    """what, value, unit, target: one line after the other.

    `recipes` lines in the report's table, over TASKS tasks. What needs a browser has value None where selenium,
    chromium or its driver is missing.
    """
    with tempfile.TemporaryDirectory(prefix="fp4dse-bench-") as folder:
        store = open_store(Path(folder) / "store", create=True)
        fill(store, recipes, seeds)
        page = Path(folder) / "report.html"
        begin = time.perf_counter()
        write_report(store, page)
        took = time.perf_counter() - begin
        of = f"report of {recipes:,} recipes"
        yield {"what": f"{of} × {seeds} seeds, to make", "value": round(took, 1), "unit": "s", "target": 20}
        yield {"what": f"{of}, size", "value": round(page.stat().st_size / 1e6, 1), "unit": "MB", "target": 15}
        seen = in_browser(page)
        for what, unit, target in (("first paint", "s", 2), ("front drawn", "s", None), ("filter", "ms", 200)):
            yield {"what": f"{of}, {what}", "value": seen.get(what), "unit": unit, "target": target}


def fill(store: Store, recipes: int, seeds: int = SEEDS) -> None:
    """Generated lanes of `recipes` lines: each task has recipes / TASKS of them; 1 % diverge."""
    frames = []
    for task in range(TASKS):
        truth = _truth(task)
        frame = generated(seeds=seeds, truth=truth, recipes=recipes // TASKS, noise=0.01, seed=0, task=f"task-{task}")
        frames.append(frame)
    runs = pd.concat(frames, ignore_index=True)
    count = len(runs)
    rng = np.random.default_rng(0)
    blown = (rng.random(count) < 0.003) & ~runs["is_baseline"].to_numpy()
    runs["status"] = np.where(blown, "diverged", "done")
    runs.loc[blown, ["val_loss", "val_metric"]] = np.nan
    runs["recipe_label"] = "e2m1, blocks of 16, gradients 16/17 SR, wgrad rht16, " + runs["recipe_label"].astype(str)
    runs["run_id"] = [f"{i:016x}" for i in range(count)]
    runs["schema_version"] = SCHEMA_VERSION
    starts = pa.array(np.arange(0, count * POINTS + 1, POINTS, dtype=np.int32))
    curve = np.geomspace(2, 1, POINTS)[None] * runs["train_loss_final"].to_numpy()[:, None]
    curves = {
        "curve_step": np.tile(np.geomspace(1, 10_000, POINTS).astype(np.int32), count),
        "curve_loss": curve.ravel(),
    }
    columns = []
    for field in ROW:
        if field.name in curves:
            columns.append(pa.ListArray.from_arrays(starts, pa.array(curves[field.name], field.type.value_type)))
        elif field.name in runs:
            values = runs[field.name]
            text = isinstance(values.dtype, pd.StringDtype)
            columns.append(pa.Array.from_pandas(values.astype(object) if text else values, type=field.type))
        else:
            columns.append(pa.nulls(count, field.type))
    with store.lock():
        (store.path / "parts" / "generated.parquet").write_bytes(encode(pa.Table.from_arrays(columns, schema=ROW)))


def _truth(task: int) -> Any:
    def gap(codes: dict[str, np.ndarray]) -> np.ndarray:
        helps = -0.03 * (codes["*.g.rounding"] > 0) - 0.02 * (codes["wgrad.rotation"] > 0) * (1 + task)
        return 0.15 + helps + 0.04 * codes["forward.rounding"] + 0.02 * codes["*.scale"]

    return gap


def why_no_browser() -> str | None:
    """Why a page cannot be opened here, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium (pip install selenium)"
    for name in ("chromium", "chromedriver"):
        if not shutil.which(name):
            return f"needs {name} (apt-get install chromium chromium-driver)"
    return None


def browser(width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> Any:
    """A headless chromium, a selenium WebDriver, that keeps what pages write to the console. Quit it when done."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.set_script_timeout(60)
    return driver


def opened(driver: Any, page: Path) -> None:
    """Open a report and wait until its front is drawn."""
    driver.get(page.resolve().as_uri())
    look = "const look = () => document.body.dataset.drawn ? end() : setTimeout(look, 20); look()"
    driver.execute_async_script(f"const end = arguments[0]; {look}")


def filtered(driver: Any, select: str, value: str) -> float:
    """Choose a value of a select and wait for figure and table; returns the ms until they were on the screen."""
    return driver.execute_async_script(_FILTER, select, value)


_FILTER = """
const [name, value, end] = arguments, select = document.getElementById(name);
delete document.body.dataset.took;
select.value = value;
const begin = performance.now();
select.dispatchEvent(new Event("change", {bubbles: true}));
const look = () => document.body.dataset.took
  ? requestAnimationFrame(() => setTimeout(() => end(performance.now() - begin))) : setTimeout(look, 1);
look();
"""


def in_browser(page: Path) -> dict[str, float]:
    """first paint and front drawn in seconds after opening; filter in ms, the median over several."""
    if why_no_browser():
        return {}
    driver = browser()
    try:
        opened(driver, page)
        paint = driver.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
        drawn = float(driver.execute_script("return document.body.dataset.drawn"))
        count = driver.execute_script("return document.querySelectorAll('[id^=filter-]').length")
        times = (
            [filtered(driver, f"filter-{i % count}", str(1 - 2 * (i % 2))) for i in range(_FILTERS)] if count else []
        )
    finally:
        driver.quit()
    found = {"first paint": round(paint / 1000, 2), "front drawn": round(drawn / 1000, 2)}
    return found | ({"filter": round(float(np.median(times)))} if times else {})
