"""Sweeps and searches as a user meets them: what they print, what they write, and how they fail."""

import json
from pathlib import Path

from fp4dse import cli
from fp4dse.results import open_store
from tests.commands.running import FEW, assert_one_line, swept, worker_mode


def test_a_sweep_prints_the_front_and_writes_store_and_report_under_runs(run, whole_report):
    answer = swept(run)
    assert answer.code == 0
    assert "regression (quickstart)" in answer.out
    assert "nvfp4" in answer.out
    assert "10 lanes" in answer.out
    assert len(open_store("runs/few/store").done()) == 10
    assert "<html" in Path("runs/few/report.html").read_text()[:200].lower()


def test_overheads_are_of_the_model_and_chip_that_were_asked_for_and_the_output_says_which(run):
    asked = ("--model", "llama-8b", "--chip", "gb300")
    costs = {name: json.loads(run("cost", name, *asked, "--json").out)["overhead"] for name in ("mxfp4", "nvfp4")}
    swept_so = swept(run, *asked, "--json")
    data = json.loads(swept_so.out)
    assert data["overhead_of"].startswith("llama-8b on gb300, revision ")
    assert {recipe["name"]: recipe["overhead"] for recipe in data["recipes"] if recipe["name"] in costs} == costs
    lines = json.loads(run("query", "recipes", *asked, "--format", "json").out)
    assert {line["name"]: line["overhead"] for line in lines if line["name"] in costs} == costs
    assert "of llama-8b on gb300, BF16 = 1 (--model, --chip)" in run("query", "recipes", *asked).out
    assert "of llama-8b on gb200, BF16 = 1 (--model, --chip)" in run("query", "recipes").out
    assert "llama-8b on gb300" in Path("runs/few/report.html").read_text()
    assert "of llama-8b on gb200, BF16 = 1 (--model, --chip)" in swept(run).out
    assert "llama-8b on gb200" in Path("runs/few/report.html").read_text()
    assert run("report", *asked).code == 0
    assert "llama-8b on gb300" in Path("runs/few/report.html").read_text()
    listed = {line["name"]: line["overhead"] for line in json.loads(run("recipe", "list", *asked, "--json").out)}
    assert {name: listed[name] for name in costs} == {name: round(cost, 3) for name, cost in costs.items()}


def test_a_space_names_the_model_and_chip_of_its_overheads_and_options_go_before(run):
    Path("there").mkdir()
    Path("there/mine.toml").write_text(FEW + '[cost]\nchip = "my_chip.toml"\nmodel = "mlp"\n')
    assert_one_line(run("space", "there/mine.toml"), 2, "there/mine.toml: cost.chip: found 'there/my_chip.toml'")
    chip = Path(cli.__file__).parent / "dse/cost/chips/h200.toml"
    Path("there/my_chip.toml").write_text(chip.read_text())
    sweep = ("sweep", "there/mine.toml", "--task", "regression:quickstart", "--seeds", "2", "--json")
    assert json.loads(run(*sweep).out)["overhead_of"].startswith("mlp on there/my_chip.toml, revision ")
    assert json.loads(run(*sweep, "--chip", "b300").out)["overhead_of"].startswith("mlp on b300, revision ")
    assert_one_line(run(*sweep, "--chip", "b30"), 2, "--chip: found 'b30'", "b300")


def test_a_search_goes_by_the_overheads_that_were_asked_for(run):
    options = ("--sampler", "tpe", "--trials", "3", "--task", "regression:smoke", "--seeds", "1", "--chip", "h200")
    facts = json.loads(run("search", "few.toml", *options, "--json").out)
    costs = {recipe["config_id"]: recipe["overhead"] for recipe in facts["recipes"]}
    [study] = facts["studies"]
    assert study["front"]
    assert all(line["overhead"] == costs[line["config_id"]] > 1 for line in study["front"])  # no FP4 unit: it emulates


