"""The report's file: complete, self-contained, true to the store, and sensible where the store holds little."""

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from fp4dse.dse import Recipe, Space, StoreError
from fp4dse.results import divergence, open_store, summarize, write_report
from fp4dse.results.report.curves import front_curves
from fp4dse.results.report.explore import choices
from fp4dse.results.report.findings import COLUMNS, findings
from fp4dse.results.report.markup import spoken
from fp4dse.results.report.provenance import _by_reason
from fp4dse.results.stats.recipes.equivalence import against
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.store.parquet import read_all
from fp4dse.results.store.spaces import record_space


@pytest.fixture(scope="module")
def html(swept_page) -> str:
    return swept_page.read_text()


@pytest.fixture(scope="module")
def own(html) -> str:
    """The report without the plotting library."""
    library = get_plotlyjs()
    assert html.count(library) == 1
    return html.replace(library, "")


def text_of(html: str) -> str:
    html = re.sub(r"(?s)<(script|style).*?</\1>", "", html)
    return re.sub(r"\s+", " ", re.sub("<[^>]*>", "", html).replace("&nbsp;", " "))


def report_of(store, tmp_path) -> str:
    write_report(store, tmp_path / "report.html")
    return text_of((tmp_path / "report.html").read_text())


def figures(own: str) -> list[dict]:
    found = re.findall(r'(?s)<script type="application/json">(.*?)</script>', own)
    return [json.loads(text) for text in found]


def payload(own: str) -> dict:
    return json.loads(re.search(r'(?s)<script type="application/json" id="recipes">(.*?)</script>', own)[1])


def unpacked(packed: list) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed[1]), packed[0])


WRITE = """
import sys
from pathlib import Path
from fp4dse.results import open_store, write_report
write_report(open_store("store"), sys.argv[1], title="the same")
"""


@pytest.mark.heavy
def test_reports_of_the_same_rows_are_equal_to_the_byte(swept, tmp_path, monkeypatch):
    """Whichever files hold the rows and in which order, in this process and in another."""
    rows = swept._reader.read(read_all).drop_columns(["run_id", "schema_version"]).to_pylist()
    order = np.random.default_rng(0).permutation(len(rows))
    pages = {}
    for name, places in (("whole", [range(len(rows))]), ("pieces", np.array_split(order, 5))):
        store = open_store(tmp_path / name / "store", create=True)
        for i, some in enumerate(places):
            store.add([rows[place] for place in some], str(i))
        pages[name] = store.path.parent / "report.html"
    monkeypatch.chdir(tmp_path / "whole")
    write_report(open_store("store"), pages["whole"], title="the same")
    command = [sys.executable, "-c", WRITE, "report.html"]
    subprocess.run(command, check=True, cwd=tmp_path / "pieces", env={**os.environ, "PYTHONHASHSEED": "1"})
    here, there = (re.sub(r" · \d{4}-\d\d-\d\d", "", page.read_text()) for page in pages.values())
    assert here == there


def test_the_answer_warns_of_a_task_of_which_nobody_knows_a_larger_models_order(html):
    [answer] = re.findall(r'(?s)<section id="answer">(.*?)</section>', html)
    assert answer.count("<li>Nobody has compared this preset's order") == 2  # a setting each


def test_a_number_within_a_name_is_part_of_the_name():
    assert spoken("ask --task language:0.4M, or 1M") == "ask --task language:0.4M, or 1M"
    assert spoken("at 0.002.") == 'at <data value="0.002">0.002</data>.'


