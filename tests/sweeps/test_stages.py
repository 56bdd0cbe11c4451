"""The program of the study's stages: its sweeps have the rates that it tunes, and it goes on from what it brought."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fp4dse.results import open_store

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
def test_the_rest_of_the_study_begins_with_the_rows_that_are_stored_and_chooses_what_it_confirms(tmp_path):
    """rest.toml as it is, on presets that a CPU trains in a second."""
    text = STAGES.with_name("rest.toml").read_text().replace("language:10M-long", "regression:quickstart")
    text = text.replace("language:10M", "regression:smoke").replace('["10M", "10M-long"]', "[]")
    steps = [line.strip() for line in text.splitlines() if line.strip().startswith('"sweep')]
    store = f"store = {json.dumps(str(tmp_path / 'part' / 'chains' / '10M' / 'store'))}"
    part = text.replace('store = "docs/study/store"', "").replace(steps[0], steps[0].replace("halve", "pairs-of-none"))
    run_stages(tmp_path, part.replace("pairs-of-none", "quartet2-10M"), "part", "--wait", "300")
    log = (tmp_path / "part" / "10M.txt").read_text()
    assert "regression:smoke: 0 of 16 recipes have 3 seeds on one kind of machine" in log  # nothing from a part
    run_stages(tmp_path, text.replace('store = "docs/study/store"', store), "whole", "--wait", "300")
    log = (tmp_path / "whole" / "10M.txt").read_text()
    assert "asked=51, stored=3, done=48" in log
    assert "asked=27, stored=27, done=0" in log
    chosen = [line for line in log.splitlines() if line.startswith("chosen: ")]
    assert 2 <= len(chosen) <= 7
    assert any("nvfp4, weights nvfp4-2d" in line for line in chosen)
    runs = open_store(tmp_path / "whole" / "chains" / "10M" / "store").runs(["recipe_label", "preset", "seed"])
    confirmed = runs[runs["preset"].eq("quickstart")]
    assert set(confirmed["seed"]) == {20, 21, 22, 23}
    assert len(confirmed) == 4 * (len(chosen) + 1)
