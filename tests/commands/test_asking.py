"""Asking a finished sweep: its state, its report, queries and comparisons."""

import csv
import io
import json
import re
from pathlib import Path

import pandas as pd

from fp4dse.dse import agreement, resolution
from fp4dse.results import compare, neighbours, open_store
from fp4dse.results.text.frames import records
from tests.commands.running import assert_one_line


def test_status_shows_the_latest_sweep(run, finished):
    assert "10/10 lanes; finished" in run("status").out
    state = json.loads(run("status", "--json").out)
    assert (state["done"], state["alive"], state["ended"]) == (10, False, "finished")


def test_report_can_be_written_anywhere(run, finished, whole_report):
    assert run("report", "--out", "here.html").code == 0
    assert Path("here.html").exists()


def test_query_answers_in_every_form(run, finished):
    sql = "SELECT recipe_name, count(*) AS n FROM runs WHERE recipe_name IS NOT NULL GROUP BY 1 ORDER BY 1"
    expected = [{"recipe_name": name, "n": 2} for name in ("bf16", "mxfp4", "nvfp4")]
    assert json.loads(run("query", sql, "--format", "json").out) == expected
    lines = csv.DictReader(io.StringIO(run("query", sql, "--format", "csv").out))
    assert [{"recipe_name": line["recipe_name"], "n": int(line["n"])} for line in lines] == expected
    assert r"nvfp4 & $2$ \\" in run("query", sql, "--format", "latex").out
    run("query", sql, "--format", "parquet", "--out", "answer.parquet")
    assert pd.read_parquet("answer.parquet").to_dict("records") == expected
    assert "mxfp4" in run("query", sql).out


def test_query_takes_the_name_of_a_view(run, finished):
    lines = json.loads(run("query", "recipes", "--format", "json").out)
    assert {line["name"] for line in lines} >= {"bf16", "mxfp4", "nvfp4"}


def test_a_recipe_of_a_space_that_leaves_the_forward_pass_alone_says_so_wherever_it_is_named(run):
    Path("back.toml").write_text('base = "bf16"\n[axes]\n"backward" = ["mxfp4", "nvfp4"]\n')
    printed = run("sweep", "back.toml", "--task", "regression:quickstart", "--seeds", "2").out
    assert re.search(r"Use: +(mxfp4|nvfp4), forward bf16: the", printed)
    lines = json.loads(run("query", "front", "--format", "json").out)
    assert {line["label"] for line in lines} <= {"mxfp4, forward bf16", "nvfp4, forward bf16"}
    assert ", forward bf16" in run("query", "front").out


def test_a_view_that_the_rows_cannot_support_says_what_is_missing_and_what_would_give_it(run, finished):
    answer = run("query", "scaling", "--format", "json")
    assert json.loads(answer.out) == []
    assert answer.err.startswith("fp4dse: scaling: no row states parameters and tokens")
    assert "fp4dse sweep SPACE --task language:" in answer.err
    assert "fp4dse sweep quartet2 --task regression:quickstart" in run("query", "agreement").err
    assert not run("query", "effects").err


def test_what_a_query_writes_is_what_the_files_name_ends_in(run, finished):
    assert run("query", "SELECT 1 AS one", "--out", "x.csv").code == 0
    assert Path("x.csv").read_text() == "one\n1\n"
    run("query", "SELECT 1 AS one", "--out", "x.JSON")
    assert json.loads(Path("x.JSON").read_text()) == [{"one": 1}]
    run("query", "SELECT 1 AS one", "--out", "x.json", "--format", "csv")
    assert Path("x.json").read_text() == "one\n1\n"
    assert_one_line(run("query", "recipes", "--out", "x.txt"), 2, "--out", "x.txt", ".csv, .json, .parquet, .tex")
    assert_one_line(run("query", "recipes", "--out", "x.csv", "--format", "table"), 2, "--format", "csv")
    assert not Path("x.txt").exists()


def test_a_query_of_nothing_names_what_can_be_asked(run, finished):
    for nothing in ("", "  ", "\n"):
        assert_one_line(run("query", nothing), 2, "query", "DuckDB SQL, or a view: runs, curves, recorded, recipes")