def test_a_sweep_as_json_prints_nothing_else_on_standard_output(run):
    answer = swept(run, "--json")
    data = json.loads(answer.out)
    assert (data["done"], data["failed"]) == (10, 0)
    assert {recipe["name"] for recipe in data["recipes"]} >= {"bf16", "mxfp4", "nvfp4"}


def test_the_same_sweep_again_trains_nothing(run, finished):
    assert json.loads(swept(run, "--json").out)["done"] == 0


def test_a_dry_run_writes_nothing(run):
    facts = json.loads(swept(run, "--dry-run", "--json").out)
    assert (facts["lanes"], facts["to_train"]) == (10, 10)
    assert not Path("runs").exists()


def test_failed_lanes_give_exit_code_1_and_their_reason(run, monkeypatch):
    worker_mode(monkeypatch, "crash")
    answer = swept(run)
    assert answer.code == 1
    assert "the die was cast" in answer.out
    assert "failed" in run("status").out


def test_the_quickstart_sweeps_48_recipes_on_two_tasks(run):
    answer = run("quickstart")
    assert answer.code == 0
    runs = open_store("runs/quickstart/store").runs()
    assert len(runs) == 2 * 3 * (48 + 1)
    assert "vision (quickstart)" in answer.out
    assert Path("runs/quickstart/report.html").exists()


def test_a_sweep_that_is_over_is_watched_for_one_look(run, finished):
    assert "10/10 lanes; finished" in run("status", "--watch").out
    assert_one_line(run("stop"), 2, "no sweep runs here", "finished")


def test_a_dry_run_counts_the_space_too_and_may_estimate(run, finished):
    assert json.loads(swept(run, "--dry-run", "--json").out)["raw"] == 4
    for estimate in (["--estimate"], ["--dry-run", "--estimate"]):
        facts = json.loads(swept(run, *estimate, "--json").out)
        assert (facts["to_train"], facts["estimated_time"][:3]) == (0, "0s ")


def test_rungs_drop_lanes_and_a_sweep_without_them_trains_these(run):
    assert json.loads(swept(run, "--rungs", "2", "--json").out)["pruned"] > 0
    assert json.loads(swept(run, "--json").out)["done"] > 0


def test_a_search_ends_with_the_table_of_a_sweep_and_what_was_tried_of_how_much(run):
    options = ["--sampler", "tpe", "--trials", "2", "--task", "regression:smoke", "--seeds", "2"]
    out = run("search", "few.toml", *options).out
    assert "★" in out
    assert "regression:smoke: 2 of 2 trials: 2 trained" in out
    assert "report: " in out
    loss = run("search", "few.toml", *options, "--objectives", "loss,bits").out
    assert "regression:smoke: nothing is better in loss and bits than" in loss
    facts = json.loads(run("search", "few.toml", *options, "--json").out)
    assert [(study["trials"], study["stored"]) for study in facts["studies"]] == [(2, 2)]
    assert set(facts["studies"][0]["front"][0]) == {"label", "config_id", "seeds", "gap", "overhead"}
    assert facts["recipes"]
    assert_one_line(run("search", "few.toml", *options, "--sampler", "best"), 2, "--sampler", "tpe, nsga2")


def test_the_dashboards_studies_are_mirrored_without_a_server(run, finished):
    assert "few regression:quickstart" in run("dashboard", "--mirror-only").out
    assert Path("runs/few/store/dashboard.journal").exists()


def test_rungs_are_replayed_on_a_finished_sweep(run, finished):
    assert_one_line(run("rungs", "--replay", "runs/few/store"), 2, "--replay", "several recipes a population")
    Path("two.toml").write_text('axes."*.scale" = ["e4m3", "ue5m3"]')
    assert run("sweep", "two.toml", "--task", "regression:quickstart", "--seeds", "2").code == 0
    rows = json.loads(run("rungs", "--replay", "runs/two/store", "--rungs", "1", "--json").out)
    assert [row["task"] for row in rows] == ["regression"]
    assert 0 <= rows[0]["saved"] < 1
