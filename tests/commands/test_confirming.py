"""Confirming as a user meets it: what it says before it trains, and what it prints and writes then."""

import json
from pathlib import Path

from fp4dse.results import open_store
from fp4dse.sweeps.planning.estimate import Pace
from tests.commands.running import assert_one_line, swept


def test_confirm_says_what_it_takes_then_leads_with_fresh_seeds(run, finished, monkeypatch):
    written = []  # the fresh lanes that a report knows of
    report = "fp4dse.results.report.write_report"
    monkeypatch.setattr(report, lambda store, *_, **__: written.append(store.runs(["stage"])["stage"].notna().sum()))
    planned = json.loads(run("confirm", "--seeds", "4", "--dry-run", "--json").out)
    assert planned["to_train"] == 4 * (sum(planned["candidates"].values()) + 1)
    assert open_store("runs/few/store").runs(["stage"])["stage"].isna().all()
    answer = run("confirm", "--seeds", "4")
    assert answer.code == 0
    assert answer.out.startswith("candidates: ")
    assert f"{planned['to_train']} lanes to train" in answer.out
    assert "confirmed on 4 fresh seeds" in " ".join(answer.out.split())
    assert "Screened: " in answer.out
    assert written == [planned["to_train"]]
    lines = json.loads(run("query", "confirmed", "--format", "json").out)
    assert sum(line["recommended"] for line in lines) == 1
    assert json.loads(run("confirm", "--seeds", "4", "--json").out)["done"] == 0


def test_a_sweep_confirms_at_its_end_if_asked(run):
    answer = swept(run, "--confirm", "--confirm-seeds", "4")
    assert answer.code == 0
    assert "10 lanes in" in answer.out
    assert "confirming: " in answer.out
    assert "confirmed on 4 fresh seeds" in " ".join(answer.out.split())
    assert set(open_store("runs/few/store").runs()["seed"]) == {0, 1, 100, 101, 102, 103}


def test_a_dry_run_says_how_many_candidates_there_can_be_and_then_how_many_there_are(run, monkeypatch):
    monkeypatch.setattr("fp4dse.sweeps.planning.estimate.calibrate", lambda *_: Pace(1.0, 1.0, 0.0, 0.0, "here"))
    asked = ("--confirm", "--confirm-seeds", "4", "--dry-run", "--json")
    before = json.loads(swept(run, *asked).out)["to_confirm"]
    assert "at most 4 of regression:quickstart" in before
    assert "4 fresh seeds each, and BF16: at most 20 lanes to train; --estimate says how long" in before
    assert not Path("runs").exists()
    timed = json.loads(swept(run, *asked, "--estimate", "--lr", "1e-3,2e-3").out)["to_confirm"]
    assert "at most 20 lanes to train, about " in timed  # a candidate stands at one learning rate
    assert "to_confirm" not in json.loads(swept(run, "--dry-run", "--json").out)
    assert swept(run).code == 0
    after = json.loads(swept(run, *asked).out)["to_confirm"]
    assert after == run("confirm", "--seeds", "4", "--dry-run").out.strip()
    more = ("sweep", "few.toml", "--task", "regression:quickstart", "--seeds", "2")
    bound = json.loads(run(*more, "--axis", "*.g.rounding=nearest,stochastic", *asked).out)["to_confirm"]
    assert "at most 8 of regression:quickstart" in bound
    other = ("sweep", "nvfp4", "--axis", "wgrad.g.rounding=stochastic", "--store", "runs/few/store", *more[2:])
    assert "at most 5 of regression:quickstart" in json.loads(run(*other, *asked).out)["to_confirm"]


def test_wrong_input_is_answered_in_one_line(run, finished):
    assert_one_line(run("confirm", "--seeds", "3"), 2, "--seeds: found 3", "4 or more")
    assert_one_line(run("confirm", "--task", "vision:smoke"), 2, "regression:quickstart")
    assert_one_line(run("confirm", "--data", "x.csv"), 2, "--data", "--task")
    assert_one_line(run("confirm", "--budget", "soon"), 2, "--budget")
