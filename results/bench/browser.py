"""A report in a real browser: headless chromium, driven by selenium, for tests, timing and screenshots."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

BUSY = "filter, processor time of the page"


def why_no_browser() -> str | None:
    """The reason why no page can be opened here, or None."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "needs selenium (pip install selenium)"
    for name in ("chromium", "chromedriver"):
        if not shutil.which(name):
            return f"needs {name} (apt-get install chromium chromium-driver)"
    return None


def browser() -> Any:
    """A headless chromium, a selenium WebDriver, that keeps what pages write to the console. Quit it when done."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "hide-scrollbars"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    size = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "light"}
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
    return float(driver.execute_async_script(_FILTER, select, value))


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


def timed(page: Path) -> dict[str, float]:
    """Seconds from opening to first paint and to the drawn front; milliseconds of filter and BUSY, medians. Empty
    without a browser."""
    if why_no_browser():
        return {}
    driver = browser()
    try:
        driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        opened(driver, page)
        paint = driver.execute_script("return performance.getEntriesByName('first-contentful-paint')[0].startTime")
        drawn = float(driver.execute_script("return document.body.dataset.drawn"))
        count = driver.execute_script("return document.querySelectorAll('[id^=filter-]').length")
        times, busy = [], []
        for i in range(count):
            for value in ("1", "-1", ""):  # some recipes, the others, all
                before = _processor_ms(driver)
                times.append(filtered(driver, f"filter-{i}", value))
                busy.append(_processor_ms(driver) - before)
    finally:
        driver.quit()
    found = {"first paint": round(paint / 1000, 2), "front drawn": round(drawn / 1000, 2)}
    return found | ({"filter": round(float(np.median(times))), BUSY: round(float(np.median(busy)))} if times else {})


def _processor_ms(driver: Any) -> float:
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return 1000 * float(next(metric["value"] for metric in metrics if metric["name"] == "TaskDuration"))
