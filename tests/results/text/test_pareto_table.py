import json
import re

import msgspec
import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import Recipe
from fp4dse.dse.training import Training
from fp4dse.results import noise_floor, pareto_table, records, summarize
from fp4dse.results.stats.recipes.front_chance import front_chance
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.text.pareto_table import metric_title, price_remarks, setting_titles
from fp4dse.results.text.ratios import change

LOSSES = {"bf16": 0.5, "nvfp4": 0.55, "mxfp4": 0.7, "nvfp4-sr": 0.6, "nvfp4-sr-rht": 0.52, "mxfp4-sr-rht": 0.9}


@pytest.fixture
def runs(row):
    noise = {name: np.random.default_rng(i).normal(0, 0.02, 3) for i, name in enumerate(LOSSES)}
    rows = [row(name, s, loss * np.exp(noise[name][s])) for name, loss in LOSSES.items() for s in range(3)]
    rows += [row("ue5m3-sr", 0, 0.5), row("ue5m3-sr", 1, None), row("ue5m3-sr", 2, 0.5)]
    return pd.DataFrame(rows)


def table(runs, **options) -> str:
    return pareto_table(summarize(runs), noise_floor(runs), **options)


@pytest.mark.parametrize("width", [80, 110])
def test_no_line_is_wider_than_the_terminal_and_no_label_is_cut(runs, width):
    text = table(runs, width=width)
    assert max(len(line) for line in text.splitlines()) <= width
    words = set(text.split())
    for label in runs["recipe_label"].unique():
        assert label == "bf16" or set(label.split()) <= words


def test_the_front_comes_first_and_is_marked(runs):
    lines = table(runs).splitlines()
    summary = summarize(runs)
    marked = [i for i, line in enumerate(lines) if line.startswith("★ ")]
    first = next(i for i, line in enumerate(lines) if "recipe" in line) + 1
    assert len(marked) == summary["on_front"].sum() > 1
    assert marked[0] == first


def test_it_states_the_baseline_the_noise_floor_and_what_diverged(runs):
    text = table(runs)
    noise = noise_floor(runs)["noise_floor"].iloc[0]
    assert f"noise floor {100 * np.expm1(noise):.2g} %" in text
    assert re.search(r"diverged +1 of 3 seeds", text)
    assert "6 recipes" in text
    assert "1 diverged" in text
    assert "accuracy ↑ 0.9000" in text


@pytest.mark.parametrize(("better", "title"), [("lower", "fid ↓"), ("higher", "fid ↑"), (None, "fid")])
def test_the_metric_stands_with_the_way_that_is_better(row, better, title):
    shared = {"metric_name": "fid", "metric_better": better}
    runs = pd.DataFrame([row(name, 0, value, **shared) for name, value in (("bf16", 0.5), ("nvfp4", 0.6))])
    assert metric_title(summarize(runs)) == metric_title(noise_floor(runs)) == title
    assert f"{title} 0.9000" in table(runs)


def test_without_a_metric_the_loss_stands_there_and_lower_is_better(row):
    runs = pd.DataFrame([row("nvfp4", 0, 0.6, val_metric=None, metric_name=None, metric_better=None)])
    assert metric_title(runs) is None
    assert "val loss ↓" in table(runs)


def test_there_is_no_colour_code_in_it(runs):
    assert "\x1b" not in table(runs)


def test_the_limit_never_hides_the_front(runs):
    front = summarize(runs)["on_front"].sum()
    text = table(runs, limit=1)
    assert text.count("★  ") == front
    assert f"… and {6 - front} more" in text
    assert "more" not in table(runs, limit=None)


def test_recipes_that_trained_to_the_same_bits_share_a_line(row):
    scaled = msgspec.structs.replace(Recipe.named("nvfp4"), training=Training(loss_scale=1024.0))
    losses = {Recipe.named("bf16"): 0.5, Recipe.named("nvfp4"): 0.6, scaled: 0.6}
    rows = [row(recipe, seed, loss + seed / 10) for recipe, loss in losses.items() for seed in range(2)]
    lost = msgspec.structs.replace(Recipe.named("mxfp4"), training=Training(loss_scale=1024.0))
    rows += [row(name, seed, None) for name in ("mxfp4", lost) for seed in range(2)]
    text = table(pd.DataFrame(rows), width=200)
    assert "nvfp4 (the same bits: …, loss scale 1024)" in text
    assert text.count("★  ") == 1
    assert text.count("2 of 2 seeds") == 2
    assert "4 recipes (2 share lines): 2 on the front" in text
    rows[2]["val_loss"] *= 1 + 1e-15
    assert "the same bits" not in table(pd.DataFrame(rows))