def test_the_file_asks_the_network_for_nothing(own):
    assert "://" not in own
    assert not re.search(r"\b(src|action|poster|srcset)\s*=", own)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', own))
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(", own)


def test_every_figure_is_valid_plotly(own):
    found = figures(own)
    assert len(found) == 2 * 3 + 1  # effects, interactions, curves of two tasks; one divergence map
    for figure in found:
        Figure(json.loads(re.sub(r"var\(--[\w-]+\)", "#123456", json.dumps(figure))))


def test_every_colour_is_defined_for_light_and_dark(own):
    style = own[own.index("<style>") : own.index("</style>")]
    used = set(re.findall(r"var\((--[\w-]+)\)", own))
    assert used
    for name in used:
        assert style.count(f"{name}:") == 2, name


def test_the_links_lead_to_sections(own):
    for target in re.findall(r'<a href="#([^"]+)"', own):
        assert f'<section id="{target}">' in own


def test_the_front_has_every_recipe_with_all_digits_of_its_gap(swept, own):
    lines = summarize(swept.runs()).query("not is_baseline")
    data = payload(own)
    columns = {name: unpacked(packed) for name, packed in data["columns"].items()}
    assert data["count"] == len(lines) == 48
    titles = [data["settings"][i]["title"] for i in columns["setting"]]
    ids = [data["ids"][i] for i in columns["recipe"]]
    found = dict(zip(zip(titles, ids, strict=True), columns["gap"], strict=True))
    for line in lines.to_dict("records"):
        assert found[f"{line['task']} (quickstart)", line["config_id"]] == line["gap"]


def test_a_filter_knows_which_recipes_have_a_value(swept, own):
    data = payload(own)
    runs = swept.runs().drop_duplicates("config_id").set_index("config_id")
    technique = next(found for found in data["filters"] if found["title"] == "technique")
    assert "rotation rht16" in technique["values"]
    stride = -(-len(data["ids"]) // 8)
    place = technique["values"].index("rotation rht16")
    bits = unpacked(technique["bits"])[place * stride : (place + 1) * stride]
    have = np.unpackbits(bits, bitorder="little")[: len(data["ids"])].astype(bool)
    assert list(have) == [runs.loc[config_id, "wgrad_rotation"] == "rht16" for config_id in data["ids"]]


def test_it_says_what_to_use_how_sure_and_at_what_cost(own):
    text = text_of(own)
    assert "24 recipes · 2 tasks · 152 trained lanes · 3 diverged · 1 failed" in text
    for task in ("regression", "vision"):
        assert re.search(r"Use(mxfp4|nvfp4|ue5m3), wgrad rht16", text), task
    why = r" \(expected on new seeds: the mean of its row, drawn towards what its techniques do in other recipes\)"
    assert re.search(rf"Loss \+2\d\.\d % \(\+\d+\.\d to \+\d+\.\d %\) against BF16, 3 paired seeds{why}: worse", text)
    band = r"\(\d\d to \d\d % with better and worse software\)"
    assert re.search(rf"This cost\d\d % of BF16's step time {band} \(modelled: \S+ on \S+\)", text)


def test_it_says_first_that_the_loss_is_that_of_the_quantized_model(own):
    answer = text_of(own[own.index('id="answer"') : own.index('id="trade-off"')])
    assert answer.count("held-out loss with the quantizers on") == 2  # a card per task


def test_it_says_what_helps_what_went_wrong_and_how_rates_were_chosen(own):
    text = text_of(own)
    assert re.search(r"wgrad.rotation = rht16 instead of none helps in every task: regression \(quickstart\) −\d", text)
    assert re.search(r"What harms: forward.rounding = stochastic instead of nearest: loss \+2\d\.\d %", text)
    assert "Learning rates: one learning rate for all recipes (0.001); none was searched." in text
    assert "noise floor" in text
    assert "1 of 24 recipes diverged" in text
    assert "eager: no compiler (1 lane)" in text
    assert "fp4dse sweep SPACE --task regression:quickstart --seeds 0,1,2 --lr 0.001" in text


def test_no_logarithm_is_called_a_percentage(store, row, tmp_path):
    """BF16's loss is 1: what a recipe's loss is, is its ratio."""
    losses = {"bf16": (1.0, 1.0), "nvfp4": (1.5, 1.5), "mxfp4": (11.4, 11.4)}
    store.add([row(name, seed, loss) for name, found in losses.items() for seed, loss in enumerate(found)], "job")
    text = report_of(store, tmp_path)
    assert "Loss +50.0 % (+50.0 to +50.0 %) against BF16" in text
    assert not re.search(r"40\.5\d? %|243\.\d+ %", text)
    assert "× 11.4" in text


def test_the_title_is_what_the_space_asks_and_else_the_name_of_the_store(store, row, tmp_path):
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6)], "job")
    write_report(store, tmp_path / "report.html")
    assert f"<h1>{tmp_path.name}</h1>" in (tmp_path / "report.html").read_text()
    record_space(store, Space("zoo", "Which <published> recipe?"))
    write_report(store, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "<h1>Which &lt;published&gt; recipe?</h1>" in html
    assert "<title>Which &lt;published&gt; recipe?</title>" in html
    assert "<b>zoo</b>" in html


def test_what_all_recipes_have_stands_in_its_head(store, row, tmp_path):
    bf16 = Recipe.named("bf16")
    recipes = [
        msgspec.structs.replace(
            Recipe.named(name), fprop=bf16.fprop, training=msgspec.structs.replace(bf16.training, loss_scale=8.0)
        )
        for name in ("nvfp4", "mxfp4")
    ]
    lanes = [row(recipe, seed, 0.1 + 0.1 * n) for n, recipe in enumerate([bf16, *recipes]) for seed in range(3)]
    store.add(lanes, "job")
    shown = report_of(store, tmp_path)
    assert "Usenvfp4, forward bf16" in shown
    assert "All recipes have: loss scale 8." in shown
    assert shown.index("All recipes have") < shown.index("Use")


@pytest.mark.heavy
def test_what_saves_no_time_is_recommended_only_where_nothing_does(store, row, tmp_path):
    bf16, nvfp4 = Recipe.named("bf16"), Recipe.named("nvfp4")
    slow = msgspec.structs.replace(bf16, dgrad=msgspec.structs.replace(bf16.dgrad, w=nvfp4.dgrad.w))
    losses = ((bf16, 0.5), (slow, 0.501), (nvfp4, 0.7))
    rows = {recipe: [row(recipe, s, loss + 0.001 * s) for s in range(3)] for recipe, loss in losses}
    store.add([*rows[bf16], *rows[slow]], "slow")
    [verdict] = verdicts(store.runs())
    assert (verdict.config_id, verdict.slower) == (slow.config_id, 0)
    assert "It saves no time against BF16." in report_of(store, tmp_path)
    store.add(rows[nvfp4], "fast")
    [verdict] = verdicts(store.runs())
    assert (verdict.config_id, verdict.slower) == (nvfp4.config_id, 1)
    shown = report_of(store, tmp_path)
    assert "It saves no time against BF16." not in shown
    assert set(against(store.runs())["reference"]) == {nvfp4.config_id}


def test_paths_that_stages_did_not_take_for_one_reason_are_one_line_a_lane():
    why = [f"{stage}: fp8 not taken: too small" for stage in ("fprop", "dgrad")]
    runs = pd.DataFrame({"run_id": ["a", "b", "c"], "fallbacks": [[*why, "no compiler"], why[:1], None]})
    assert _by_reason(runs).value_counts().to_dict() == {
        "fprop, dgrad: fp8 not taken: too small": 1,
        "no compiler": 1,
        "fprop: fp8 not taken: too small": 1,
    }


def test_a_tensor_scale_is_no_scale_format():
    recipes = pd.DataFrame([Recipe.named(name).columns() for name in ("nvfp4", "mxfp4")])
    found = dict(choices(recipes))
    assert not any(value[0].isdigit() for value in found["scale format"])
    assert "tensor scale" in found["technique"]


def test_curves_are_the_front_against_bf16(own):
    names = [t["name"] for f in figures(own) for t in f["data"] if t.get("line", {}).get("dash") and t.get("name")]
    assert names.count("BF16") == 2
    assert len(names) > 2
    assert not any(name[0].isdigit() for name in names)  # the numbers are of the chart, whose front is another


def test_texts_from_the_store_cannot_become_markup(html, store, row, tmp_path):
    evil = "</script><x>"
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6, recipe_label=evil, metric_name=evil)], "job")
    write_report(store, tmp_path / "report.html")
    assert evil not in (tmp_path / "report.html").read_text()
    assert "&lt;b&gt;killed&lt;/b&gt;" in html
    assert "<title>Q &amp; A &lt;x&gt;</title>" in html
    assert "<x>" not in html


