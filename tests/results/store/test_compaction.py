"""Small parts are joined into larger ones, and nobody who reads meanwhile misses a row or sees one twice."""

import errno
import shutil
import threading
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import StoreError
from fp4dse.results import open_store, run_id
from fp4dse.results.store import compaction
from fp4dse.results.store.atomic import AT_ONCE, in_parallel
from fp4dse.results.store.compaction import level_of, list_files, without_duplicates
from fp4dse.results.store.parquet import scan
from fp4dse.results.store.schema import ROW, to_table


@pytest.fixture(autouse=True)
def three_are_many(monkeypatch):
    monkeypatch.setattr(compaction, "JOIN_AT", 3)


@pytest.fixture
def many(store, row, monkeypatch):
    """many(n): n parts of one row each, seeds from 0 on."""

    def build(count):
        with monkeypatch.context() as patch:
            patch.setattr(compaction, "JOIN_AT", 10**6)
            for seed in range(count):
                store.add([row(seed=seed)], "job")
                store.compact(minimum=1)
        return store

    return build


def levels(store) -> list[int]:
    return [level_of(part) for part in list_files(store.path, "parts")]


def rows_on_disk(store) -> pa.Table:
    return scan(list_files(store.path, "parts"), ROW.names)


def test_joining_parts_changes_no_answer(many):
    store = many(7)
    before = store.runs(curves=True)
    assert levels(store) == [0] * 7
    assert store.compact() == 0
    assert levels(store) == [0, 1, 1]
    after = store.runs(curves=True)
    before, after = (runs.sort_values("run_id", ignore_index=True) for runs in (before, after))
    pd.testing.assert_frame_equal(before, after)
    assert store.compact() == 0
    assert levels(store) == [0, 1, 1]


def test_many_sweeps_leave_few_parts(store, row):
    for seed in range(30):
        store.add([row(seed=seed)], "job")
        store.compact(minimum=1)
        assert len(levels(store)) <= 4 + (seed + 1) // 9
    assert sorted(levels(store)) == [1, 2, 2, 2]
    assert sorted(store.runs(["seed"])["seed"]) == list(range(30))


def test_large_parts_and_few_parts_are_left_alone(many, monkeypatch):
    store = many(4)
    few = compaction.JOIN_AT - 1
    sizes = sorted(part.stat().st_size for part in list_files(store.path, "parts"))
    monkeypatch.setattr(compaction, "SMALL_BYTES", sizes[few])
    assert sum(size < sizes[few] for size in sizes) <= few
    store.compact()
    assert levels(store) == [0] * 4


def test_a_broken_part_is_moved_aside_and_the_others_are_joined(many, caplog):
    store = many(4)
    files = list_files(store.path, "parts")
    files[1].write_bytes(files[1].read_bytes()[:-7])
    store.compact()
    assert f"{files[1]}: moved to torn/" in caplog.text
    assert levels(store) == [1]
    assert (store.path / "torn" / files[1].name).exists()
    assert len(store.runs()) == 3


def test_a_part_that_cannot_be_read_now_is_named_and_nothing_is_deleted_or_moved(many, monkeypatch):
    store = many(4)
    files = list_files(store.path, "parts")
    real = Path.read_bytes

    def refuse(file):
        if file == files[1]:
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return real(file)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)
        with pytest.raises(StoreError, match=rf"{files[1].name}: cannot be read now .Permission denied.; nothing was"):
            store.compact()
    assert list_files(store.path, "parts") == files
    assert not (store.path / "torn").exists()
    assert len(store.runs()) == 4


def test_a_row_that_a_crash_left_in_two_parts_is_written_once(many, monkeypatch):
    store = many(3)
    kept = {part: part.read_bytes() for part in list_files(store.path, "parts")}
    store.compact()
    for part, data in list(kept.items())[1:]:  # as if the process had died after it deleted the first of them
        part.write_bytes(data)
    assert len(rows_on_disk(store)) == 3 + 2
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1, 2]
    monkeypatch.setattr(compaction, "JOIN_AT", 2)
    store.compact()
    assert levels(store) == [2]
    assert sorted(rows_on_disk(store)["seed"].to_pylist()) == [0, 1, 2]


def test_only_copies_are_dropped(row):
    later = row()["created_at"].replace(year=2027)
    again = [row(seed=1, status="failed"), row(seed=1), row(seed=2), row(seed=2, created_at=later)]
    rows = [row(seed=0), row(seed=0), *again]
    undated = [row(seed=3, created_at=None), row(seed=3, created_at=None)]
    kept = without_duplicates(to_table([*rows, *undated]))
    assert kept.to_pylist() == to_table([*rows[1:], *undated]).to_pylist()


# --- readers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parts", "inbox"), [(3, 0), (3, 1), (8, 1), (9, 0)])
def test_a_reader_whose_listing_falls_into_a_join_sees_every_row_once(many, row, tmp_path, monkeypatch, parts, inbox):
    """The worst listing that a file system may give: only what was there both before and after."""
    store = many(parts)
    for seed in range(parts, parts + inbox):
        store.add([row(seed=seed)], "job")
    real, looks = Path.glob, [0]
    for when in range(20):
        copy = open_store(shutil.copytree(store.path, tmp_path / f"copy-{when}"))

        def worst(folder, pattern, copy=copy, when=when):
            before = set(real(folder, pattern))
            looks[0] += 1
            if looks[0] == when + 1:
                open_store(copy.path).compact(minimum=1)
            return iter(before & set(real(folder, pattern)))

        looks[0] = 0
        with monkeypatch.context() as patch:
            patch.setattr(Path, "glob", worst)
            found = copy.runs(["run_id", "seed"])
        assert sorted(found["seed"]) == list(range(parts + inbox)), when
        if looks[0] <= when:
            return
    pytest.fail("the join never came after the reader's last look")


def test_readers_beside_a_writer_see_what_was_stored_before_they_looked_and_nothing_twice(store, row):
    """The writer joins, again and again in the middle of their reading, then waits until each has come through."""
    stored, wrong, over = [], [], threading.Event()
    reads = {
        "runs": lambda opened: opened.runs(["run_id"])["run_id"].tolist(),
        "sql": lambda opened: opened.sql("SELECT run_id FROM runs")["run_id"].tolist(),
    }
    times = dict.fromkeys(reads, 0)

    def look(name):
        while not over.is_set():
            before = set(stored)
            found = reads[name](open_store(store.path))
            if len(set(found)) != len(found) or not before <= set(found):
                wrong.append((name, sorted(before), sorted(found)))
            times[name] += 1

    readers = [threading.Thread(target=look, args=(name,)) for name in reads]
    for reader in readers:
        reader.start()
    try:
        for seed in range(13):
            store.add([row(seed=seed)], "job")
            stored.append(run_id(row(seed=seed)))
            store.compact(minimum=1)
            passed = dict(times)
            while any(times[name] == passed[name] for name in reads) and all(reader.is_alive() for reader in readers):
                over.wait(0.01)
    finally:
        over.set()
        for reader in readers:
            reader.join()
    assert wrong == []
    assert levels(store) == [0, 1, 2]


# --- several files at once ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(), max_size=5 * AT_ONCE))
def test_each_keeps_the_order(numbers):
    files = [Path(str(number)) for number in numbers]
    assert in_parallel(lambda file: int(file.name), files) == numbers


def test_each_raises_what_its_action_raises(tmp_path):
    with pytest.raises(FileNotFoundError):
        in_parallel(lambda file: file.read_bytes(), [tmp_path / str(i) for i in range(40)])