def test_one_seed_and_no_metric_are_said_as_they_are(row):
    runs = pd.DataFrame([row(n, 0, v, val_metric=None, metric_name=None) for n, v in (("bf16", 0.5), ("nvfp4", 0.6))])
    text = table(runs)
    assert "+20.0 %         1 seed" in text
    assert "val loss" in text
    assert "0.6000" in text
    assert "noise floor unknown" in text
    assert "expected" not in pareto_table(summarize(runs), noise_floor(runs), verdicts=verdicts(runs))


def test_recipes_whose_price_is_an_assumption_are_named(row):
    runs = pd.DataFrame([row(n, 0, v) for n, v in (("bf16", 0.5), ("nvfp4", 0.7), ("ue5m3-sr", 0.6))])
    summary = summarize(runs)
    (line,) = price_remarks(runs, summary)
    says = "of its front, priced as if gb200 had what it lacks: ue5m3-sr (`fp4dse cost RECIPE` says what)"
    assert line == f"vision (quickstart): {says}"
    assert line in pareto_table(summary, noise_floor(runs), remarks=[line], width=140)
    native = runs[runs["recipe_name"].ne("ue5m3-sr")]
    assert price_remarks(native, summarize(native)) == []


def test_an_assumed_price_is_said_of_the_task_on_whose_front_the_recipe_is(row):
    losses = {"bf16": 0.5, "nvfp4": 0.7, "ue5m3-sr": 0.6}
    rows = [row(n, 0, v, task="regression") for n, v in losses.items()]
    rows += [row(n, 0, v) for n, v in {**losses, "ue5m3-sr": 0.9}.items()]
    summary = summarize(runs := pd.DataFrame(rows))
    assert not summary.loc[summary["task"].eq("vision") & summary["name"].eq("ue5m3-sr"), "on_front"].any()
    (line,) = price_remarks(runs, summary)
    assert line.startswith("regression (quickstart): of its front, priced as if gb200")


def test_under_the_table_stands_what_to_use_how_sure_and_what_it_costs(runs):
    text = pareto_table(summarize(runs), noise_floor(runs), verdicts=verdicts(runs), width=200)
    lines = text.splitlines()
    (use,) = (line for line in lines if line.startswith("Use:"))
    best = front_chance(runs).sort_values("gap").iloc[0]
    assert best["name"] in use
    assert change(best["expected"]) in use  # what new seeds would give, and no lucky mean
    assert "(3 seeds; expected on new seeds: the mean of its row, drawn towards" in use
    assert any(line.startswith("How sure: ") and "BF16" in line for line in lines)
    assert any(re.match(r"Cost: +0\.\d\d of BF16's modelled step time \(llama-8b on gb200\)\.", line) for line in lines)
    assert any(line.startswith("Beware:") and "1 of 6 recipes diverged" in line for line in lines)
    assert "with quantizers on" in text


def test_without_a_baseline_the_table_says_so(row):
    text = table(pd.DataFrame([row("nvfp4", 0, 0.6)]))
    assert "no BF16 baseline" in text
    assert "no baseline" in text


def test_settings_of_one_task_are_told_apart_by_what_differs(row):
    frame = pd.DataFrame([row(), row(device_class="cuda-h100"), row(task="regression")])
    assert sorted(setting_titles(frame).values()) == [
        "regression (quickstart)",
        "vision (quickstart), device_class cpu-2t",
        "vision (quickstart), device_class cuda-h100",
    ]


def test_records_are_what_any_json_writer_takes(store, row):
    store.add([row("bf16", 0, 0.5), row("mxfp4", 0, None), row("nvfp4", 1)], "job")
    for frame in (store.runs(curves=True), summarize(store.runs())):
        plain = records(frame)
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    runs = {line["recipe_name"]: line for line in records(store.runs(curves=True))}
    assert runs["mxfp4"]["gap"] is None
    assert runs["bf16"]["fprop_x_block"] is None
    assert runs["nvfp4"]["fprop_x_block"] == "1x16"
    assert runs["nvfp4"]["created_at"] == "2026-01-02T03:04:05+00:00"
    assert runs["nvfp4"]["curve_loss"] == row("nvfp4", 1)["curve_loss"]
