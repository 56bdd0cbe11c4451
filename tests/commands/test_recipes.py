"""Commands that train nothing: spaces, recipes, what they cost, where they go, and what a quantizer does to a file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fp4dse.dse import recipe_files
from fp4dse.sweeps.arguments import find_space, shipped_spaces
from tests.commands.running import assert_one_line


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


def test_recipe_list_names_every_shipped_recipe(run):
    names = {row["name"] for row in json.loads(run("recipe", "list", "--json").out)}
    assert names >= {"bf16", "mxfp4", "nvfp4", "nvfp4-sr", "nvfp4-sr-rht", "ue5m3-sr", "mxfp4-sr-rht"}


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


def test_the_cost_of_a_recipe_is_a_table_and_as_json_plain_data(run):
    answer = run("cost", "nvidia-nvfp4", "--extra-tokens", "0.1")
    assert answer.code == 0
    for word in ("overhead", "time to quality", "stochastic rounding", "dgrad.w", "second copy"):
        assert word in answer.out
    data = json.loads(run("cost", "nvidia-nvfp4", "--model", "vit-b", "--chip", "gb300", "--json").out)
    assert (data["model"], data["chip"]) == ("vit-b", "gb300")
    assert sum(row["us"] for row in data["split"]) == pytest.approx(data["step_us"])
    assert not data["measured_layers"]
    assert data["iteration"] == [], "no tokens are sampled one after another"


def test_the_cost_has_an_iteration_of_reinforcement_learning(run):
    assert "An iteration of reinforcement learning, 512 answers of 4,096 tokens" in run("cost", "nvfp4").out
    data = json.loads(run("cost", "nvfp4", "--workload", "dapo", "--rollout-share", "0", "--json").out)
    found = {row["scenario"]: row["iteration_overhead"] for row in data["iteration"]}
    ends = {"low": data["overhead_low"], "mid": data["overhead"], "high": data["overhead_high"]}
    assert found == pytest.approx(ends)
    assert data["workload"] == "dapo"


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
        (("nvfp4", "--workload", "abacus"), ("workload: found 'abacus'", "reasoning")),
        (("nvfp4", "--rollout-share", "2"), ("--rollout-share: found 2.0",)),
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
    assert_one_line(run("export", "nvfp4", "--to", "onnx"), 2, "te, torchao, modelopt, te_quant, json")


def test_a_file_of_formats_per_layer_is_written_and_read_back(run, tmp_path):
    written = run("export", "nemotron-3-super", "--to", "te_quant", "--blocks", "88")
    assert written.code == 0
    Path("te_quant.cfg").write_text(written.out)
    read = run("recipe", "import", "te_quant.cfg")
    assert read.code == 0
    Path("mine.toml").write_text(read.out)
    again = run("export", "mine.toml", "--to", "te_quant").out
    assert again.splitlines()[1:] == written.out.splitlines()[1:]
    facts = json.loads(run("recipe", "import", "te_quant.cfg", "--json").out)
    assert facts["notes"] == []
    assert facts["precise"] == {"attention": True, "last": 14.0}
    assumed = run("recipe", "import", "te_quant.cfg", "--arguments", "--fp8-format e4m3 --fp8-recipe mxfp8")
    assert "mxfp8-rceil" in assumed.out
    assert_one_line(run("recipe", "import", "nothing.cfg"), 2, "nothing.cfg", "a readable YAML file")
    Path("bad.cfg").write_text("configs: 3")
    assert_one_line(run("recipe", "import", "bad.cfg"), 2, "bad.cfg")


def test_cost_says_what_was_measured_beside_what_is_modelled(run, timed):
    timed(25.0)
    data = json.loads(run("cost", "nvfp4", "--model", "mlp", "--measure", "--json").out)
    assert data["measured"] == 2.5
    [line] = data["measured_layers"]
    assert (line["layer"], line["measured"], line["steady"]) == ("first", 2.5, True)


def test_cost_without_a_steady_time_has_no_figure(run, timed):
    timed(25.0, steady=False)
    assert json.loads(run("cost", "nvfp4", "--measure", "--json").out)["measured"] is None