def test_a_store_without_a_baseline_claims_no_front(store, row, tmp_path):
    store.add([row("nvfp4", seed, 0.5) for seed in range(3)], "job")
    text = report_of(store, tmp_path)
    assert "no baseline was finished here" in text
    assert "Useno recipe of these" in text
    assert "No BF16 baseline finished, so no recipe has a gap." in text
    assert "0 on the front" in text


def test_a_store_where_all_diverged_says_so(store, row, tmp_path):
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, None), row("mxfp4", 0, None)], "job")
    text = report_of(store, tmp_path)
    assert "Every recipe diverged (2 of 2): nothing here trains to the end." in text
    assert "2 of 2 recipes diverged on some seed." in text


def test_one_seed_is_reported_without_an_interval(store, row, tmp_path):
    store.add([row("bf16", 0, 0.5), row("mxfp4", 0, 0.6)], "job")
    text = report_of(store, tmp_path)
    assert "Loss +20.0 % against BF16, 1 paired seed: with one seed nothing can be told apart from BF16" in text
    assert "One seed: no difference can be told from chance; --seeds takes more." in text


def test_one_recipe_has_no_effects_but_a_report(store, row, tmp_path):
    store.add([row(name, s, 0.5 + 0.01 * s) for name in ("bf16", "nvfp4") for s in range(3)], "job")
    text = report_of(store, tmp_path)
    assert "Usenvfp4" in text
    assert "there are no effects" in text
    assert "Error of each operand" not in text, "it was written without statistics"


