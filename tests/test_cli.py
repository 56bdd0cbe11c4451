"""The commands as a user meets them: what they print, what they write, and how they fail."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from fp4dse import cli
from fp4dse.dse import StoreError, recipe_files
from fp4dse.results import Store, open_store
from fp4dse.sweeps import run_sweep
from fp4dse.sweeps.arguments import find_space, shipped_spaces

FAKE = (sys.executable, str(Path(__file__).with_name("sweeps") / "fake_worker.py"))
FEW = """
summary = "few"
[axes]
"*" = ["mxfp4", "nvfp4"]
"wgrad.rotation" = ["none", "rht16"]
"""


class Answer:
    """What a command printed, and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in an empty folder that holds the space few.toml; workers are fakes."""
    monkeypatch.chdir(tmp_path)
    Path("few.toml").write_text(FEW)
    worker_mode(monkeypatch, "ok")

    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main(list(arguments))
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


def worker_mode(monkeypatch, mode):
    monkeypatch.setitem(run_sweep.__kwdefaults__, "worker", (*FAKE, mode))


def assert_one_line(answer: Answer, code: int, *words: str):
    assert answer.code == code
    assert len(answer.err.splitlines()) == 1
    assert not answer.out
    for word in words:
        assert word in answer.err


def swept(run, *more):
    return run("sweep", "few.toml", "--task", "regression:quickstart", "--seeds", "2", *more)


def test_a_sweep_prints_the_front_and_writes_store_and_report_under_runs(run):
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
    assert "of llama-1b on b200, BF16 = 1 (--model, --chip)" in run("query", "recipes").out
    assert "of llama-1b on b200, BF16 = 1 (--model, --chip)" in swept(run).out
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


def test_the_same_sweep_again_trains_nothing(run):
    swept(run)
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


def test_a_sweep_that_is_over_is_watched_for_one_look(run):
    swept(run)
    assert "10/10 lanes; finished" in run("status", "--watch").out
    assert_one_line(run("stop"), 2, "no sweep runs here", "finished")


def test_status_shows_the_latest_sweep(run):
    swept(run)
    assert "10/10 lanes; finished" in run("status").out
    state = json.loads(run("status", "--json").out)
    assert (state["done"], state["alive"], state["ended"]) == (10, False, "finished")


def test_report_can_be_written_anywhere(run):
    swept(run)
    assert run("report", "--out", "here.html").code == 0
    assert Path("here.html").exists()


def test_query_answers_in_every_form(run):
    swept(run)
    sql = "SELECT recipe_name, count(*) AS n FROM runs WHERE recipe_name IS NOT NULL GROUP BY 1 ORDER BY 1"
    expected = [{"recipe_name": name, "n": 2} for name in ("bf16", "mxfp4", "nvfp4")]
    assert json.loads(run("query", sql, "--format", "json").out) == expected
    lines = csv.DictReader(io.StringIO(run("query", sql, "--format", "csv").out))
    assert [{"recipe_name": line["recipe_name"], "n": int(line["n"])} for line in lines] == expected
    assert r"nvfp4 & $2$ \\" in run("query", sql, "--format", "latex").out
    run("query", sql, "--format", "parquet", "--out", "answer.parquet")
    assert pd.read_parquet("answer.parquet").to_dict("records") == expected
    assert "mxfp4" in run("query", sql).out


def test_query_takes_the_name_of_a_view(run):
    swept(run)
    lines = json.loads(run("query", "recipes", "--format", "json").out)
    assert {line["name"] for line in lines} >= {"bf16", "mxfp4", "nvfp4"}


def test_what_a_query_writes_is_what_the_files_name_ends_in(run):
    run("sweep", "few.toml")
    assert run("query", "SELECT 1 AS one", "--out", "x.csv").code == 0
    assert Path("x.csv").read_text() == "one\n1\n"
    run("query", "SELECT 1 AS one", "--out", "x.JSON")
    assert json.loads(Path("x.JSON").read_text()) == [{"one": 1}]
    run("query", "SELECT 1 AS one", "--out", "x.json", "--format", "csv")
    assert Path("x.json").read_text() == "one\n1\n"
    assert_one_line(run("query", "recipes", "--out", "x.txt"), 2, "--out", "x.txt", ".csv, .json, .parquet, .tex")
    assert_one_line(run("query", "recipes", "--out", "x.csv", "--format", "table"), 2, "--format", "csv")
    assert not Path("x.txt").exists()


@pytest.mark.parametrize("nothing", ["", "  ", "\n"])
def test_a_query_of_nothing_names_what_can_be_asked(run, nothing):
    run("sweep", "few.toml")
    assert_one_line(run("query", nothing), 2, "query", "DuckDB SQL, or a view: runs, curves, recorded, recipes")


def test_effects_as_latex_have_the_columns_for_a_paper_and_say_where_the_others_are(run):
    run("sweep", "few.toml")
    answer = run("query", "effects", "--out", "effects.tex")
    assert r"factor & level & effect & low & high \\" in Path("effects.tex").read_text()
    assert 'of 26 columns; fp4dse query "FROM effects" has all' in answer.err
    assert "rev_quantizers" in run("query", "FROM effects", "--format", "latex").out.replace(r"\_", "_")
    assert len(json.loads(run("query", "effects", "--format", "json").out)[0]) == 26


def test_the_stores_here_are_listed_the_latest_first(run):
    assert "no store under runs/" in run("store", "list").out
    run("sweep", "few.toml")
    run("store", "merge", "runs/merged/store", "runs/few/store")
    Path("runs/other/store").mkdir(parents=True)
    found = json.loads(run("store", "list", "--json").out)
    assert {line["store"]: line["rows"] for line in found} == {"runs/few/store": 15, "runs/merged/store": 15}
    assert found == sorted(found, key=lambda line: line["age_s"])
    few = next(line for line in found if line["sweep"] == "few")
    assert few["state"] == "finished"
    assert few["tasks"] == ["regression:small"]
    assert few["bytes"] > 0
    assert "runs/few/store" in run("store", "list").out
    Path("runs/few/store/store.json").write_text("{")
    found = {line["store"]: line for line in json.loads(run("store", "list", "--json").out)}
    assert "store.json" in found["runs/few/store"]["unreadable"]
    assert found["runs/merged/store"]["rows"] == 15


def test_compare_takes_names_and_files_and_ids(run):
    swept(run)
    shown = run("recipe", "show", "nvfp4").out
    Path("mine.toml").write_text(shown)
    config_id = json.loads(run("recipe", "show", "nvfp4", "--json").out)["config_id"]
    answers = {run("compare", "mxfp4", b).out for b in ("nvfp4", "mine.toml", config_id)}
    assert len(answers) == 1
    assert "mxfp4" in answers.pop()
    assert_one_line(run("compare", "mxfp4", "ue5m3-sr"), 2, "recipe: found 'ue5m3-sr'", "bf16, mxfp4, nvfp4")


def test_compare_of_one_recipe_lists_what_single_changes_do(run):
    swept(run)
    lines = json.loads(run("compare", "nvfp4", "--json").out)
    assert {(line["factor"], line["level"]) for line in lines} >= {("wgrad.rotation", "rht16")}
    assert "wgrad.rotation" in run("compare", "nvfp4").out
    assert_one_line(run("compare", "ue5m3-sr"), 2, "recipe: found")


def test_space_counts(run):
    facts = json.loads(run("space", "quickstart", "--json").out)
    assert (facts["raw"], facts["left"], facts["merged"], facts["rejected"]) == (48, 48, 0, {})
    assert {line["name"] for line in json.loads(run("space", "--json").out)} == set(shipped_spaces())
    assert [axis["axis"] for axis in facts["axes"]] == list(find_space("quickstart").axes)
    shown = run("space", "few.toml").out
    assert all(word in shown for word in ("raw", "Axes:", "idle"))
    assert "Rejected" not in shown
    Path("hybrid.toml").write_text(
        'base = "ue5m3-sr"\n[fixed]\n"*.scale.hybrid" = true\nestimator = { scale = "exact" }\n'
    )
    assert "(fprop.x is hybrid)" in run("space", "hybrid.toml").out


def test_a_shipped_recipe_is_shown_with_what_it_is_and_where_it_is_from(run):
    file = recipe_files()["quartet"]
    assert run("recipe", "show", "quartet").out.startswith(f"# summary: {file.summary}\n# source: {file.source}\n")
    assert json.loads(run("recipe", "show", "quartet", "--json").out)["source"] == file.source
    Path("mine.toml").write_text(run("recipe", "show", "quartet").out)
    assert run("recipe", "show", "mine.toml").out.startswith("# label: ")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from fp4dse import cli
for command in (["--help"], ["space", "zoo"], ["recipe", "list"], ["status"], ["query", "SELECT lr FROM runs"]):
    try:
        cli.main(command)
    except SystemExit as ended:
        assert not ended.code, command
"""


