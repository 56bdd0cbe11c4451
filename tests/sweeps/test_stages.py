"""The program of the study's stages: its sweeps have the rates that it tunes, and it goes on from what it brought."""

import json
import os
import shlex
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

from fp4dse.results import open_store
from fp4dse.sweeps import find_space
from fp4dse.sweeps.arguments import parse_tasks

STAGES = Path(__file__).parents[2] / "docs" / "study" / "stages.py"
FILE = """
[[chain]]
name = "one"
workers = 2
steps = [
    "tune regression:smoke --classes bf16 forward --seeds 1 --fresh 0 --most 3",
    "sweep docs/study/quartet2-10M.toml --task regression:smoke --seeds 2 --lanes 4",
]

[[chain]]
name = "broken"
workers = 1
steps = ["tune regression:nothing", "sweep quickstart --task regression:smoke --seeds 1 --lanes 4"]
"""


def run_stages(folder: Path, text: str, name: str, *more: str) -> str:
    """Run stages of a file's text on a CPU and unpack what it brings into the folder `name`."""
    (folder / "stages.toml").write_text(text)
    where = ["--out", str(folder / name), "--at", str(folder / f"at {name}"), "--device", "cpu"]
    command = [sys.executable, str(STAGES), str(folder / "stages.toml"), *where, *more]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env={**os.environ})
    with tarfile.open(folder / name / "study.tar") as file:
        file.extractall(folder / name, filter="data")
    return said.stdout


@pytest.mark.slow
def test_a_sweep_has_the_rates_that_were_tuned_before_it_and_nothing_is_trained_twice(tmp_path):
    asked = "from fp4dse.tasks import find_facts; find_facts('regression', 'smoke')"
    subprocess.run([sys.executable, "-c", asked], check=True)  # and remembers them, with the rate that nobody tuned
    assert "it goes on" in run_stages(tmp_path, FILE, "first", "--wait", "0")
    assert "ended" in run_stages(tmp_path, FILE, "first", "--wait", "300").splitlines()
    runs = open_store(tmp_path / "first" / "chains" / "one" / "store").runs(
        ["is_baseline", "lr", "lr_source", "status"]
    )
    assert len(runs) == 18  # eight recipes and BF16
    tuned = json.loads((tmp_path / "first" / "rates" / "regression-smoke.json").read_text())
    best = min((point for point in tuned["curve"] if point["of"] == "bf16"), key=lambda point: point["losses"])
    assert runs.loc[runs["is_baseline"], "lr"].eq(best["lr"]).all()
    assert runs.loc[runs["is_baseline"], "lr_source"].eq("tuned").all()
    assert not (tmp_path / "first" / "chains" / "broken" / "store").exists()  # at rates that nobody tuned
    again = run_stages(tmp_path, FILE, "again", "--wait", "300", "--resume", str(tmp_path / "first" / "study.tar"))
    assert "18 rows" in again
    log = (tmp_path / "again" / "one.txt").read_text()
    assert "has all of it: {'bf16'" in log  # nor is it tuned
    assert "asked=18, stored=18, done=0" in log


@pytest.mark.slow
def test_a_stage_begins_with_the_rows_that_are_stored_and_has_the_recipes_that_they_choose(tmp_path):
    """Halve and confirm as they are, on presets that a CPU trains in a second."""
    steps = tomllib.loads(STAGES.with_name("stages.toml").read_text())["chain"][1]["steps"]
    confirm = next(step for step in steps if "--front-of" in step)
    halve = next(step for step in steps if "halve.toml --task" in step)

    def chain(*steps: str, store: Path | None = None) -> str:
        text = "".join(f"    {json.dumps(step)},\n" for step in steps)
        text = text.replace("language:10M-long", "regression:quickstart").replace("language:10M", "regression:smoke")
        begins = f"store = {json.dumps(str(store))}\n" if store else ""
        return f'[[chain]]\nname = "10M"\nworkers = 2\n{begins}steps = [\n{text}]\n'

    run_stages(tmp_path, chain(halve.replace("halve", "quartet2-10M"), confirm), "part", "--wait", "300")
    log = (tmp_path / "part" / "10M.txt").read_text()
    assert "regression:smoke: 0 of 16 recipes have 3 seeds on one kind of machine" in log  # nothing from a part
    before = tmp_path / "part" / "chains" / "10M" / "store"
    run_stages(tmp_path, chain(halve, confirm, store=before), "whole", "--wait", "300")
    log = (tmp_path / "whole" / "10M.txt").read_text()
    assert "asked=51, stored=3, done=48" in log
    chosen = [line for line in log.splitlines() if line.startswith("chosen: ")]
    assert 2 <= len(chosen) <= 7
    assert any("nvfp4, weights nvfp4-2d" in line for line in chosen)
    runs = open_store(tmp_path / "whole" / "chains" / "10M" / "store").runs(["recipe_label", "preset", "seed"])
    confirmed = runs[runs["preset"].eq("quickstart")]
    assert len(runs) == 48 + len(confirmed)  # three of 51 were stored before: whoever reads this has them
    assert set(confirmed["seed"]) == {20, 21, 22, 23}
    assert len(confirmed) == 4 * (len(chosen) + 1)


@pytest.mark.parametrize("name", ["stages", "rest", "presets"])
def test_what_the_files_of_stages_name_exists(name, monkeypatch):
    """A step of a file is only read when its turn comes."""
    monkeypatch.chdir(STAGES.parents[2])
    file = tomllib.loads(STAGES.with_name(f"{name}.toml").read_text())
    steps = [shlex.split(step) for chain in file["chain"] for step in chain["steps"]]
    assert steps
    assert all(step[0] in ("sweep", "tune") for step in steps)
    for kind, what, *words in steps:
        assert parse_tasks([what if kind == "tune" else words[words.index("--task") + 1]])
        if kind == "sweep":
            assert find_space(what).recipes()


def test_chains_that_a_file_does_not_have_are_refused(tmp_path):
    (tmp_path / "stages.toml").write_text(FILE)
    command = [sys.executable, STAGES, tmp_path / "stages.toml", "--out", tmp_path, "--at", tmp_path / "at"]
    said = subprocess.run([*command, "--only", "two"], capture_output=True, text=True)
    assert (said.returncode, said.stderr) == (1, "--only: found two; accepted: one, broken\n")
    assert not (tmp_path / "at").exists()
