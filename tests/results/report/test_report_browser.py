"""The report in a real browser: it loads without an error, its filters act on figure and table, its table sorts."""

import re

import msgspec
import numpy as np
import pytest

from fp4dse.dse import Recipe
from fp4dse.results import front, summarize, write_report
from fp4dse.results.bench.browser import browser, filtered, opened, why_no_browser
from fp4dse.results.text.ratios import change_with_range

pytestmark = pytest.mark.skipif(why_no_browser() is not None, reason=str(why_no_browser()))


@pytest.fixture(scope="module")
def chromium():
    driver = browser()
    yield driver
    driver.quit()


@pytest.fixture
def seen(chromium, swept_page):
    """The page, freshly opened; the console must be empty when a test is done with it."""
    chromium.get_log("browser")
    opened(chromium, swept_page)
    yield chromium
    assert chromium.get_log("browser") == []


def run(driver, script: str, *arguments):
    return driver.execute_script(f"return {script}", *arguments)


def until(driver, script: str, *arguments) -> None:
    """Wait for what a script says to become true; TimeoutException if it does not."""
    look = f"const said = () => ({script}), look = () => said() ? end() : requestAnimationFrame(look); look()"
    driver.execute_async_script(f"const end = arguments[arguments.length - 1]; {look}", *arguments)


def cells(driver, column: int) -> list[str]:
    rows = "[...document.querySelectorAll('#recipes-table tbody tr')]"
    return run(driver, f"{rows}.map(row => row.cells[{column}].textContent.trim())")


def marks(driver) -> dict[str, int]:
    """How many points each trace of the front has."""
    return dict(run(driver, "document.getElementById('front').data.map(trace => [trace.name, trace.x.length])"))


def select_with(driver, word: str) -> tuple[str, str]:
    """The select of the first option whose text has this word, and the option's value."""
    option = f"[...document.querySelectorAll('.controls option')].find(o => o.textContent.includes({word!r}))"
    return run(driver, f"[{option}.closest('select').id, {option}.value]")


def test_it_draws_every_figure_without_an_error_in_light_and_dark(seen):
    for scheme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        seen.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        assert run(seen, "getComputedStyle(document.body).backgroundColor") == background
        for name in ("techniques", "interactions", "divergence", "curves"):
            run(seen, f"document.getElementById('{name}').scrollIntoView()")
            shown = f"[...document.querySelectorAll('#{name} .plot')].filter(plot => plot.offsetParent)"
            until(seen, f"{shown}.every(plot => plot.querySelector('svg.main-svg'))")
    light = [{"name": "prefers-color-scheme", "value": "light"}]
    seen.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": light})


@pytest.mark.parametrize("part", [0.3, 0.01, 1e-5])
def test_an_axis_that_is_zoomed_has_ticks(seen, part):
    axis, many = (
        "document.getElementById('front').layout.yaxis",
        "(r => {0}.tickvals.filter(t => t > r[0] && t < r[1]).length)",
    )
    low, high = run(seen, f"{axis}.range")
    whole = run(seen, f"{axis}.ticktext")
    view = [low + 0.4 * (high - low), low + (0.4 + part) * (high - low)]
    run(seen, "Plotly.relayout('front', {'yaxis.range': arguments[0]})", view)
    until(seen, f"{many.format(axis)}({axis}.range) >= 3")
    assert len(set(run(seen, f"{axis}.ticktext"))) >= 3
    run(seen, "Plotly.relayout('front', {'yaxis.range': arguments[0]})", [low, high])
    until(seen, f"String({axis}.ticktext) === String(arguments[0])", whole)


def test_nothing_is_wider_than_a_phone(seen, swept_page):
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    seen.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    opened(seen, swept_page)
    assert run(seen, "document.documentElement.scrollWidth") <= 390
    laptop = {"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    seen.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", laptop)


def sized(driver, width: int, height: int) -> None:
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def place_of(driver, css: str) -> dict:
    return run(driver, f"document.querySelector({css!r}).getBoundingClientRect().toJSON()")


def test_the_first_screen_of_a_laptop_has_title_answer_and_chart(seen, swept_page):
    sized(seen, 1366, 768)
    opened(seen, swept_page)
    answer, chart = (place_of(seen, css) for css in (".answer .of:not([hidden])", "#front"))
    assert place_of(seen, "h1")["top"] >= 0
    assert answer["right"] <= chart["left"]
    assert max(answer["bottom"], chart["bottom"]) <= 768
    words = run(seen, "document.querySelector('.answer .of:not([hidden])').innerText").upper()
    assert all(word in words for word in ("USE\n", "THIS SURE\n", "THIS COST\n"))
    sized(seen, 1280, 900)