def test_what_only_looks_needs_no_torch(run):
    swept(run)
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_dry_run_counts_the_space_too_and_may_estimate(run):
    assert json.loads(swept(run, "--dry-run", "--json").out)["raw"] == 4
    swept(run)
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


def test_the_dashboards_studies_are_mirrored_without_a_server(run):
    swept(run)
    assert "few regression:quickstart" in run("dashboard", "--mirror-only").out
    assert Path("runs/few/store/dashboard.journal").exists()


def test_rungs_are_replayed_on_a_finished_sweep(run):
    swept(run)
    assert_one_line(run("rungs", "--replay", "runs/few/store"), 2, "--replay", "several recipes a population")
    Path("two.toml").write_text('axes."*.scale" = ["e4m3", "ue5m3"]')
    assert run("sweep", "two.toml", "--task", "regression:quickstart", "--seeds", "2").code == 0
    rows = json.loads(run("rungs", "--replay", "runs/two/store", "--rungs", "1", "--json").out)
    assert [row["task"] for row in rows] == ["regression"]
    assert 0 <= rows[0]["saved"] < 1


def test_recipe_list_names_every_shipped_recipe(run):
    names = {row["name"] for row in json.loads(run("recipe", "list", "--json").out)}
    assert names >= {"bf16", "mxfp4", "nvfp4", "nvfp4-sr", "nvfp4-sr-rht", "ue5m3-sr", "mxfp4-sr-rht"}


