import json
import re
import subprocess
import sys

import numpy as np
import pytest
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from fp4dse.dse import Recipe, StoreError
from fp4dse.results import open_store, summarize, write_report

EFFECT = {"bf16": 0, "mxfp4": 0.3, "nvfp4": 0.1, "nvfp4-sr": 0.08, "nvfp4-sr-rht": 0.02, "ue5m3-sr": 9.0}


@pytest.fixture(scope="module")
def swept(tmp_path_factory, row):
    store = open_store(tmp_path_factory.mktemp("swept") / "store", create=True)
    rng = np.random.default_rng(5)
    for task in ("vision", "regression"):
        for name, effect in EFFECT.items():
            losses = 0.2 * np.exp(effect + 0.01 * rng.normal(size=3))
            store.add([row(name, s, loss, task=task) for s, loss in enumerate(losses)], f"{task}-{name}")
    store.add([row("mxfp4-sr-rht", 0, None), row("mxfp4-sr-rht", 1, status="failed", failure="<b>killed</b>")], "bad")
    store.add([row("mxfp4", 5, 0.3, fallbacks=["eager: no compiler"])], "eager")
    return store


@pytest.fixture(scope="module")
def html(swept) -> str:
    path = swept.path.parent / "report.html"
    write_report(swept, path, title="Q & A <x>")
    return path.read_text()


@pytest.fixture(scope="module")
def own(html) -> str:
    """The report without the plotting library."""
    library = get_plotlyjs()
    assert html.count(library) == 1
    return html.replace(library, "")


def text_of(html: str) -> str:
    html = re.sub(r"(?s)<(script|style).*?</\1>", "", html)
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", "", html).replace("&nbsp;", " "))


def figures(own: str) -> list[dict]:
    return [json.loads(text) for text in re.findall(r'(?s)<script type="application/json">(.*?)</script>', own)]


def test_the_file_asks_the_network_for_nothing(own):
    assert "://" not in own
    assert not re.search(r"\b(src|href|action|poster|srcset)\s*=", own)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", own)


def test_every_figure_is_valid_plotly(own):
    found = figures(own)
    assert len(found) == 4  # front and curves, two tasks
    for figure in found:
        Figure(json.loads(re.sub(r"var\(--[\w-]+\)", "#123456", json.dumps(figure))))


def test_every_colour_of_a_figure_is_defined_for_light_and_dark(own):
    style = own[own.index("<style>") : own.index("</style>")]
    used = set(re.findall(r"var\((--[\w-]+)\)", json.dumps(figures(own))))
    assert used
    for name in used:
        assert style.count(f"{name}:") == 2, name


def test_the_front_is_numbered_alike_in_figure_and_table(swept, own):
    summary = summarize(swept.runs())
    marks = re.findall(r'class="mark">(\d+)<', own)
    numbers = [trace["text"] for figure in figures(own) for trace in figure["data"] if "text" in trace]
    assert marks == [n for front in numbers for n in front]
    assert len(marks) == summary["on_front"].sum()
    assert numbers[0] == [str(i + 1) for i in range(len(numbers[0]))]


def test_the_figure_shows_true_gaps_in_the_right_columns(swept, own):
    line = summarize(swept.runs()).query("task == 'vision' and name == 'nvfp4'").iloc[0]
    front = next(t for f in figures(own)[2:] for t in f["data"] if "text" in t)
    assert 100 * line["gap"] in front["y"]
    assert front["error_y"]["array"][front["y"].index(100 * line["gap"])] == pytest.approx(
        100 * (line["gap_high"] - line["gap"])
    )
    for figure in figures(own)[::2]:
        for trace in figure["data"]:
            assert all(abs(x - round(x)) <= 0.35 + 1e-9 for x in trace["x"])


def test_a_recipe_far_above_is_drawn_at_the_edge_and_the_hover_tells_the_truth(own):
    figure = figures(own)[2]
    far = next(trace for trace in figure["data"] if trace["name"] == "far above, not to scale")
    top = figure["layout"]["yaxis"]["range"][1]
    assert far["y"][0] < top < 900
    assert re.search(r"gap \+8\d\d\.|gap \+90\d\.", far["hovertext"][0])


def test_curves_are_the_front_against_bf16(own):
    names = [t["name"].replace("<br>", " ") for t in figures(own)[3]["data"] if t.get("name")]
    assert names[0] == "BF16"
    assert names[1:] == sorted(names[1:])
    assert f"3 {Recipe.named('nvfp4-sr').label()}" in names


def test_it_says_in_words_what_won_how_sure_and_what_went_wrong(swept, own):
    text = text_of(own)
    best = Recipe.named("nvfp4-sr-rht").label()
    assert f"Lowest gap: {best} at" in text
    assert "noise floor" in text
    assert "1 diverged" in text
    assert "eager: no compiler (1 lane)" in text
    assert "Some CPU" in text
    assert "abc1234" in text
    assert "2.13.0" in text
    assert "seeds 0, 1, 2" in text


def test_texts_from_the_store_cannot_become_markup(html, store, row, tmp_path):
    evil = "</script><x>"
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6, recipe_label=evil, metric_name=evil)], "job")
    write_report(store, tmp_path / "report.html")
    assert evil not in (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;killed&lt;/b&gt;" in html
    assert "<title>Q &amp; A &lt;x&gt;</title>" in html
    assert "<x>" not in html


def test_a_store_without_a_front_still_has_a_report(store, row, tmp_path):
    store.add([row("nvfp4", 0, None), row("mxfp4", 0, 0.5)], "job")
    write_report(store, tmp_path / "report.html")
    text = text_of((tmp_path / "report.html").read_text())
    assert "no BF16 baseline" in text
    assert "No recipe that quantizes has a gap here." in text


def test_one_seed_is_reported_without_an_interval(store, row, tmp_path):
    store.add([row("bf16", 0, 0.5), row("mxfp4", 0, 0.6)], "job")
    write_report(store, tmp_path / "report.html")
    assert "(one seed, so no interval)" in text_of((tmp_path / "report.html").read_text())


def test_an_empty_store_has_no_report(store, tmp_path):
    with pytest.raises(StoreError, match="no runs"):
        write_report(store, tmp_path / "report.html")


def test_results_import_neither_duckdb_nor_plotly_nor_torch():
    code = "import sys, fp4dse.results; print([m for m in ('duckdb', 'plotly', 'torch', 'optuna') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
