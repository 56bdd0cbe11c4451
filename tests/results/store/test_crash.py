"""Killed at any moment, a writer loses nothing that it reported as stored, and tears nothing."""

import os
import random
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from fp4dse.results import open_store, run_id
from fp4dse.results.store import compaction
from tests.forked import Forked


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs, least of all clean-up."""


STEPS = [(os, "open"), (os, "fsync"), (os, "replace"), (Path, "unlink")]


@pytest.fixture
def kill_at(monkeypatch):
    """kill_at(n): the n-th file operation from now on does not happen, nor any after it."""

    def arm(n: int) -> None:
        left = [n]
        for owner, name in STEPS:
            real = getattr(owner, name)

            def step(*args, _real=real, **kwargs):
                left[0] -= 1
                if left[0] < 0:
                    raise Killed
                return _real(*args, **kwargs)

            monkeypatch.setattr(owner, name, step)

    return arm


WRITES = {
    "add": lambda store, _, rows: store.add(rows, "last"),
    "compact": lambda store, *_: store.compact(minimum=1),
    "merge": lambda store, other, _: store.merge(other),
}


@pytest.mark.parametrize("write", WRITES)
def test_killed_between_any_two_file_operations_nothing_is_lost_or_doubled(tmp_path, row, kill_at, monkeypatch, write):
    reached_the_end = False
    for n in range(40):
        store = open_store(tmp_path / f"{n}", create=True)
        for seed in range(3):
            store.add([row(seed=seed)], f"job-{seed}")
        other = open_store(tmp_path / f"{n}-other", create=True)
        other.add([row(seed=9)], "job")
        kill_at(n)
        try:
            WRITES[write](store, other, [row(seed=9)])
            reached_the_end = True
        except Killed:
            pass
        monkeypatch.undo()
        after = open_store(store.path)
        seeds = sorted(after.runs(["seed"])["seed"])
        assert seeds in ([0, 1, 2], [0, 1, 2, 9])
        if reached_the_end:
            assert (9 in seeds) == (write != "compact")
        after.add([row(seed=9)], "again")
        after.compact(minimum=1)
        assert sorted(after.runs(["seed"])["seed"]) == [0, 1, 2, 9]
        assert after.info()["torn"] == []
        assert not [p for p in after.path.rglob(".*.tmp") if p.parent.name in ("inbox", "parts")]
        if reached_the_end:
            return
    pytest.fail("40 operations were not enough to finish")


@pytest.mark.heavy
def test_compaction_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path, row, kill_at, monkeypatch):
    """Seven files, two a part, one of them torn; every attempt dies one file operation later than the one before."""
    monkeypatch.setattr("fp4dse.results.store.compaction.FILES_PER_PART", 2)
    store = open_store(tmp_path / "store", create=True)
    for seed in range(7):
        store.add([row(seed=seed), row("mxfp4", seed=seed)], f"job-{seed}")
    (store.path / "inbox" / "job-3-torn.arrow").write_bytes(b"ARROW1 and then")
    deaths = 0
    for n in range(60):
        kill_at(n)
        try:
            open_store(store.path).compact(minimum=1)
            break
        except Killed:
            deaths += 1
        finally:
            monkeypatch.undo()
            monkeypatch.setattr("fp4dse.results.store.compaction.FILES_PER_PART", 2)
        found = open_store(store.path).runs(["seed", "curve_loss"])
        assert sorted(found["seed"]) == sorted([*range(7), *range(7)])
        assert found["curve_loss"].notna().all()
    assert deaths >= 8
    after = open_store(store.path).info()
    assert (after["inbox_files"], after["runs"], len(after["torn"])) == (0, 14, 1)


@pytest.mark.heavy
def test_joining_of_parts_that_is_killed_again_and_again_loses_and_doubles_nothing(tmp_path, row, kill_at, monkeypatch):
    """Ten parts, three to a larger one and three of these to a still larger one; each attempt dies one step later."""
    store = open_store(tmp_path / "store", create=True)
    for seed in range(10):
        store.add([row(seed=seed), row("mxfp4", seed=seed)], f"job-{seed}")
        store.compact(minimum=1)
    deaths = 0
    for n in range(80):
        monkeypatch.setattr("fp4dse.results.store.compaction.JOIN_AT", 3)
        kill_at(n)
        try:
            open_store(store.path).compact()
            break
        except Killed:
            deaths += 1
        finally:
            monkeypatch.undo()
        for found in (
            open_store(store.path).runs(["seed", "curve_loss"]),
            store.sql("SELECT seed, curve_loss FROM rows"),
        ):
            assert sorted(found["seed"]) == sorted([*range(10), *range(10)])
            assert found["curve_loss"].notna().all()
    assert deaths >= 8
    after = open_store(store.path).info()
    assert (after["runs"], after["torn"]) == (20, [])
    assert after["part_files"] <= 2 + 2 + 1  # copies that a death left among them go with the next join


def write(path: Path, begin: int, rows: list[dict]) -> None:
    """Store rows without end, and say each time that they are stored."""
    compaction.JOIN_AT = 2
    store = open_store(path)
    for seed in range(begin, 10**9):
        store.add([{**row, "seed": seed} for row in rows], f"job-{seed}")
        print(seed, flush=True)
        if seed % 7 == 6:
            store.compact(minimum=5)


def test_a_killed_process_loses_no_row_that_it_acknowledged(tmp_path, row):
    store = open_store(tmp_path / "store", create=True)
    rows = [{**row(name), "created_at": None} for name in ("nvfp4", "mxfp4")]
    stored, begin = -1, 0
    chance = random.Random(1)
    for _ in range(4):
        with Forked(partial(write, store.path, begin, rows), stdout=subprocess.PIPE, text=True) as writer:
            for _ in range(5):
                stored = int(writer.stdout.readline())
            time.sleep(chance.uniform(0, 0.2))
            writer.send_signal(signal.SIGKILL)
            for line in writer.stdout:
                stored = int(line)
        found = store.runs(["run_id", "seed"])
        assert found["run_id"].is_unique
        acknowledged = {run_id({**r, "seed": seed}) for r in rows for seed in range(stored + 1)}
        assert acknowledged <= set(found["run_id"])
        assert len(found) <= len(rows) * (stored + 2)
        assert store.info()["torn"] == []
        begin = stored + 1