def test_stores_are_merged_counted_and_retired(run):
    swept(run)
    merged = run("store", "merge", "all", "runs/few/store")
    assert "10 rows" in merged.out
    assert "0 rows" in run("store", "merge", "all", "runs/few/store").out
    assert json.loads(run("store", "info", "--store", "all", "--json").out)["done"] == 10
    assert run("store", "invalidate", "quantizers", "99", "--store", "all").code == 0
    assert json.loads(run("store", "info", "--store", "all", "--json").out)["done"] == 0


def test_mend_says_what_came_back_and_what_is_broken(run):
    swept(run)
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


def test_credentials_in_a_url_are_refused_and_not_repeated(run):
    answer = run("store", "info", "--store", "s3://AKIA:hidden/secret@bucket/store")
    assert answer.code == 2
    assert "hidden" not in answer.err
    assert "AWS_SECRET_ACCESS_KEY" in answer.err


def test_doctor_says_which_path_and_how_many_workers(run):
    topics = {row["topic"] for row in json.loads(run("doctor", "--json").out)}
    assert {"torch", "quantizer path", "workers"} <= topics


def test_tensor_prints_a_row_for_every_tensor_and_quantizer_and_what_it_left_out(run):
    torch.save({"w": torch.ones(2, 32), "short": torch.ones(2, 16), "step": 3}, "model.pt")
    answer = run("tensor", "model.pt", "--quantizer", "mxfp4", "--quantizer", "nvfp4", "--plot", "error.html")
    assert answer.code == 0
    assert [answer.out.count(word) for word in ("mxfp4 ", "nvfp4 ")] == [2, 2]
    assert "x.shape[-1]: found 16; accepted: a multiple of the block size 32" in answer.out
    assert "skipped, int, not a tensor: step" in answer.out
    assert "error.html" in answer.out
    assert "<html" in Path("error.html").read_text()[:200].lower()


