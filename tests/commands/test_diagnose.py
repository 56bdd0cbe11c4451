"""The command says why a recipe loses: table, sentence, page, JSON."""

import json
from pathlib import Path

import pytest

from tests.commands.running import assert_one_line

SMOKE = ("--task", "regression:smoke", "--passes", "16")


def test_it_prints_tables_and_a_sentence_and_writes_a_page(run):
    answer = run("diagnose", "nvfp4-sr", *SMOKE, "--at", "0.5,1")
    assert (answer.code, answer.err) == (0, "")
    lines = answer.out.splitlines()
    assert lines[-2].startswith("Main cause: bias of the forward pass, ")
    assert lines[-1] == "page: runs/diagnosis/nvfp4-sr-regression-smoke.html"
    assert "Main cause" in Path("runs/diagnosis/nvfp4-sr-regression-smoke.html").read_text()
    assert "Operands at step 40, worst first (8 of 10; the page has all):" in lines
    assert any(line.split()[:2] == ["passes", "step"] for line in lines)


def test_as_json_it_has_every_number_and_writes_no_page(run):
    answer = run("diagnose", "nvfp4-sr", *SMOKE, "--at", "0.5", "--json")
    found = json.loads(answer.out)
    assert found["sentence"].startswith("Main cause")
    assert found["causes"][0]["cause"] == "bias of the forward pass"
    assert [moment["step"] for moment in found["moments"]] == [20]
    assert len(found["moments"][0]["backward"]["whole"]["curve"]) == 5
    assert not Path("runs").exists()


def test_a_recipe_may_be_a_file_and_the_page_may_be_elsewhere(run):
    recipe = run("recipe", "show", "nvfp4").out
    Path("mine.toml").write_text(recipe)
    assert run("diagnose", "mine.toml", *SMOKE, "--at", "1", "--out", "why.html", "--lr", "0.001").code == 0
    assert "learning rate: 0.001, BF16 0.002" in Path("why.html").read_text()


def test_a_lane_that_diverges_is_an_answer(run):
    answer = run("diagnose", "nvfp4", *SMOKE, "--lr", "1e30")
    assert answer.code == 0
    assert "The lane diverged at step " in answer.out


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--passes", "24"], ["passes", "24", "power of two"]),
        (["--at", "0.5,2"], ["at", "2.0", "up to 1"]),
        (["--at", "half"], ["--at", "half", "0.1,0.5,1"]),
        (["--lr", "-1"], ["--lr", "above 0"]),
        (["--out", "why.pdf"], ["--out", ".html"]),
        (["--task", "regression:none"], ["none", "smoke"]),
    ],
)
def test_wrong_input_is_one_line(run, more, words):
    assert_one_line(run("diagnose", "nvfp4", *SMOKE, *more), 2, *words)


def test_bf16_loses_nothing_to_quantizers(run):
    assert_one_line(run("diagnose", "bf16", *SMOKE), 2, "bf16", "one that quantizes")
