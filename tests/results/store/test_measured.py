"""What recipes took on a device stands beside the rows and is a column of runs, in pandas and in SQL."""

import math

import pytest

from fp4dse.dse import ConfigError, Recipe, StoreError
from fp4dse.results import front_chance, open_store, records, summarize
from fp4dse.results.store.measured import figures, measure, merged, series, with_figure

CPU, GPU = "Some CPU", "Some GPU"
MLP, LLAMA = f"mlp on {CPU}", f"llama-1b on {CPU}"
TIMES = {Recipe.named("nvfp4").config_id: 3.0, Recipe.named("mxfp4").config_id: 2.0}


def timed(recipe: Recipe) -> float:
    return TIMES[recipe.config_id]


@pytest.fixture
def trained(store, row):
    """Two recipes on two seeds; mxfp4 is also trained on another device."""
    losses = {"bf16": [0.5, 0.51], "nvfp4": [0.55, 0.56], "mxfp4": [0.6, 0.62]}
    store.add([row(name, seed, loss) for name, values in losses.items() for seed, loss in enumerate(values)], "cpu")
    store.add([row("mxfp4", 5, 0.6, device_name=GPU, device_class=GPU)], "gpu")
    return store


def measured(store) -> dict[tuple[str, str], float]:
    """(recipe, device) -> figure, as runs() has it."""
    runs = store.runs()
    keys = zip(runs["recipe_name"], runs["device_name"], strict=True)
    return {key: None if math.isnan(value) else value for key, value in zip(keys, runs["measured"], strict=True)}


def test_every_run_of_the_device_has_the_figure_of_its_recipe_and_other_devices_have_none(trained):
    lines = list(measure(trained, MLP, CPU, timed))
    assert [line["measured"] for line in lines] == [1.0, 3.0, 2.0]
    assert measured(trained) == {("bf16", CPU): 1.0, ("nvfp4", CPU): 3.0, ("mxfp4", CPU): 2.0, ("mxfp4", GPU): None}
    assert trained.runs(["measured_of"])["measured_of"].dropna().unique().tolist() == [MLP]


def test_sql_says_what_pandas_says(trained):
    list(measure(trained, MLP, CPU, timed))
    asked = trained.sql("SELECT run_id, measured, measured_of FROM runs ORDER BY run_id")
    runs = trained.runs()[["run_id", "measured", "measured_of"]].sort_values("run_id")
    assert records(asked) == records(runs)
    assert trained.sql("SELECT * FROM runs")["measured"].count() == 6


def test_what_was_measured_serves_as_overhead(trained):
    list(measure(trained, MLP, CPU, timed))
    front = trained.pareto("measured")
    assert dict(zip(front["name"], front["measured"], strict=True)) == {"nvfp4": 3.0, "mxfp4": 2.0}
    runs = trained.runs()
    runs = runs[runs["device_name"].eq(CPU)]
    assert front_chance(runs, "measured")["measured"].tolist() == [2.0, 3.0]


def test_a_recipe_without_a_figure_competes_nowhere_on_that_axis(trained):
    trained.add_measured(MLP, CPU, Recipe.named("mxfp4").config_id, 2.0)
    lines = summarize(trained.runs(), "measured")
    assert dict(zip(lines["name"], lines["note"], strict=True))["nvfp4"] == "no measured"
    assert lines.query("on_front")["name"].tolist() == ["mxfp4"]


def test_a_store_in_which_nothing_was_measured_reads_with_nulls(trained):
    assert set(measured(trained).values()) == {None}
    assert trained.runs()["measured_of"].isna().all()
    assert trained.sql("SELECT count(measured) n FROM runs")["n"].tolist() == [0]
    assert trained.pareto("measured").empty


def test_what_is_known_is_not_timed_again_and_new_lanes_have_it_too(trained, row):
    list(measure(trained, MLP, CPU, timed))
    trained.add([row("nvfp4", 2, 0.57)], "more")
    assert list(measure(trained, MLP, CPU, timed)) == []
    assert (trained.runs().query("recipe_name == 'nvfp4'")["measured"] == 3.0).all()


def test_figures_of_two_models_never_stand_beside_each_other(trained):
    list(measure(trained, MLP, CPU, timed))
    next(measure(trained, LLAMA, CPU, timed))
    assert measured(trained)["bf16", CPU] == 1.0
    assert measured(trained)["nvfp4", CPU] is None  # until it is timed with the new model as well
    assert trained.measured()[MLP]["overheads"] == {**TIMES, Recipe.named("bf16").config_id: 1.0}


def test_figures_of_two_devices_are_not_one_axis(trained):
    list(measure(trained, MLP, CPU, timed))
    list(measure(trained, f"mlp on {GPU}", GPU, lambda _: 9.0))
    assert measured(trained)["mxfp4", GPU] == 9.0
    with pytest.raises(ConfigError, match="of one model on one device; these rows have: mlp on Some CPU; mlp on"):
        trained.pareto("measured")
    runs = trained.runs()
    assert summarize(runs[runs["device_name"].eq(GPU)], "measured")["measured"].tolist() == [9.0]


def test_a_time_that_is_not_steady_is_said_and_not_stored(trained):
    lines = list(measure(trained, MLP, CPU, lambda _: math.nan))
    assert [math.isnan(line["measured"]) for line in lines] == [False, True, True]
    assert len(list(measure(trained, MLP, CPU, timed))) == 2


def test_a_device_that_trained_nothing_is_refused(trained):
    with pytest.raises(ConfigError, match=r"--device: found 'Other'; accepted: .*\(Some CPU, Some GPU\)"):
        next(measure(trained, "mlp on Other", "Other", timed))


def test_nobody_writes_while_it_is_measured(trained):
    found = measure(trained, MLP, CPU, timed)
    next(found)
    with pytest.raises(StoreError, match="another"), open_store(trained.path).lock():
        pass
    found.close()
    with open_store(trained.path).lock():
        pass


def test_a_merged_store_has_the_figures_of_both_and_its_own_win(trained, tmp_path):
    list(measure(trained, MLP, CPU, timed))
    other = open_store(tmp_path / "other", create=True)
    other.merge(trained)
    assert measured(other) == measured(trained)
    assert merged(
        {"a": {"device_name": CPU, "overheads": {"x": 1.0}}},
        {
            "a": {"device_name": CPU, "overheads": {"x": 2.0, "y": 3.0}},
            "b": {"device_name": CPU, "overheads": {"x": 4.0}},
        },
    ) == {
        "b": {"device_name": CPU, "overheads": {"x": 4.0}},
        "a": {"device_name": CPU, "overheads": {"x": 1.0, "y": 3.0}},
    }


def test_the_newest_series_of_a_device_counts():
    known = with_figure(with_figure(with_figure({}, "a", CPU, "x", 1.0), "b", CPU, "x", 2.0), "c", GPU, "x", 3.0)
    assert figures(known)["measured"].tolist() == [2.0, 3.0]
    again = with_figure(known, "a", CPU, "y", 5.0)
    assert sorted(figures(again)["measured"]) == [1.0, 3.0, 5.0]


def test_a_series_names_model_device_and_software():
    cpu = {"device": "cpu", "device_name": CPU, "threads": 1, "software_class": "torch 2.13"}
    assert series("mlp", cpu) == "mlp on Some CPU, 1 thread, torch 2.13"
    assert series("mlp", {**cpu, "device": "cuda", "device_name": GPU}) == "mlp on Some GPU, torch 2.13"
