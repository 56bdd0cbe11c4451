"""What people type becomes values, or one line that says what would be accepted."""

import os
import re

import pandas as pd
import pytest

from fp4dse.dse import QUANTIZERS, ConfigError, Recipe, Space, recipe_to_toml
from fp4dse.results import open_store
from fp4dse.sweeps.arguments import (
    find_recipe,
    find_space,
    find_stored,
    parse_axes,
    parse_duration,
    parse_halving,
    parse_lrs,
    parse_seeds,
    parse_tasks,
    shipped_spaces,
)
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.sweeps.stores import default_store, latest_store, report_path
from tests.sweeps.made import row

COUNTED = [("3", [0, 1, 2]), ("0,1", [0, 1]), ("7, 4", [7, 4])]
RANGED = [("7-7", [7]), ("40-43", [40, 41, 42, 43]), ("9, 2-4,0", [9, 2, 3, 4, 0])]


@pytest.mark.parametrize(("text", "seeds"), COUNTED + RANGED)
def test_seeds_are_a_count_or_a_list(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("1.5h", 5400)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "m", "-5s", "1d", "30m later"])
def test_wrong_durations_are_refused(text):
    with pytest.raises(ConfigError, match="1h30m"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1,", "1.5", "0,0,1", "5-4", "1-", "-", "0-3,2", "0-999999999"])
def test_wrong_seeds_are_refused(text):
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(text)


def test_learning_rates_are_collected_from_lists_and_repetitions():
    assert parse_lrs(["1e-3,3e-3", "0.01"]) == [1e-3, 3e-3, 1e-2]
    assert parse_lrs([]) is None


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "nan", "inf", "1e-3,0.001"])
def test_wrong_learning_rates_are_refused(text):
    with pytest.raises(ConfigError, match="--lr"):
        parse_lrs([text])


def test_a_task_carries_its_preset_or_takes_the_common_one():
    assert parse_tasks(["vision", "regression:smoke"]) == [("vision", "small"), ("regression", "smoke")]
    assert parse_tasks(["vision"], "paper") == [("vision", "paper")]
    assert parse_tasks(["vision", "language:tiny"], "smoke") == [("vision", "smoke"), ("language", "tiny")]
    assert parse_tasks(["a:b/mine.py:TASK"]) == [("a:b/mine.py", "TASK")]


def test_data_goes_with_one_task():
    asked = parse_tasks(["language:smoke", "language"], data="text.txt")
    assert asked == [("language", "smoke", "text.txt"), ("language", "small", "text.txt")]
    with pytest.raises(ConfigError, match="accepted: data for one task"):
        parse_tasks(["language", "regression"], data="t.csv:y")


def test_every_shipped_space_loads_by_its_name():
    assert "quickstart" in shipped_spaces()
    for name in shipped_spaces():
        assert find_space(name).name == name


def test_a_recipe_of_a_store_is_found_by_name_id_label_and_file(tmp_path):
    rotated = next(Space(base="nvfp4", axes={"wgrad.rotation": ["rht16"]}).recipes())
    runs = pd.DataFrame([row(recipe, 0, 0.5) for recipe in (Recipe.named("nvfp4"), rotated)])
    (tmp_path / "mine.toml").write_text(recipe_to_toml(rotated))
    assert find_stored("nvfp4", runs) == Recipe.named("nvfp4").config_id
    for text in (rotated.config_id, "nvfp4, wgrad rht16", str(tmp_path / "mine.toml")):
        assert find_stored(text, runs) == rotated.config_id
    for text in ("mxfp4", "nvfp4, wgrad", "0" * 16):
        with pytest.raises(ConfigError, match="accepted: one that was trained here: nvfp4, a label"):
            find_stored(text, runs)


def test_a_trained_recipe_is_found_by_what_tables_call_it_and_shown_from_its_store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    axes = {"*.g.rounding": ["nearest", "stochastic"], "wgrad.rotation": ["rht16"], "training.loss_scale": [8.0]}
    recipes = list(Space(base="mxfp4", axes={"*": ["mxfp4-ceil"], **axes}).recipes())
    store = open_store(default_store("mine"), create=True)
    store.add([row(recipe, 0, 0.5) for recipe in recipes], "rows")
    (store.path / "state.json").write_text("{}")
    short = recipes[1].label().removesuffix(", wgrad rht16, loss scale 8")
    assert short != recipes[1].label()
    assert find_stored(short, store.runs()) == recipes[1].config_id
    for text in (short, recipes[1].label(), recipes[1].config_id):
        assert find_recipe(text, None) == recipes[1]
        assert find_recipe(text, str(store.path)) == recipes[1]
    assert find_recipe("nvfp4", None) == Recipe.named("nvfp4")
    with pytest.raises(ConfigError, match="or a label or config_id that runs/mine/store holds"):
        find_recipe("nvfp5", None)
    with pytest.raises(ConfigError, match=f"did you mean {recipes[1].label()!r}"):
        find_recipe(recipes[1].label().replace("rht16", "rth16"), None)