def test_effects_as_latex_have_the_columns_for_a_paper_and_say_where_the_others_are(run, finished):
    answer = run("query", "effects", "--out", "effects.tex")
    assert r"factor & level & effect & low & high \\" in Path("effects.tex").read_text()
    assert 'of 27 columns; fp4dse query "FROM effects" has all' in answer.err
    assert "rev_quantizers" in run("query", "FROM effects", "--format", "latex").out.replace(r"\_", "_")
    assert len(json.loads(run("query", "effects", "--format", "json").out)[0]) == 27


def test_compare_takes_names_and_files_and_ids(run, finished):
    shown = run("recipe", "show", "nvfp4").out
    Path("mine.toml").write_text(shown)
    config_id = json.loads(run("recipe", "show", "nvfp4", "--json").out)["config_id"]
    answers = {run("compare", "mxfp4", b).out for b in ("nvfp4", "mine.toml", config_id)}
    assert len(answers) == 1
    assert "mxfp4" in answers.pop()
    assert_one_line(run("compare", "mxfp4", "ue5m3-sr"), 2, "recipe: found 'ue5m3-sr'", "bf16, mxfp4, nvfp4")


def test_compare_takes_one_rate_for_both(run, finished):
    [rate] = {row["lr"] for row in json.loads(run("query", "SELECT DISTINCT lr FROM runs", "--format", "json").out)}
    assert run("compare", "mxfp4", "nvfp4", "--lr", str(rate)).out == run("compare", "mxfp4", "nvfp4").out
    assert_one_line(
        run("compare", "mxfp4", "nvfp4", "--lr", "7"), 2, "--lr: found 7.0", f"a rate of the store: {rate:g}"
    )


def test_compare_prices_no_recipe_and_says_what_all_columns_would(run, finished, monkeypatch):
    runs = open_store("runs/few/store").runs(margins=True)
    pair = [runs.loc[runs["recipe_name"].eq(name), "config_id"].iloc[0] for name in ("nvfp4", "mxfp4")]

    def priced(*_):
        raise AssertionError("a recipe was priced")

    monkeypatch.setattr("fp4dse.results.store.store.prices", priced)
    for asked, whole in ((pair, compare(runs, *pair)), (pair[:1], neighbours(runs, pair[0]))):
        assert json.loads(run("compare", *asked, "--json").out) == json.loads(json.dumps(records(whole)))


def test_compare_of_one_recipe_lists_what_single_changes_do(run, finished):
    lines = json.loads(run("compare", "nvfp4", "--json").out)
    assert {(line["factor"], line["level"]) for line in lines} >= {("wgrad.rotation", "rht16")}
    assert "wgrad.rotation" in run("compare", "nvfp4").out
    assert_one_line(run("compare", "ue5m3-sr"), 2, "recipe: found")


def test_answers_warn_of_presets_that_do_not_resolve_or_order_recipes_otherwise(run, finished, monkeypatch):
    """In the words of verdicts, with the name of the task, since answers are of several, and without sending the reader
    to another; and of those alone that the file asks."""
    task, digest = ("regression", "quickstart"), open_store("runs/few/store").runs()["dataset_digest"].iloc[0]
    noisy = resolution.Resolved(":".join(task), digest, 1, ratio=4.1, tells_apart=True, least=0.0057)
    monkeypatch.setattr(resolution, "resolved", lambda: [noisy])
    Path("mine.toml").write_text(
        'screen = "regression:quickstart"\n[[question]]\nid = "Q1"\nasks = "E4M3?"\nclaim = "helps"\n'
        "[[question.effect]]\n"
        'name = "NVFP4 for MXFP4"\nfrom = { "recipe" = "mxfp4" }\nto = { "recipe" = "nvfp4" }\n'
    )
    says = [resolution.warning(*task, digest, 1, [noisy]), agreement.other_order(*task, digest)]
    assert "mostly finds differences in loss of 0.57 %" in says[0]
    assert agreement.warning(*task, digest).startswith(f"{says[1]}; before you use a recipe, ask --task ")
    found = json.loads(run("answer", "mine.toml", "--json").out)
    assert found["warnings"] == [{"task": "regression:quickstart", "warning": text} for text in says]
    printed = " ".join(run("answer", "mine.toml").out.split())
    assert all(f"Beware: regression:quickstart: {text}." in printed for text in says)
    text = Path("mine.toml").read_text().replace('screen = "regression:quickstart"', 'screen = "language:0.4M"')
    Path("mine.toml").write_text(text)
    elsewhere = json.loads(run("answer", "mine.toml", "--json").out)
    assert {line["task"] for line in elsewhere["effects"]} == {"regression"}
    assert elsewhere["warnings"] == []