def test_tensor_as_json_holds_the_decomposition(run):
    np.save("w.npy", np.linspace(-1, 1, 64, dtype=np.float32))
    data = json.loads(run("tensor", "w.npy", "--json").out)
    rows = {row["quantizer"]: row for row in data["rows"]}
    assert len(rows) == 4
    assert rows["mxfp4-rceil"]["tensor"] == "w"
    assert sum(rows["mxfp4-rceil"]["decomposition"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep", "no-such-space"], ["no-such-space", "quickstart"]),
        (["sweep", "missing.toml"], ["missing.toml"]),
        (["sweep", "broken.toml"], ["broken.toml", "TOML"]),
        (["sweep", "binary.toml"], ["binary.toml", "UTF-8"]),
        (["sweep", "typo.toml"], ["typo.toml", "axis", "axes"]),
        (["sweep", "few.toml", "--task", "chess"], ["chess", "regression, vision"]),
        (["sweep", "few.toml", "--preset", "huge"], ["huge", "quickstart"]),
        (["sweep", "few.toml", "--seeds", "many"], ["--seeds", "many"]),
        (["sweep", "few.toml", "--seeds", "0"], ["--seeds"]),
        (["sweep", "few.toml", "--lr", "1e-3,-1"], ["--lr", "-1"]),
        (["sweep", "few.toml", "--budget", "soon"], ["--budget", "soon", "30m"]),
        (["sweep", "few.toml", "--jobs", "0"], ["--jobs"]),
        (["sweep", "few.toml", "--device", "abacus"], ["abacus", "cpu"]),
        (["sweep", "few.toml", "--rungs", "2", "--keep", "1.5"], ["--keep", "1.5"]),
        (["search", "few.toml", "--sampler", "tpe", "--trials", "0"], ["--trials", "0"]),
        (
            ["search", "few.toml", "--sampler", "tpe", "--trials", "1", "--objectives", "speed"],
            ["--objectives", "speed"],
        ),
        (["recipe", "show", "nvfp5"], ["nvfp5", "nvfp4-sr"]),
        (["tensor", "absent.npy"], ["absent.npy"]),
        (["tensor", "few.toml"], [".toml", ".safetensors"]),
        (["tensor", "few.npy"], ["few.npy"]),
        (["tensor", "one.npy", "--quantizer", "nvfp5"], ["nvfp5", "nvfp4"]),
        (["tensor", "one.npy", "--plot", "error.png"], ["--plot", "error.png", ".html"]),
        (["status"], ["--store", "quickstart"]),
        (["status", "--store", "nowhere"], ["nowhere"]),
        (["report", "--store", "nowhere"], ["nowhere"]),
        (["query", "SELECT 1", "--store", "."], ["not a store"]),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run, arguments, words):
    Path("broken.toml").write_text("axes = [")
    Path("few.npy").write_text(FEW)
    np.save("one.npy", np.ones(32))
    Path("binary.toml").write_bytes(b"\xff\xfe\x00")
    Path("typo.toml").write_text('[axis]\n"*" = ["nvfp4"]')
    assert_one_line(run(*arguments), 2, *words)
    assert not Path("runs").exists()


def test_wrong_sql_is_one_line(run):
    swept(run)
    assert_one_line(run("query", "SELEC 1"), 2, "SELEC 1")


def test_a_store_of_a_newer_version_is_refused(run):
    open_store("new", create=True)
    Path("new/store.json").write_text('{"schema_version": 999}')
    assert_one_line(swept(run, "--store", "new"), 2, "999", "upgrade")


def test_a_store_that_cannot_be_written_is_the_machines_fault(run):
    Path("file").write_text("")
    assert_one_line(swept(run, "--store", "file/store"), 1, "file/store")


def test_a_full_disk_is_the_machines_fault_and_loses_nothing(run, monkeypatch):
    def full(*_):
        raise StoreError("runs: the disk is full") from OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", full)
        answer = swept(run)
    assert answer.code == 1
    assert answer.err.splitlines()[-1] == "fp4dse: runs: the disk is full"
    assert json.loads(swept(run, "--json").out)["stored"] > 0


def test_every_command_has_help_with_an_example(run):
    commands = ["sweep", "quickstart", "status", "report", "query", "compare", "space", "doctor", "tensor"]
    commands += ["search", "dashboard", "rungs"]
    lines = [[command] for command in commands] + [["recipe", "list"], ["recipe", "show"]]
    lines += [["store", command] for command in ("info", "merge", "mend", "invalidate")]
    for line in lines:
        answer = run(*line, "--help")
        assert answer.code == 0
        assert f"Example: fp4dse {' '.join(line)}" in answer.out


def test_help_imports_nothing_slow():
    code = (
        "import sys\n"
        "from fp4dse import cli\n"
        "try: cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "slow = {'torch', 'pandas', 'pyarrow', 'optuna', 'duckdb', 'plotly', 'scipy', 'sklearn'} & set(sys.modules)\n"
        "sys.exit(f'imported {slow}' if slow else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_cost_of_a_recipe_is_a_table_and_as_json_plain_data(run):
    answer = run("cost", "nvidia-nvfp4", "--extra-tokens", "0.1")
    assert answer.code == 0
    for word in ("overhead", "time to quality", "stochastic rounding", "dgrad.w", "second copy"):
        assert word in answer.out
    data = json.loads(run("cost", "nvidia-nvfp4", "--model", "vit-b", "--chip", "gb300", "--json").out)
    assert (data["model"], data["chip"]) == ("vit-b", "gb300")
    assert sum(row["us"] for row in data["split"]) == pytest.approx(data["step_us"])
    assert not data["measured_layers"]


def test_the_cost_can_be_measured_beside(run):
    data = json.loads(run("cost", "bf16", "--model", "mlp", "--measure", "--json").out)
    assert [line["layer"] for line in data["measured_layers"]] == ["first", "second"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), ("recipe: found 'nothing'", "nvfp4")),
        (("nvfp4", "--chip", "abacus"), ("chip: found 'abacus'", "b200")),
        (("nvfp4", "--model", "abacus"), ("model: found 'abacus'", "llama-1b")),
        (("nvfp4", "--extra-tokens", "-2"), ("extra-tokens",)),
        (("nvfp4", "--measure", "--device", "abacus"), ("abacus",)),
    ],
)
def test_a_cost_that_cannot_be_had_is_refused_in_one_line(run, arguments, words):
    assert_one_line(run("cost", *arguments), 2, *words)


