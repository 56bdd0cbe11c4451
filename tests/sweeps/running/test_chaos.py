"""Whatever is killed, torn, filled up or set back: in the end every lane is stored exactly once."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from fp4dse.dse import Space, StoreError
from fp4dse.results import open_store
from fp4dse.sweeps import run_sweep

FAKE = str(Path(__file__).parents[1] / "fake_worker.py")
SPACE = Space.from_dict(
    {
        "name": "chaos",
        "axes": {"*": ["mxfp4", "nvfp4"], "wgrad.rotation": ["none", "rht16"], "dgrad.rotation": ["none", "rht16"]},
    }
)
SEEDS = range(12)
LANES = 12 * 9
POPULATIONS = 5

DRIVER = f"""
import random, sys, time
sys.path[:0] = [{str(Path(__file__).parent)!r}]
clock, jump = time.time, random.Random(int(sys.argv[2]))
time.time = lambda: clock() + jump.choice([0, 0, 0, 86400.0, -86400.0])  # someone sets the clock, again and again
from pathlib import Path
from test_chaos import sweep
sweep(Path(sys.argv[1]), "slow=0.4")
"""


def sweep(store, mode="ok", **more):
    worker = (sys.executable, FAKE, mode)
    arguments = {"tasks": [("regression", "quickstart")], "seeds": SEEDS, "jobs": 3, "backoff_s": 0.05, **more}
    return run_sweep(SPACE, store=store, worker=worker, **arguments)


def assert_every_lane_once(store):
    runs = open_store(store).runs(["status", "config_id", "lr", "task", "seed"])
    assert Counter(runs["status"]) == {"done": LANES}
    assert not runs.duplicated(["config_id", "lr", "task", "seed"]).any()


def start(store, number) -> subprocess.Popen:
    command = [sys.executable, "-c", DRIVER, str(store), str(number)]
    return subprocess.Popen(command)


def below(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    try:
        children = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []
    return [*children, *(grandchild for child in children for grandchild in below(child))]


def tear(store, chance):
    """Cut a file of the inbox short, but not the first, as a disk may that lies about what it has written."""
    files = sorted(store.glob("inbox/*.arrow"))[1:]
    if files:
        victim = chance.choice(files)
        os.truncate(victim, victim.stat().st_size // 2)


@pytest.mark.slow
def test_kills_torn_files_and_a_jumping_clock_lose_and_double_nothing(tmp_path):
    store, chance = tmp_path / "store", random.Random(0)
    victims = 0
    for number in range(5):
        driver = start(store, number)
        while not list(store.glob("jobs/*/stderr.txt")):
            assert driver.poll() is None
            time.sleep(0.01)
        for _ in range(6):
            time.sleep(chance.uniform(0.0, 0.3))
            if workers := below(driver.pid):
                os.kill(chance.choice(workers), signal.SIGKILL)
                victims += 1
        driver.kill()
        driver.wait()
        tear(store, chance)
    assert victims > 5
    result = sweep(store)
    assert (result.failed, result.left) == (0, 0)
    assert result.stored > 0
    assert_every_lane_once(store)
    assert sweep(store).stored == LANES


@pytest.mark.slow
def test_the_second_of_two_drivers_is_told_what_the_first_is_and_changes_nothing(tmp_path):
    store = tmp_path / "store"
    first = start(store, 0)
    while not list(store.glob("jobs/*/stderr.txt")):
        assert first.poll() is None
        time.sleep(0.01)
    with pytest.raises(StoreError) as refusal:
        sweep(store)
    assert f"process {first.pid} on " in str(refusal.value)
    assert f"fp4dse status --watch --store {store}" in str(refusal.value)
    assert f"fp4dse stop --store {store}" in str(refusal.value)
    assert first.wait(60) == 0
    assert_every_lane_once(store)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]).returncode:
        pytest.skip("only root can mount a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize("when", ["before the first job", "while rows are stored"])
def test_a_disk_that_fills_up_ends_the_sweep_with_advice_and_costs_nothing_that_was_stored(
    small_disk, when, monkeypatch
):
    store = small_disk / "store"
    ballast = small_disk / "ballast"
    open_store(store, create=True)

    def fill(*_):
        with open(ballast, "ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    if when == "before the first job":
        fill()
        full = {}
    else:
        full = {"progress": lambda state: state.done > 0 and fill()}
    monkeypatch.setenv("FAKE_LANES", "/dev/null")
    with pytest.raises(StoreError, match="the disk is full; what was stored before is safe"):
        sweep(store, "slow=0.5", **full)
    ballast.unlink()
    before = len(open_store(store).done())
    assert (before > 0) == (when != "before the first job")
    result = sweep(store)
    assert result.stored >= before
    assert (result.failed, result.left) == (0, 0)
    assert_every_lane_once(store)


def test_a_store_that_was_copied_while_it_was_written_is_whole(tmp_path):
    """What a backup sees in the middle: some files, each whole, none half."""
    copies = []

    def copy(state):
        copies.append(
            shutil.copytree(tmp_path / "store", tmp_path / f"copy{len(copies)}", ignore=shutil.ignore_patterns("jobs"))
        )

    sweep(tmp_path / "store", "slow=0.05", progress=copy)
    for path in copies[:: max(1, len(copies) // 5)]:
        found = open_store(path)
        assert found.info()["torn"] == []
        assert len(found.done()) == len(found.runs(["run_id"])) <= LANES