@pytest.mark.parametrize("width", [390, 820, 1366])
def test_the_bar_is_one_row_and_hides_no_heading(seen, swept_page, width):
    sized(seen, width, 800)
    opened(seen, swept_page)
    tops = run(seen, "[...document.querySelectorAll('.controls > *, #filters > *')].map(e => e.offsetTop)")
    assert len(set(tops) - {0}) == 1
    for name in ("said", "techniques", "curves"):
        seen.execute_script(f"location.hash = '{name}'")
        until(seen, f"document.querySelector('#{name} h2').getBoundingClientRect().top < innerHeight")
        assert place_of(seen, f"#{name} h2")["top"] >= place_of(seen, ".controls")["bottom"], name
    sized(seen, 1280, 900)


def test_the_front_is_named_on_the_chart(seen):
    labels = [text.split(" (")[0] for text in cells(seen, 1)]
    mine = {f"{mark}: {label}" for label, mark in zip(labels, cells(seen, 0), strict=True) if mark}
    texts = run(seen, "document.getElementById('front').layout.annotations.map(note => note.text)")
    assert mine & set(texts)
    assert set(texts) <= {*mine, "BF16", "BF16 (band: noise floor)"} | {t for t in texts if t.endswith(" …")}


def test_a_loss_reads_in_the_table_as_it_reads_in_the_terminal(chromium, store, row, tmp_path):
    losses = {"bf16": (0.5, 0.5), "nvfp4": (0.501, 0.502), "mxfp4": (0.7, 0.72), "ue5m3-sr": (4.0, 9000.0)}
    store.add([row(name, seed, loss) for name, found in losses.items() for seed, loss in enumerate(found)], "job")
    write_report(store, tmp_path / "report.html")
    opened(chromium, tmp_path / "report.html")
    lines = summarize(store.runs()).query("not is_baseline").sort_values("gap")
    expected = {
        change_with_range(*bounds).replace("-", "−") for bounds in lines[["gap", "gap_low", "gap_high"]].to_numpy()
    }
    assert set(cells(chromium, 2)) == expected


def test_what_is_far_above_is_clipped_marked_and_shown_on_demand(chromium, store, row, tmp_path):
    names = ("nvfp4", "mxfp4", "nvfp4-sr", "mxfp4-sr-rht", "ue5m3-sr", "nvfp4-sr-rht")
    rows = [row("bf16", seed, 0.5) for seed in range(2)]
    rows += [row(name, seed, 0.6 + 0.01 * i) for i, name in enumerate(names) for seed in range(2)]
    rows += [row("luq", seed, 60.0) for seed in range(2)]
    store.add(rows, "job")
    write_report(store, tmp_path / "report.html")
    opened(chromium, tmp_path / "report.html")
    top = "document.getElementById('front').layout.yaxis.range[1]"
    assert run(chromium, top) < np.log(60 / 0.5)
    assert marks(chromium)["1 far above, not to scale"] == 1
    assert "1 far above" in run(chromium, "document.getElementById('front-says').textContent")
    chromium.find_element("id", "clip").click()
    until(chromium, f"{top} > Math.log(60 / 0.5)")
    assert not any("far above" in name for name in marks(chromium))


def test_a_chart_where_every_recipe_diverged_says_so(chromium, store, row, tmp_path):
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, None), row("mxfp4", 0, None)], "job")
    write_report(store, tmp_path / "report.html")
    opened(chromium, tmp_path / "report.html")
    texts = run(chromium, "document.getElementById('front').layout.annotations.map(note => note.text)")
    assert "Every recipe diverged" in texts
    said = run(chromium, "document.getElementById('front-says').textContent")
    assert said.startswith("2 recipes shown, none with both a gap and a cost, so there is no front.")


def test_a_filter_acts_on_figure_and_table_together(seen, swept):
    filtered(seen, *select_with(seen, "points"))
    filtered(seen, *select_with(seen, "rotation rht16"))
    title = run(seen, "document.getElementById('setting').selectedOptions[0].textContent")
    lines = summarize(swept.runs())
    lines = lines[lines["task"].eq(title.split()[0]) & lines["label"].str.contains("rht16")]
    assert all("rht16" in text for text in cells(seen, 1))
    assert len(cells(seen, 1)) == len(lines) == 12
    assert sum(marks(seen).values()) == len(lines)
    assert run(seen, "document.getElementById('front-says').textContent").startswith("12 recipes shown")
    filtered(seen, *select_with(seen, "no rotation rht16"))
    assert not any("rht16" in text for text in cells(seen, 1))


def test_the_front_of_what_is_shown_is_the_front(seen, swept):
    name, value = select_with(seen, "no rotation rht16")
    filtered(seen, name, value)
    task = run(seen, "document.getElementById('setting').selectedOptions[0].textContent").split()[0]
    lines = summarize(swept.runs())
    lines = lines[lines["task"].eq(task) & ~lines["is_baseline"] & ~lines["label"].str.contains("rht16")]
    for axis, column in (("points", "points"), ("bits per", "bits")):
        filtered(seen, *select_with(seen, axis))
        expected = set(lines["label"][front(lines[column], lines["gap"])])
        numbered = [label for mark, label in zip(cells(seen, 0), cells(seen, 1), strict=True) if mark]
        assert len(numbered) == len(expected)
        for label in numbered:
            assert any(label.startswith(text) for text in expected), label


