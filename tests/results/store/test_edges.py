"""Stores that are empty, small, spoiled or of another version: a sensible answer or an error, never a wrong front."""

import json
import re

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp4dse.dse import StoreError
from fp4dse.results import compare, noise_floor, open_store, pareto_table, summarize
from fp4dse.results.bench.generated import generated
from fp4dse.results.stats.paired import OVERHEAD
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.store.schema import SCHEMA_VERSION
from fp4dse.results.views import VIEWS, VIEWS_READ


def every_view(store) -> dict[str, pd.DataFrame]:
    runs = store.runs(VIEWS_READ)
    return {name: function(runs) for name, function in VIEWS.items()}


def add(store, row, **losses) -> None:
    """add(store, row, bf16=[losses by seed], nvfp4=[…]); None diverges."""
    rows = [
        row(name.replace("_", "-"), seed, loss) for name, values in losses.items() for seed, loss in enumerate(values)
    ]
    store.add(rows, "job")


def test_an_empty_store_has_empty_views(store):
    assert all(view.empty for view in every_view(store).values())
    assert store.pareto().empty
    assert pareto_table(summarize(store.runs()), noise_floor(store.runs())) == ""


def test_one_recipe_is_its_own_front_and_has_no_effects(store, row):
    add(store, row, bf16=[0.50, 0.51, 0.52], nvfp4=[0.60, 0.62, 0.61])
    views = every_view(store)
    assert views["front"]["name"].tolist() == ["nvfp4"]
    assert views["front"]["p_front"].tolist() == [1.0]
    assert views["hypervolume"]["low"].item() < views["hypervolume"]["hypervolume"].item()
    assert views["effects"].empty
    assert views["marginal"].empty
    assert views["matched"]["rivals"].tolist() == [0]
    assert views["versus_best"]["label"].tolist() == ["bf16"]


def test_one_seed_has_a_front_without_a_chance_and_differences_without_intervals(store, row):
    add(store, row, bf16=[0.5], nvfp4=[0.6], mxfp4=[0.7], nvfp4_sr=[0.55])
    views = every_view(store)
    assert views["front"]["on_front"].all()
    assert views["front"]["p_front"].isna().all()
    assert views["recipes"]["gap_low"].isna().all()
    assert np.isnan(views["hypervolume"]["low"].item())
    assert set(views["versus_best"]["verdict"]) == {"open"}
    assert views["versus_best"]["more_seeds"].isna().all()


def test_where_all_diverged_there_is_no_front_and_every_recipe_says_so(store, row):
    add(store, row, bf16=[0.5, 0.5], nvfp4=[None, None], mxfp4=[None, 0.5])
    views = every_view(store)
    assert views["front"].empty
    assert views["hypervolume"].empty
    assert set(views["recipes"].query("not is_baseline")["note"]) == {"diverged"}
    text = pareto_table(views["recipes"], noise_floor(store.runs()), verdicts=verdicts(store.runs()))
    assert re.search("diverged +2 of 2 seeds", text)
    assert "every recipe diverged (2 of 2)" in text
    assert "★" not in text
    assert views["effects"]["effect"].isna().all()
    assert views["matched"].empty


def test_where_no_baseline_finished_the_table_says_so_and_marks_no_front(store, row):
    add(store, row, nvfp4=[0.6, 0.6], mxfp4=[0.7, 0.7])
    runs = store.runs()
    text = pareto_table(summarize(runs), noise_floor(runs), verdicts=verdicts(runs))
    assert "nothing of this: no BF16 baseline finished, so no recipe has a gap." in text
    assert "★" not in text


def test_where_bf16_itself_diverged_there_are_no_gaps(store, row):
    add(store, row, bf16=[None, None], nvfp4=[0.5, 0.5])
    views = every_view(store)
    assert views["front"].empty
    assert views["recipes"].set_index("name")["note"].to_dict() == {"bf16": "diverged", "nvfp4": "no baseline"}


def test_without_bf16_there_is_no_front_but_recipes_are_still_compared(store, row):
    add(store, row, nvfp4=[0.50, 0.51, 0.52], mxfp4=[0.60, 0.61, 0.625])
    views = every_view(store)
    assert views["front"].empty
    assert set(views["recipes"]["note"]) == {"no baseline"}
    assert views["versus_best"]["verdict"].tolist() == ["higher"]
    ids = store.runs(["config_id"])["config_id"].unique()
    assert compare(store.runs(), *ids)["p"].item() < 0.05


def test_a_seed_without_its_bf16_lane_is_left_out_of_the_gap(store, row):
    add(store, row, bf16=[0.5, 0.5], nvfp4=[0.6, 0.6, 60.0])
    found = every_view(store)["front"]
    assert found["pairs"].tolist() == [2]
    assert found["gap"].item() == pytest.approx(np.log(1.2))