def test_export_prints_settings_with_their_notes(run):
    answer = run("export", "nvfp4", "--to", "te")
    assert answer.code == 0
    assert "recipe = NVFP4BlockScaling(disable_rht=True" in answer.out
    assert "# or in the environment: NVTE_NVFP4_DISABLE_RHT=1" in answer.out
    assert json.loads(run("export", "nvfp4", "--to", "json").out)["fprop"]


def test_an_export_that_cannot_express_the_recipe_ends_with_1_and_the_list(run):
    answer = run("export", "nvidia-nvfp4", "--to", "te")
    assert (answer.code, answer.out) == (1, "")
    assert "gradients range 16/17 (it has full)" in answer.err
    assert "NVFP4BlockScaling()" in answer.err
    data = json.loads(run("export", "nvidia-nvfp4", "--to", "te", "--json").out)
    assert len(data["cannot"]) == 3
    assert_one_line(run("export", "nvfp4", "--to", "onnx"), 2, "te, torchao, json")


@pytest.fixture
def timed(monkeypatch):
    """Sets what layers take: microseconds, beside 10 in BF16, and whether that is steady."""
    from fp4dse.kernels import layer_time

    def is_(us: float, steady: bool = True):
        def times(recipe, model, device):
            return [layer_time.LayerTime(model.linears[0], 1, 0, us, 10.0, steady, "eager")]

        monkeypatch.setattr(layer_time, "layer_times", times)

    return is_


