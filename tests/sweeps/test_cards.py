"""The program that keeps cards busy: a command has cards of its own, what does not fit waits, what is late is said."""

import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, Path(__file__).parents[2] / "docs" / "study" / "cards.py"]
NOTE = "echo $CUDA_VISIBLE_DEVICES $(date +%s%N) > $RESULTS/cards; sleep 1; date +%s%N > $RESULTS/end"
FILE = f"""
[[command]]
name = "long"
run = "{NOTE}; sleep 2; date +%s%N > $RESULTS/end"

[[command]]
name = "both"
cards = 2
run = "{NOTE}; exit 3"

[[command]]
name = "short"
run = "{NOTE}; echo {{left}} ${{#PWD}} seconds"

[[command]]
name = "wide"
cards = 3
run = "touch $RESULTS/begun"

[[command]]
name = "never"
least = 1000
run = "touch $RESULTS/begun"

"""
ENDLESS = """
[[command]]
name = "endless"
run = "echo begun; sleep 613"
"""


def run_cards(folder: Path, *more: str, file: str = FILE) -> str:
    (folder / "device.toml").write_text(file)
    where = ["--out", str(folder / "out"), "--at", str(folder / "at"), "--cards", "2"]
    command = [*COMMAND, folder / "device.toml", *where, *more]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100, env={**os.environ})
    with tarfile.open(folder / "out" / "cards.tgz") as file:
        file.extractall(folder / "brought", filter="data")
    return said.stdout


def test_each_command_has_its_cards_and_what_does_not_fit_waits(tmp_path):
    assert "it goes on" in run_cards(tmp_path, "--limit", "60", "--wait", "0.5")
    said = run_cards(tmp_path, "--wait", "60")
    assert said.splitlines()[-1] == "ended"
    for line in (
        "both ended after",
        "exit 3",
        "never left out: it needs 1000 s",
        "wide left out: it needs 3 cards, there are 2",
    ):
        assert line in said
    brought = tmp_path / "brought"
    cards, spans = {}, {}
    for name in ("long", "both", "short"):
        held, begun = (brought / name / "cards").read_text().split()
        cards[name], spans[name] = held, (int(begun), int((brought / name / "end").read_text()))
    assert cards == {"long": "0", "both": "0,1", "short": "1"}
    assert spans["short"][0] < spans["long"][1]  # begun at once, before the one that needs both cards
    assert spans["both"][0] > max(spans["long"][1], spans["short"][1])
    assert re.match(r"\d+ \d+ seconds\n", (brought / "short" / "said.txt").read_text())
    assert not (brought / "never").exists()


@pytest.mark.slow
def test_what_does_not_end_in_time_is_stopped_with_all_that_it_began(tmp_path):
    assert "endless is stopped" in run_cards(tmp_path, "--limit", "16", "--wait", "60", file=ENDLESS)
    assert (tmp_path / "brought" / "endless" / "said.txt").read_text() == "begun\n"
    assert subprocess.run(["pgrep", "-xf", "sleep 613"], capture_output=True).stdout == b""


@pytest.mark.parametrize(
    ("file", "more", "says"),
    [
        (FILE, ["--only", "shorts"], "--only: found shorts; accepted: long, both, short, wide, never\n"),
        (
            FILE + FILE,
            [],
            "found both, long, never, short, wide more than once; accepted: a name of its own for each command\n",
        ),
        (
            '[[command]]\nname = "one"\nleats = 3\nrun = ""',
            [],
            "one: found leats, name, run; accepted: name and run, and cards and least; see leats\n",
        ),
        (FILE.replace('"both"', '"both/two"'), [], "found the name 'both/two'; accepted: one that a folder can have\n"),
        (FILE.replace("cards = 2", "cards = 0"), [], "both: found cards below 1; accepted: 1 and more\n"),
    ],
    ids=["only", "twice", "key", "name", "cards"],
)
def test_what_is_wrong_with_a_file_is_said_before_anything_is_begun(tmp_path, file, more, says):
    (tmp_path / "device.toml").write_text(file)
    command = [*COMMAND, tmp_path / "device.toml", "--out", tmp_path, "--at", tmp_path / "at", *more]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 1
    assert said.stderr.endswith(says)
    assert not (tmp_path / "at").exists()


def refused(folder: Path, file: str, *more: str) -> str:
    """What is said of a run in the folder `at` that is not begun."""
    (folder / "device.toml").write_text(file)
    command = [*COMMAND, folder / "device.toml", "--out", folder, "--at", folder / "at", "--cards", "2", *more]
    said = subprocess.run(command, capture_output=True, text=True)
    assert said.returncode == 1
    return said.stderr


def test_a_folder_of_another_run_is_refused(tmp_path):
    """Its results would be taken for those of this one."""
    run_cards(tmp_path, "--limit", "20", "--wait", "20", "--only", "never")
    ran = (
        f"--at: found {tmp_path / 'at'}, where another file, or with '--only never --cards 2', runs or ran; accepted: "
    )
    assert refused(tmp_path, ENDLESS, "--only", "endless") == f"{ran}another folder\n"
    assert refused(tmp_path, FILE, "--only", "wide") == f"{ran}another folder\n"


def test_a_folder_with_other_things_is_left_alone(tmp_path):
    mine = tmp_path / "at" / "mine"
    mine.mkdir(parents=True)
    accepted = "which has other things; accepted: a folder that is empty or not there"
    assert refused(tmp_path, FILE) == f"--at: found {tmp_path / 'at'}, {accepted}\n"
    assert mine.exists()


def test_a_run_that_is_killed_is_gone(tmp_path):
    """Within the call that began it, too."""
    (tmp_path / "device.toml").write_text(ENDLESS.replace("613", "20"))
    where = ["--out", tmp_path, "--at", tmp_path / "at", "--cards", "1", "--wait", "60"]
    call = subprocess.Popen([*COMMAND, tmp_path / "device.toml", *where], stdout=subprocess.PIPE, text=True)
    driver = tmp_path / "at" / "driver"
    while not (driver.exists() and driver.read_text()):
        time.sleep(0.1)
    os.kill(int(driver.read_text()), signal.SIGKILL)
    assert call.communicate(timeout=30)[0].splitlines()[-1] == "it is gone"
    assert call.returncode == 1