def test_only_a_baseline_is_no_winner(store, row, tmp_path):
    store.add([row("bf16", s, 0.5 + 0.01 * s) for s in range(2)], "job")
    assert "Only BF16 was trained here." in report_of(store, tmp_path)


def test_it_opens_with_a_task_in_which_recipes_are_compared(store, row, tmp_path):
    of = {"alone": ["bf16"], "lacking": ["nvfp4"], "other": ["bf16", "nvfp4"]}
    store.add(
        [row(name, s, 0.5 + 0.1 * s, preset=one) for one, names in of.items() for name in names for s in (0, 1)], "job"
    )
    write_report(store, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    options = re.findall(r'<option value="\d">([^<]*)</option>', html)
    assert [re.search(r"\((\w+)\)", text)[1] for text in options[:3]] == ["other", "alone", "lacking"]
    answers = re.split(r'data-setting="\d"', html[html.index('<div class="answer">') : html.index('id="front"')])[1:]
    assert ["Only BF16 was trained here." in answer for answer in answers] == [False, True, False]


def test_an_empty_store_has_no_report(store, tmp_path):
    with pytest.raises(StoreError, match="no runs"):
        write_report(store, tmp_path / "report.html")


def test_an_overhead_column_becomes_an_axis(swept):
    runs = swept.runs(COLUMNS)
    runs = runs.assign(overhead=0.5 + 0.01 * runs["points"])
    assert {"points", "overhead", "bits_per_element"} == set(findings(runs, swept).axes)


def test_divergence_counts_the_recipes_that_blew_up(swept):
    lines = divergence(swept.runs()).query("task == 'vision'")
    alone = lines[lines["with_factor"].isna()].set_index(["factor", "level"])
    assert alone.loc[("wgrad.rotation", "rht16"), ["recipes", "blown"]].tolist() == [12, 1]
    assert alone.loc[("wgrad.rotation", "none"), "diverged"] == 0
    pair = lines[lines["factor"].eq("wgrad.rotation") | lines["with_factor"].eq("wgrad.rotation")]
    assert pair["blown"].max() == 1
    assert (lines["diverged"] == lines["blown"] / lines["recipes"]).all()


def test_results_import_neither_duckdb_nor_plotly_nor_torch():
    slow = ("duckdb", "plotly", "torch", "optuna", "matplotlib")
    code = f"import sys, fp4dse.results; print([m for m in {slow} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_a_store_of_a_newer_version_is_refused(store, tmp_path):
    (store.path / "store.json").write_text('{"schema_version": 999}')
    with pytest.raises(StoreError, match="newer"):
        write_report(open_store(store.path), tmp_path / "report.html")


@pytest.mark.parametrize("where", ["swiglu8-store", "between-store"])
def test_curves_begin_with_bf16_whatever_the_order_of_rows(where):
    store = open_store(Path(__file__).parents[3] / "docs" / "study" / where)
    for found in findings(store.runs(COLUMNS, categories=True), store).settings:
        names = list(front_curves(found)["name"].unique())
        assert not names or names[0] == "BF16"