def test_a_store_is_measured_once_and_its_runs_say_so(run, timed):
    swept(run)
    timed(25.0)
    answer = run("store", "measure", "--json")
    data = json.loads(answer.out)
    assert answer.code == 0
    assert data["measured_of"].startswith("mlp on ")
    assert sorted(line["measured"] for line in data["recipes"]) == [1.0, 2.5, 2.5, 2.5, 2.5]
    assert open_store("runs/few/store").runs().query("not is_baseline")["measured"].tolist() == [2.5] * 8
    assert run("store", "measure").out.startswith("0 recipes timed: mlp on ")


def test_times_that_are_not_steady_are_not_stored_and_end_in_exit_code_1(run, timed):
    swept(run)
    timed(25.0, steady=False)
    answer = run("store", "measure")
    assert answer.code == 1
    assert answer.out.startswith("1 recipe timed")  # BF16 is 1 by definition
    assert "4 recipes had no steady time" in answer.err
    timed(30.0)
    assert run("store", "measure").out.startswith("4 recipes timed")


def test_cost_says_what_was_measured_beside_what_is_modelled(run, timed):
    timed(25.0)
    data = json.loads(run("cost", "nvfp4", "--model", "mlp", "--measure", "--json").out)
    assert data["measured"] == 2.5
    [line] = data["measured_layers"]
    assert (line["layer"], line["measured"], line["steady"]) == ("first", 2.5, True)


def test_cost_without_a_steady_time_has_no_figure(run, timed):
    timed(25.0, steady=False)
    assert json.loads(run("cost", "nvfp4", "--measure", "--json").out)["measured"] is None


def test_escape_sequences_from_files_are_shown_and_not_obeyed(run, tmp_path):
    hostile = "w\x1b[2J\x9b31m<b>"
    np.savez(tmp_path / "a.npz", **{hostile: np.ones((4, 16), np.float32), f"{hostile}i": np.arange(3)})
    (tmp_path / "hostile.toml").write_text(FEW.replace('"few"', r'"x\u001b[2Jy"'))
    (tmp_path / "\x1b[2J.toml").write_text("x")
    asked = [
        ["tensor", "a.npz", "--quantizer", "nvfp4", "--plot", "a.html"],
        ["tensor", "a.npz", "--quantizer", "nvfp4", "--json"],
        ["space", "\x1b[2J.toml"],
        ["cost", "\x1b[2J"],
        ["space", "hostile.toml"],
        ["sweep", "few.toml", "--\x1b[2J"],
    ]
    for arguments in asked:
        answer = run(*arguments)
        assert not set("\x1b\x9b") & set(answer.out + answer.err), arguments
    assert "\\u001b[2J" in run(*asked[0]).out
    assert "\\u001b[2J" in run(*asked[2]).err
    assert hostile in json.loads(run(*asked[1]).out)["rows"][0]["tensor"]
    assert "<b>" not in (tmp_path / "a.html").read_text()