def test_where_there_is_no_store_a_label_is_answered_with_the_way_to_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="with --store FOLDER a label or config_id that the store holds"):
        find_recipe("nvfp4, wgrad rht16", None)


def test_the_latest_store_is_the_one_swept_into_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="quickstart"):
        latest_store()
    for age, name in enumerate(("new", "old")):
        store = default_store(name)
        store.mkdir(parents=True)
        (store / "state.json").write_text("{}")
        os.utime(store / "state.json", (1e9 - age, 1e9 - age))
    assert latest_store() == default_store("new")


def test_reports_of_stores_side_by_side_have_different_names(tmp_path):
    assert report_path(default_store("a")) == default_store("a").with_name("report.html")
    assert report_path(tmp_path / "s1") != report_path(tmp_path / "s2")


def test_axes_are_read_as_toml_reads_them_and_else_as_texts():
    texts = ["*.g.rounding=nearest,stochastic", "*.block = 16, 32", 'a={ like = "nvfp4", block = 32 },nvfp4', "m=true"]
    assert parse_axes(texts) == {
        "*.g.rounding": ["nearest", "stochastic"],
        "*.block": [16, 32],
        "a": [{"like": "nvfp4", "block": 32}, "nvfp4"],
        "m": [True],
    }


@pytest.mark.parametrize("texts", [["*.block"], ["=16"], ["*.block="], ["*.block=16,,32"], ["a=1", "a=2"]])
def test_wrong_axes_are_refused(texts):
    with pytest.raises(ConfigError, match="--axis: found '" + re.escape(texts[-1])):
        parse_axes(texts)


def test_a_recipe_with_axes_is_a_space_and_a_space_takes_more_of_them(tmp_path):
    axis = "*.g.rounding=nearest,stochastic"
    (tmp_path / "mine.toml").write_text(recipe_to_toml(Recipe.named("mxfp4-tiles")))
    for text, name in (("mxfp4-tiles", "mxfp4-tiles"), (str(tmp_path / "mine.toml"), "mine")):
        found = find_space(text, [axis])
        assert (found.name, found.base, list(found.axes)) == (name, Recipe.named("mxfp4-tiles"), ["*.g.rounding"])
        assert len(list(found.recipes())) == 2
    assert list(find_space("scales", [axis]).axes) == [*find_space("scales").axes, "*.g.rounding"]
    assert find_space("scales", ["*.block=64"]).axes["*.block"].values == [64]
    for text in ("nvfp4", str(tmp_path / "mine.toml")):
        with pytest.raises(ConfigError, match=r"a recipe is one with an axis: -a PATH=VALUE,VALUE"):
            find_space(text)
    with pytest.raises(ConfigError, match=r"--axis: axes.\*.g.rounding\[1\]: found 'sr'"):
        find_space("nvfp4", ["*.g.rounding=nearest,sr"])
    with pytest.raises(ConfigError, match=r"not fixed"):
        find_space("scales", ["*.tensor_scale=none,amax"])


def test_a_cache_of_a_rollout_that_is_not_named_is_refused_and_of_one_that_is_goes_on():
    """It was left out without a word: a cache in FP8 seemed to cost nothing."""
    forward, cache = "forward=mxfp4-rceil", "training.rollout.kv_cache=fp8-row"
    for axes in ([forward, cache], [cache], [cache, "training.rollout=mxfp4-rceil"]):
        with pytest.raises(ConfigError) as caught:
            find_space("bf16", axes)
        assert str(caught.value).startswith("--axis: axes.training.rollout.kv_cache: found ['fp8-row']; accepted: ")
        assert 'set the part as a whole first, as training.rollout = "mxfp4"' in str(caught.value)
    [recipe] = find_space("bf16", [forward, "training.rollout=mxfp4-rceil", cache]).recipes()
    assert recipe.label() == "bf16, forward mxfp4-rceil, rollout mxfp4-rceil, KV fp8-row"
    of_rl = list(find_space("rl", [cache]).recipes())
    assert {recipe.training.rollout.kv_cache for recipe in of_rl} == {QUANTIZERS["fp8-row"].canonical()}


def test_a_preset_that_no_task_takes_is_refused():
    with pytest.raises(ConfigError, match="--preset: found 'paper'; accepted: nothing where"):
        parse_tasks(["vision:small", "mine.py:TASK"], "paper")


def test_rungs_and_what_they_keep():
    assert parse_halving(0, None) is None
    assert parse_halving(2, None) == Halving(2, 0.5)
    assert parse_halving(2, 0.7) == Halving(2, 0.7)
    with pytest.raises(ConfigError, match=r"--keep: found 0\.7; accepted: nothing without --rungs"):
        parse_halving(0, 0.7)
    with pytest.raises(ConfigError, match="--rungs: found -1; accepted: 0"):
        parse_halving(-1, None)