def test_a_recipe_that_failed_on_a_machine_is_on_no_front(store, row):
    add(store, row, bf16=[0.5, 0.5], nvfp4=[0.6, 0.6])
    store.add([row("mxfp4", seed, status="failed", val_loss=None) for seed in range(2)], "failed")
    views = every_view(store)
    assert views["front"]["name"].tolist() == ["nvfp4"]
    assert views["recipes"].set_index("name")["note"]["mxfp4"] == "failed"


def test_a_recipe_that_was_dropped_on_a_seed_has_no_gap_because_only_lucky_seeds_are_left():
    runs = generated(("*.g.rounding", "wgrad.rotation", "*.scale"), truth=lambda codes: 0.2 + 0 * codes["*.scale"])
    lucky = runs["recipe_label"].eq("recipe 4")
    runs.loc[lucky, "val_loss"] = [0.1, 0.1, 0.9]  # by far the best, were the last one not to count
    runs.loc[lucky & runs["seed"].eq(2), "status"] = "pruned"
    views = {name: function(runs) for name, function in VIEWS.items()}
    line = views["recipes"].set_index("label").loc["recipe 4"]
    assert (line["note"], line["pruned"], line["on_front"]) == ("pruned", 1, False)
    assert np.isnan(line["gap"])
    for name in ("front", "matched"):
        assert "recipe 4" not in set(views[name]["label"])
    assert set(views["versus_best"]["reference"]) != {f"{4:016x}"}
    assert views["effects"].query("kind == 'main'")["effect"].abs().max() < 0.1


def test_a_learning_rate_at_which_no_seed_was_dropped_is_preferred(row):
    frame = pd.DataFrame([row("bf16", s, 0.5) for s in (0, 1)] + [row("nvfp4", s, 0.6) for s in (0, 1)])
    dropped = frame[frame["recipe_name"].eq("nvfp4")].assign(lr=2e-3, val_loss=[0.1, 0.9], status=["done", "pruned"])
    found = summarize(pd.concat([frame, dropped], ignore_index=True)).set_index("name")
    assert (found["lr"]["nvfp4"], found["note"]["nvfp4"]) == (1e-3, "")


def test_rows_of_several_schema_versions_are_one_table(store, row):
    add(store, row, bf16=[0.5, 0.5], nvfp4=[0.6, 0.61])
    old = pa.ipc.open_file(pa.py_buffer(next((store.path / "inbox").glob("*")).read_bytes())).read_all()
    old = old.drop_columns(["points", "wgrad_rotation"])
    other = open_store(store.path.parent / "mixed", create=True)
    with other.lock():
        pq.write_table(old, other.path / "parts" / "0.parquet")
    (other.path / "store.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION - 1}))
    add(other, row, mxfp4=[0.7, 0.72])
    found = summarize(other.runs())
    assert found.set_index("name")["on_front"].to_dict() == {"bf16": False, "mxfp4": True, "nvfp4": False}
    assert found.set_index("name")["note"].to_dict() == {"bf16": "", "mxfp4": "", "nvfp4": f"no {OVERHEAD}"}
    assert found.set_index("name")["gap"]["nvfp4"] == pytest.approx(np.log([0.6, 0.61]).mean() - np.log(0.5))
    assert [len(view) for view in every_view(other).values()]
    assert other.sql("SELECT count(*) n FROM recipes")["n"].item() == 3


def test_a_store_of_a_newer_version_is_refused_before_anything_is_read(store, row):
    add(store, row, bf16=[0.5], nvfp4=[0.6])
    (store.path / "store.json").write_text(json.dumps({"schema_version": SCHEMA_VERSION + 1}))
    with pytest.raises(StoreError, match=f"has schema {SCHEMA_VERSION + 1}, this program reads up to {SCHEMA_VERSION}"):
        open_store(store.path)


def test_settings_that_cannot_be_compared_have_fronts_of_their_own(store, row):
    for device in ("cpu-2t", "cuda-h100"):
        store.add([row("bf16", 0, 0.5, device_class=device), row("nvfp4", 0, 0.6, device_class=device)], device)
    store.add([row("mxfp4", 0, 0.55, device_class="cuda-h100")], "one more")
    found = every_view(store)["front"]
    assert found.groupby("device_class")["name"].agg(list).to_dict() == {"cpu-2t": ["nvfp4"], "cuda-h100": ["mxfp4"]}


def test_an_overhead_that_some_rows_lack_keeps_them_off_the_front(store, row):
    add(store, row, bf16=[0.5, 0.5], nvfp4=[0.6, 0.6], mxfp4=[0.7, 0.7])
    runs = store.runs()
    runs["overhead"] = runs["recipe_name"].map({"bf16": 1.0, "mxfp4": 0.4})
    found = summarize(runs, "overhead").set_index("name")
    assert found["on_front"].to_dict() == {"bf16": False, "mxfp4": True, "nvfp4": False}
    assert found["note"]["nvfp4"] == "no overhead"
