"""`fp4dse sensitivity` as a user meets it: what it says before it trains, and what it prints and writes then."""

import contextlib
import html
import io
import json
import re
from pathlib import Path

import pytest

from fp4dse.results import open_store
from fp4dse.results.report import write_report
from fp4dse.results.stats.layers.knapsack import Option
from tests.commands.running import assert_one_line, call
from tests.forked_workers import fork_workers

ASKED = ("sensitivity", "nvfp4", "--task", "vision:smoke", "--by", "kind", "--seeds", "2", "--jobs", "1")


@pytest.mark.heavy
def test_smoke_from_the_first_lane_to_the_report(tmp_path, monkeypatch, capsys):
    """Real training: every unit, a choice on fresh seeds, tables and panel; the same command trains nothing more."""
    monkeypatch.chdir(tmp_path)
    fork_workers(monkeypatch)
    assert call(*ASKED, "--budget", "100%", "--products", "all,wgrad") == 0
    out = capsys.readouterr().out
    for words in (
        "attention: wgrad",
        "sparing gains",
        "of multiply-adds",
        "spares ",
        "measured less predicted",
        "llama-8b on gb200",
    ):
        assert words in out
    assert "the choice, on fresh seeds: " in out
    [shown] = re.findall(r"its recipe: fp4dse (recipe show .*)", out)
    assert call(*shown.split()) == 0
    assert "nvfp4" in capsys.readouterr().out
    rows = open_store("runs/sensitivity-nvfp4/store").runs()
    assert rows["status"].eq("done").all()
    assert rows["stage"].isna().sum() == 2 * (1 + 1 + 8)
    monkeypatch.setattr("fp4dse.results.report.write_report", write_report)  # a whole one, once
    assert call(*ASKED, "--budget", "100%", "--products", "all,wgrad", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert len(open_store("runs/sensitivity-nvfp4/store").runs()) == len(rows)
    assert {line["unit"] for line in facts["units"]} == {"attention", "attention: wgrad", "mlp", "mlp: wgrad"}
    assert all(line["gain"] is not None and line["alone"] is not None for line in facts["units"])
    [choice] = facts["choices"]
    measured = {line["recipe"]: line for line in choice["measured"]}
    assert measured["chosen"]["seeds"] == 2
    missed = measured["chosen"]["gain"] - measured["chosen"]["predicted"]
    assert abs(measured["chosen"]["missed"] - missed) < 1e-12
    check_panel(Path("runs/sensitivity-nvfp4/report.html").read_text())


def check_panel(page: str) -> None:
    """Every number of the panel is printed by the code that stands under it."""
    text = re.search(r'(?s)<section id="layers">(.*?)</section>', page)[1]
    [command] = [html.unescape(code) for code in re.findall(r"(?s)<code>(.*?)</code>", text)]
    assert command.startswith("python -c ")
    code = command.removeprefix("python -c ").strip("'").replace("'\"'\"'", "'")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, {})
    known = [float(value) for value in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", out.getvalue())]
    values = [float(value) for value in re.findall(r'<data value="([^"]+)"', text)]
    assert len(values) > 20
    for value in values:
        assert any(abs(value - other) <= 1e-9 * max(1, abs(value)) for other in known), value


def test_a_dry_run_writes_nothing(run):
    facts = json.loads(run(*ASKED, "--dry-run", "--json").out)
    assert facts["units"] == ["attention", "mlp"]
    assert facts["to_train"] == 2 * (1 + 1 + 4)
    assert not Path("runs").exists()


def test_a_part_of_a_study_says_what_is_missing(run):
    """Stopped before anything was trained: the table has no effects, and the same command goes on."""
    answer = run(*ASKED, "--stop-after", "0.0001s", "--store", "part")
    assert answer.code == 0
    assert run(*ASKED, "--store", "part").code == 0
    assert len(open_store("part").runs()) == 2 * (1 + 1 + 4)


def test_a_budget_for_which_nothing_gains_shows_what_was_measured(run, monkeypatch):
    """The error comes after the table, which took the training."""
    monkeypatch.setattr("fp4dse.sweeps.stages.sensitivity.best_choice", lambda *_: Option(0.0, 0.0, ()))
    answer = run(*ASKED, "--store", "part", "--budget", "100%")
    assert answer.code == 2
    assert "sparing gains" in answer.out
    assert "--budget" in answer.err


def test_wrong_input_is_one_line(run):
    assert_one_line(run(*ASKED, "--budget", "5"), 2, "--budget", "5%")
    assert_one_line(run(*ASKED, "--budget", "1%"), 2, "--budget", "found '1.00%'", "or more: the cheapest unit")
    assert_one_line(run(*ASKED, "--products", "all,wgrd"), 2, "--products", "wgrad")
    assert_one_line(run("sensitivity", "bf16", "--task", "language:smoke"), 2, "one that quantizes a layer")
    assert_one_line(run(*ASKED, "--stop-after", "soon"), 2, "--stop-after")
    assert not Path("runs").exists()
