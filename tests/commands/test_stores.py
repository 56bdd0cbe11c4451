"""Stores are listed, merged, mended, retired and measured from the command line."""

import json
from pathlib import Path

from fp4dse.results import open_store


def test_where_there_is_no_store_the_list_says_so(run):
    assert "no store under runs/" in run("store", "list").out


def test_the_stores_here_are_listed_the_latest_first(run, finished):
    run("store", "merge", "runs/merged/store", "runs/few/store")
    Path("runs/other/store").mkdir(parents=True)
    found = json.loads(run("store", "list", "--json").out)
    assert {line["store"]: line["rows"] for line in found} == {"runs/few/store": 10, "runs/merged/store": 10}
    assert found == sorted(found, key=lambda line: line["age_s"])
    few = next(line for line in found if line["sweep"] == "few")
    assert few["state"] == "finished"
    assert few["tasks"] == ["regression:quickstart"]
    assert few["bytes"] > 0
    assert "runs/few/store" in run("store", "list").out
    Path("runs/few/store/store.json").write_text("{")
    found = {line["store"]: line for line in json.loads(run("store", "list", "--json").out)}
    assert "store.json" in found["runs/few/store"]["unreadable"]
    assert found["runs/merged/store"]["rows"] == 10


def test_stores_are_merged_counted_and_retired(run, finished):
    merged = run("store", "merge", "all", "runs/few/store")
    assert merged.out == "10 rows from runs/few/store into all, which has 10 now\n"
    assert run("store", "merge", "all", "runs/few/store").out.startswith("0 rows from runs/few/store into all")
    assert "INTO, the first, grows" in run("store", "merge", "--help").out
    assert json.loads(run("store", "info", "--store", "all", "--json").out)["done"] == 10
    assert run("store", "invalidate", "quantizers", "99", "--store", "all").code == 0
    assert json.loads(run("store", "info", "--store", "all", "--json").out)["done"] == 0


def test_mend_says_what_came_back_and_what_is_broken(run, finished):
    [part] = Path("runs/few/store/parts").iterdir()
    intact = part.read_bytes()
    part.write_bytes(intact[:-1])
    found = run("store", "mend", "--store", "runs/few/store")
    assert found.code == 1
    assert f"broken: {part.name}: its bytes are not those that its name is the digest of" in found.out
    assert json.loads(run("store", "info", "--json").out)["runs"] == 0
    (Path("runs/few/store/torn") / part.name).write_bytes(intact)
    found = run("store", "mend")
    assert (found.code, found.out.splitlines()[-1]) == (0, "1 files returned, 0 broken in torn/")
    assert json.loads(run("store", "info", "--json").out)["runs"] == 10


def test_a_store_is_measured_once_and_its_runs_say_so(run, timed, finished):
    timed(25.0)
    answer = run("store", "measure", "--json")
    data = json.loads(answer.out)
    assert answer.code == 0
    assert data["measured_of"].startswith("mlp on ")
    assert sorted(line["measured"] for line in data["recipes"]) == [1.0, 2.5, 2.5, 2.5, 2.5]
    assert open_store("runs/few/store").runs().query("not is_baseline")["measured"].tolist() == [2.5] * 8
    assert run("store", "measure").out.startswith("0 recipes timed: mlp on ")


def test_times_that_are_not_steady_are_not_stored_and_end_in_exit_code_1(run, timed, finished):
    timed(25.0, steady=False)
    answer = run("store", "measure")
    assert answer.code == 1
    assert answer.out.startswith("1 recipe timed")  # BF16 is 1 by definition
    assert "4 recipes had no steady time" in answer.err
    timed(30.0)
    assert run("store", "measure").out.startswith("4 recipes timed")
