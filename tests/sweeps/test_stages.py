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


@pytest.mark.slow
def test_a_sweep_has_the_rates_that_were_tuned_before_it_and_nothing_is_trained_twice(tmp_path):
    (tmp_path / "stages.toml").write_text(FILE)

    def call(name: str, *more: str) -> str:
        where = ["--out", str(tmp_path / name), "--at", str(tmp_path / f"at {name}"), "--device", "cpu"]
        command = [sys.executable, str(STAGES), str(tmp_path / "stages.toml"), *where, *more]
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env={**os.environ})
        with tarfile.open(tmp_path / name / "study.tar") as file:
            file.extractall(tmp_path / name, filter="data")
        return said.stdout

    assert "it goes on" in call("first", "--wait", "0")
    assert "ended" in call("first", "--wait", "300").splitlines()
    runs = open_store(tmp_path / "first" / "chains" / "one" / "store").runs(
        ["is_baseline", "lr", "lr_source", "status"]
    )
    assert len(runs) == 18  # eight recipes and BF16
    tuned = json.loads((tmp_path / "first" / "rates" / "regression-smoke.json").read_text())
    best = min((point for point in tuned["curve"] if point["of"] == "bf16"), key=lambda point: point["losses"])
    assert runs.loc[runs["is_baseline"], "lr"].eq(best["lr"]).all()
    assert runs.loc[runs["is_baseline"], "lr_source"].eq("tuned").all()
    assert not (tmp_path / "first" / "chains" / "broken" / "store").exists()  # at rates that nobody tuned
    again = call("again", "--wait", "300", "--resume", str(tmp_path / "first" / "study.tar"))
    assert "18 rows" in again
    log = (tmp_path / "again" / "one.txt").read_text()
    assert "asked=18, stored=18, done=0" in log