def test_words_pick_recipes(seen):
    words = seen.find_element("id", "words")
    words.send_keys("ue5m3 rht16")
    shown = cells(seen, 1)
    assert shown
    assert all("ue5m3" in text and "rht16" in text for text in shown)
    seen.find_element("css selector", "button[type=reset]").click()
    until(seen, "document.getElementById('page-says').textContent == '24 recipes, page 1 of 2'")


def test_a_column_of_which_more_is_better_is_sorted_so_at_once(seen):
    seen.execute_script("document.querySelectorAll('#recipes-table th button')[3].click()")
    chances = [float(text.removesuffix(" %")) for text in cells(seen, 3) if text != "–"]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > chances[-1]


def test_the_table_sorts_both_ways_and_has_pages(seen):
    def gaps() -> list[float]:
        texts = [re.match(r"[+−][\d.]+", text) for text in cells(seen, 2)]
        return [float(text[0].replace("−", "-")) for text in texts if text]

    head = "document.querySelectorAll('#recipes-table th button')[2].click()"
    seen.execute_script(head)
    rising = gaps()
    assert rising == sorted(rising)
    seen.execute_script(head)
    falling = gaps()
    assert falling == sorted(falling, reverse=True)
    assert falling[0] > rising[-1]
    assert len(cells(seen, 0)) == 20
    seen.find_element("id", "next").click()
    assert len(cells(seen, 0)) == 4


def test_another_task_changes_every_section(seen):
    before = cells(seen, 2)
    filtered(seen, "setting", "1")
    assert cells(seen, 2) != before
    shown = run(seen, "[...document.querySelectorAll('.of')].filter(part => !part.hidden).map(p => p.dataset.setting)")
    assert set(shown) == {"1"}


def test_a_mark_says_which_recipe_it_is(seen):
    filtered(seen, *select_with(seen, "points"))
    texts = run(seen, "document.getElementById('front').data.flatMap(trace => trace.hovertext)")
    assert len(texts) == 24
    assert all(
        re.search(r"<b>.+</b>.*loss against BF16: .*loss .*chance of the front", text, re.DOTALL) for text in texts
    )


def test_marks_do_not_hide_each_other(seen):
    filtered(seen, *select_with(seen, "points"))
    points = run(seen, "document.getElementById('front').data.flatMap(t => t.x.map((x, i) => [x, t.y[i]]))")
    assert len(np.unique(np.round(points, 6), axis=0)) == len(points)


LITTLE = {
    "only a baseline": {"bf16": [0.5, 0.51]},
    "no baseline": {"nvfp4": [0.5, 0.51], "mxfp4": [0.6, 0.61]},
    "one recipe, one seed": {"bf16": [0.5], "nvfp4": [0.6]},
    "all diverged": {"bf16": [0.5, 0.51], "nvfp4": [None, None], "mxfp4": [None, None]},
    "better than BF16": {"bf16": [0.5, 0.51], "nvfp4": [0.4, 0.41], "mxfp4": [0.4, 0.41]},
}


@pytest.mark.parametrize("losses", LITTLE.values(), ids=LITTLE)
def test_a_store_with_little_in_it_opens_without_an_error(chromium, store, row, tmp_path, losses):
    store.add([row(name, seed, loss) for name, values in losses.items() for seed, loss in enumerate(values)], "job")
    write_report(store, tmp_path / "report.html")
    opened(chromium, tmp_path / "report.html")
    run(chromium, "document.querySelectorAll('section').forEach(part => part.scrollIntoView())")
    assert chromium.get_log("browser") == []
    assert len(cells(chromium, 1)) == len(losses) - ("bf16" in losses)


def test_recipes_of_the_same_bits_share_a_line(chromium, store, row, tmp_path):
    plain = Recipe.named("nvfp4")
    training = msgspec.structs.replace(plain.training, loss_scale=1024.0)
    scaled = msgspec.structs.replace(plain, training=training)
    losses = {
        Recipe.named("bf16"): (0.5, 0.51),
        plain: (0.6, 0.62),
        scaled: (0.6, 0.62),
        Recipe.named("mxfp4"): (0.7, 0.7),
    }
    store.add([row(recipe, seed, loss) for recipe, found in losses.items() for seed, loss in enumerate(found)], "job")
    write_report(store, tmp_path / "report.html")
    opened(chromium, tmp_path / "report.html")
    assert [text.split(" (")[0] for text in cells(chromium, 1)] == ["mxfp4", "nvfp4"]
    assert cells(chromium, 1)[1] == "nvfp4 (the same bits: loss scale 1024)"
    assert run(chromium, "document.getElementById('page-says').textContent") == "3 recipes in 2 lines, page 1 of 1"
    assert run(chromium, "document.getElementById('front-says').textContent").startswith("3 recipes shown")
