import errno
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp4dse.dse import ConfigError, StoreError
from fp4dse.dse.cost import OVERHEAD_OF
from fp4dse.results import Store, add_gap, open_store, run_id
from fp4dse.results.stats.paired import DERIVED
from fp4dse.results.store import reader
from fp4dse.results.store.inbox import encode_ipc
from fp4dse.results.store.schema import BY_NAME, ROW, SCHEMA_VERSION
from tests.forked import Forked


def one_line(caught) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


def copy(store: Store, to) -> Store:
    shutil.copytree(store.path, to)
    return open_store(to)


def set_version(store: Store, version) -> None:
    (store.path / "store.json").write_text(json.dumps({"schema_version": version}))


# --- what goes in comes out --------------------------------------------------------------------------------------


def test_every_column_of_a_row_comes_back_as_it_was(store, row):
    given = row("nvfp4-sr-rht", 3, 0.25, fallbacks=["no compiler"])
    store.add([given], "job-1")
    found = store.runs(curves=True).iloc[0]
    for name, value in given.items():
        if value is None:
            assert pd.isna(found[name]), name
        elif isinstance(value, list):
            assert list(found[name]) == value, name
        else:
            assert found[name] == value, name
    assert found["run_id"] == run_id(given)
    assert found["schema_version"] == SCHEMA_VERSION


def test_a_hole_in_a_count_does_not_make_it_a_fraction(store, row):
    store.add([row("bf16", threads=None), row("nvfp4", threads=16)], "job")
    assert store.runs()["threads"].tolist() == [pd.NA, 16]


def test_runs_have_the_gap_of_stats_and_no_curves_unless_asked(store, row):
    store.add([row(name, seed, loss) for name, loss in (("bf16", 0.5), ("nvfp4", 0.6)) for seed in (0, 1)], "job")
    runs = store.runs()
    assert "curve_loss" not in runs
    pd.testing.assert_frame_equal(add_gap(runs.drop(columns=DERIVED)), runs)
    assert runs.groupby("recipe_name")["gap"].first().to_dict() == pytest.approx({"bf16": 0, "nvfp4": np.log(1.2)})


def test_runs_reads_only_the_columns_asked_for(store, row):
    store.add([row("bf16", 0, 0.5), row("nvfp4", 0, 0.6)], "job")
    assert list(store.runs(["recipe_name", "gap"])) == ["recipe_name", "gap"]
    assert store.runs(["gap"])["gap"].tolist() == pytest.approx([0, np.log(1.2)])
    with pytest.raises(ConfigError, match=r"column: found 'speed'; accepted: .*val_loss"):
        store.runs(["speed"])


def test_an_empty_store_has_all_columns_and_no_rows(store):
    assert len(store.runs()) == 0
    assert set(ROW.names) - set(BY_NAME) < set(store.runs(curves=True))
    assert store.done() == set()
    assert store.pareto().empty
    assert store.info()["runs"] == 0


def test_curves_are_read_for_the_runs_asked_for(store, row):
    rows = [row("nvfp4", seed) for seed in range(3)]
    store.add(rows, "job")
    found = store.curves([run_id(rows[1])])
    assert found["run_id"].tolist() == [run_id(rows[1])]
    assert found["curve_loss"].iloc[0].tolist() == rows[1]["curve_loss"]


def test_pareto_holds_the_front(store, row):
    store.add([row(name, 0, loss) for name, loss in (("bf16", 0.5), ("nvfp4", 0.6), ("mxfp4", 0.5))], "job")
    assert store.pareto()["name"].tolist() == ["mxfp4"]
    assert store.pareto("bits_per_element")["name"].tolist() == ["mxfp4"]


# --- one row per run ---------------------------------------------------------------------------------------------


def test_a_finished_row_beats_a_failed_one_whichever_came_first(store, row):
    done = row("nvfp4", 0)
    later = done["created_at"] + timedelta(hours=1)
    store.add([done], "first")
    store.add([{**done, "status": "failed", "val_loss": None, "created_at": later}], "second")
    store.add([{**row("nvfp4", 1), "status": "failed"}], "third")
    store.add([row("nvfp4", 1, None, created_at=later)], "fourth")
    assert store.runs(["seed", "status"]).set_index("seed")["status"].to_dict() == {0: "done", 1: "diverged"}


def test_of_two_finished_rows_the_newer_one_counts(store, row):
    for hours, loss in ((2, 0.2), (3, 0.3), (1, 0.1)):
        store.add([row(loss=loss, created_at=row()["created_at"] + timedelta(hours=hours))], "job")
    assert store.runs()["val_loss"].tolist() == [0.3]


def test_the_same_rows_added_twice_are_one_file(store, row):
    store.add([row()], "job")
    store.add([row()], "job")
    assert store.info()["inbox_files"] == 1


def test_jobs_of_the_same_name_do_not_overwrite_each_other(store, row):
    store.add([row(seed=0)], "job/../1")
    store.add([row(seed=1)], "job/../1")
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1]


def test_done_are_the_lanes_that_need_no_training(store, row):
    store.add([row(seed=0), row(seed=1, loss=None), row(seed=2, status="failed")], "job")
    assert store.done() == {run_id(row(seed=0)), run_id(row(seed=1))}


# --- compaction, merging, retiring -------------------------------------------------------------------------------


def test_compaction_changes_no_answer(store, row):
    store.add([row("bf16", seed) for seed in range(3)], "a")
    for seed in range(3):
        store.add([row("nvfp4", seed, 0.5 + seed)], f"job-{seed}")
    before, done = store.runs(curves=True), store.done()
    assert store.compact(minimum=5) == 0
    assert store.compact(minimum=4) == 4
    assert (store.info()["inbox_files"], store.info()["part_files"]) == (0, 1)
    after = store.runs(curves=True)
    order = ["run_id"]
    pd.testing.assert_frame_equal(
        before.sort_values(order, ignore_index=True), after.sort_values(order, ignore_index=True)
    )
    assert store.done() == done


def test_merge_takes_over_what_is_missing_and_nothing_twice(store, row, tmp_path):
    store.add([row(seed=0), row(seed=1, status="failed")], "job")
    other = open_store(tmp_path / "other", create=True)
    other.add([row(seed=0, status="failed"), row(seed=1), row(seed=2)], "job")
    assert store.merge(other) == 2
    assert store.runs(["seed", "status"]).sort_values("seed")["status"].tolist() == ["done"] * 3
    files = store.info()["part_files"]
    assert store.merge(other) == 0
    assert store.merge(store) == 0
    assert store.info()["part_files"] == files
    assert other.merge(store) == 1
    assert other.done() == store.done()


def test_merge_brings_the_rules_of_retirement_along(store, row, tmp_path):
    other = open_store(tmp_path / "other", create=True)
    other.add([row(seed=0, rev_engine=1), row(seed=1, rev_engine=2)], "job")
    other.invalidate("engine", below=2)
    store.merge(other)
    assert store.runs(["seed"])["seed"].tolist() == [1]
    assert store.info()["retired"] == 1
    assert store.merge(other) == 0
    store.invalidate("engine", below=3)
    store.merge(other)  # its rule is the weaker one
    assert store.retired() == {"engine": 3}


@pytest.mark.parametrize(
    ("component", "column", "hidden"),
    [
        ("quantizers", "rev_quantizers", {"vision", "regression"}),
        ("engine", "rev_engine", {"vision", "regression"}),
        ("vision", "rev_task", {"vision"}),
    ],
)
def test_invalidate_hides_older_revisions_and_deletes_nothing(store, row, component, column, hidden):
    tasks = ("vision", "regression")
    store.add([row(task=task, **{column: rev}) for task in tasks for rev in (1, 2, 3)], "job")
    assert store.invalidate(component, below=3) == 2 * len(hidden)
    kept = store.runs()
    assert {(task, rev) for task, rev in zip(kept["task"], kept[column], strict=True)} == {
        (task, rev) for task in tasks for rev in (1, 2, 3) if task not in hidden or rev == 3
    }
    assert store.done() == set(kept["run_id"])
    assert store.sql("SELECT run_id FROM runs")["run_id"].isin(kept["run_id"]).all()
    store.compact(minimum=1)
    assert store.invalidate(component, below=2) == 0  # a lower rule takes nothing back
    assert store.info()["retired"] == 2 * len(hidden)


def test_invalidate_names_the_components_that_there_are(store, row):
    store.add([row()], "job")
    with pytest.raises(ConfigError, match="component: found 'visoin'; accepted: quantizers, engine, vision"):
        store.invalidate("visoin", below=2)


# --- what is no store, and what an older or newer program wrote --------------------------------------------------


def test_a_missing_store_is_named_with_what_to_do(tmp_path):
    with pytest.raises(StoreError, match=r"not a store.*no such folder.*fp4dse sweep") as caught:
        open_store(tmp_path / "none")
    one_line(caught)


def test_a_folder_that_holds_something_else_does_not_become_a_store(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    for create in (False, True):
        with pytest.raises(StoreError, match="not a store"):
            open_store(tmp_path, create=create)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_store_of_a_newer_schema_is_neither_read_nor_written(store, row):
    store.add([row()], "job")
    set_version(store, SCHEMA_VERSION + 1)
    with pytest.raises(StoreError, match=r"newer fp4dse.*upgrade") as caught:
        open_store(store.path)
    one_line(caught)
    with pytest.raises(StoreError, match="newer fp4dse"):
        store.add([row()], "job")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema_version": "new"}'])
def test_a_broken_store_json_is_reported(store, text):
    (store.path / "store.json").write_text(text)
    with pytest.raises(StoreError, match=r"store\.json") as caught:
        open_store(store.path)
    one_line(caught)


def older(file) -> pa.Table:
    """The rows of an inbox file as an earlier version had them."""
    return (
        pa.ipc.open_file(pa.py_buffer(file.read_bytes()))
        .read_all()
        .drop_columns(["signature", "threads", "curve_loss"])
    )


def as_parquet(file) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(older(file), sink)
    instead_of(file, sink.getvalue().to_pybytes(), "parquet")


def as_arrow(file) -> None:
    instead_of(file, encode_ipc(older(file)), "arrow")


def instead_of(file, data, ending) -> None:
    """Under a name as versions until 2026 gave it."""
    digest = hashlib.sha256(data).hexdigest()
    file.with_name(f"new-{digest[:8]}.{ending}").write_bytes(data)
    file.unlink()


@pytest.mark.parametrize("rewrite", [as_parquet, as_arrow])
@pytest.mark.parametrize("joined", [False, True])
def test_columns_that_an_older_file_lacks_read_as_null(store, row, rewrite, joined):
    store.add([row(seed=1)], "new")
    rewrite(next((store.path / "inbox").glob("*.arrow")))
    if joined:
        store.compact(minimum=1)
    set_version(store, SCHEMA_VERSION - 1)
    old = open_store(store.path)
    old.add([row(seed=2)], "newer")
    found = old.runs(curves=True).sort_values("seed")
    assert found["threads"].tolist() == [pd.NA, row()["threads"]]
    assert found["signature"].isna().tolist() == [True, False]
    assert found["curve_loss"].isna().tolist() == [True, False]
    assert old.sql("SELECT count(threads) n FROM runs")["n"].tolist() == [1]


def test_a_store_from_before_the_cost_model_reads_with_nulls_and_is_priced(store, row):
    store.add([row()], "old")
    file = next((store.path / "inbox").iterdir())
    rows = pa.ipc.open_file(pa.py_buffer(file.read_bytes())).read_all()
    instead_of(file, encode_ipc(rows.drop_columns(["overhead", "overhead_of", "activation_bits"])), "arrow")
    set_version(store, 2)
    found = open_store(store.path).runs()
    assert found["activation_bits"].isna().all()
    assert set(found["overhead_of"]) == {OVERHEAD_OF}
    assert found["overhead"].tolist() == [row()["overhead"]]
    assert found["points"].notna().all()


def test_writing_raises_the_version_of_an_older_store(store, row):
    set_version(store, SCHEMA_VERSION - 1)
    assert open_store(store.path).version() == SCHEMA_VERSION - 1
    store.add([row()], "job")
    assert store.version() == SCHEMA_VERSION


# --- what a disk can do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"ARROW1 and then the power went", None])
def test_an_unreadable_inbox_file_is_left_out_reported_and_kept(store, row, caplog, content):
    store.add([row(seed=0)], "good")
    store.add([row(seed=1)], "bad")
    bad = next((store.path / "inbox").glob("bad*"))
    bad.write_bytes(bad.read_bytes()[:-7] if content is None else content)
    with caplog.at_level(logging.WARNING):
        assert store.runs(["seed"])["seed"].tolist() == [0]
        assert store.runs(["seed"])["seed"].tolist() == [0]
    assert [str(bad) in message for message in caplog.messages] == [True]
    assert store.info()["torn"] == [str(bad)]
    assert store.done() == {run_id(row(seed=0))}
    store.compact(minimum=1)
    aside = store.path / "torn" / bad.name
    assert aside.exists()
    assert open_store(store.path).info()["torn"] == [str(aside)]
    assert open_store(store.path).runs(["seed"])["seed"].tolist() == [0]


def test_a_broken_part_is_left_out_named_with_what_is_missing_and_moved_aside(store, row, caplog):
    store.add([row(seed=0)], "a")
    store.compact(minimum=1)
    store.add([row(seed=1), row(seed=2)], "b")
    [good] = (store.path / "parts").iterdir()
    store.compact(minimum=1)
    [part] = set((store.path / "parts").iterdir()) - {good}
    data = bytearray(part.read_bytes())
    data[200] ^= 1
    part.write_bytes(data)
    assert store.runs(["seed"])["seed"].tolist() == [0]
    [message] = caplog.messages
    assert str(part) in message
    assert "Missing now: 2 lanes. The same `fp4dse sweep` trains them again" in message
    assert store.sql("SELECT seed FROM runs")["seed"].tolist() == [0]
    store.compact()
    assert open_store(store.path).info()["torn"] == [str(store.path / "torn" / part.name)]
    assert good.exists()


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (errno.ENOSPC, "the disk is full; what was stored before is safe"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "no permission"),
        (errno.EIO, "cannot be written"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_the_disk_refuses_is_reported_and_leaves_nothing_behind(store, row, monkeypatch, code, says, call):
    store.add([row(seed=0)], "job")

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(StoreError, match=says) as caught:
            store.add([row(seed=1)], "job")
        one_line(caught)
        with pytest.raises(StoreError, match=says):
            store.compact(minimum=1)
    assert not list((store.path / "inbox").glob(".*"))
    assert store.runs(["seed"])["seed"].tolist() == [0]
    store.add([row(seed=1)], "job")
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1]


def test_a_store_that_cannot_be_made_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EROFS, "Read-only")))
    with pytest.raises(StoreError, match="read-only"):
        open_store(tmp_path / "store", create=True)


def test_a_read_only_store_can_be_read(store, row, monkeypatch):
    store.add([row()], "job")
    real = os.open

    def read_only(path, flags, *rest, **options):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system")
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    again = open_store(store.path)
    assert len(again.runs()) == 1
    assert again.info()["runs"] == 1
    with pytest.raises(StoreError, match="read-only"):
        again.add([row()], "job")


def test_a_file_joined_into_a_part_while_reading_is_found_there(store, row, monkeypatch):
    for seed in range(3):
        store.add([row(seed=seed)], "job")
    listed, compacted = reader.list_files, []

    def list_then_compact(place, folder):
        files = listed(place, folder)
        if not compacted:  # after the first folder is listed, before the second
            compacted.append(True)
            open_store(store.path).compact(minimum=1)
        return files

    monkeypatch.setattr(reader, "list_files", list_then_compact)
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1, 2]
    assert compacted


# --- one writer --------------------------------------------------------------------------------------------------


def hold(path: Path) -> None:
    with open_store(path).lock():
        print("held", flush=True)
        sys.stdin.read()


def test_a_second_writer_is_told_who_holds_the_store(store, row):
    store.add([row(seed=0)], "job")
    with Forked(lambda: hold(store.path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        for write in (lambda: store.add([row()], "x"), store.compact, lambda: store.invalidate("engine", 2)):
            with pytest.raises(StoreError, match=f"process {holder.pid} on .* is writing") as caught:
                write()
            one_line(caught)
        assert len(store.runs()) == 1
        holder.kill()
    store.add([row(seed=1)], "job")
    assert len(store.runs()) == 2


def test_the_holder_of_the_lock_may_write_as_often_as_it_likes(store, row):
    with store.lock():
        store.add([row(seed=0)], "job")
        store.compact(minimum=1)
        with store.lock():
            store.add([row(seed=1)], "job")
        with pytest.raises(StoreError, match="is writing"):
            open_store(store.path).add([row(seed=2)], "job")
    open_store(store.path).add([row(seed=2)], "job")
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1, 2]


def test_metrics_and_pictures_are_read_by_name_when_asked_for(tmp_path, row):
    store = open_store(tmp_path / "s", create=True)
    store.add([{**row("bf16", 0), "metrics": {"accuracy": 0.5, "other": None}, "pictures": {"samples": b"png"}}], "job")
    runs = store.runs()
    assert not {"metrics", "pictures"} & set(runs.columns)
    (found,) = store.by_name(list(runs["run_id"])).to_dict("records")
    assert found["metrics"] == {"accuracy": 0.5, "other": None}
    assert found["pictures"] == {"samples": b"png"}


RECORDED = {"step": [1.0, 2.0, 4.0], "gnr": [5.0, None, 4.0], "flushed/fprop.x": [0.1, 0.2, 0.3]}
RECORDED |= {"reward": [0.5, 0.6, None, 0.8, 0.9], "step/reward": [1.0, 2.0, 3.0, 4.0, 5.0]}


@pytest.mark.parametrize("joined", [False, True])
def test_what_was_recorded_is_a_view_with_a_line_for_each_number(store, row, joined):
    older = {name: RECORDED[name] for name in ("step", "gnr")}
    store.add([row(seed=0, recorded=list(RECORDED.items())), row(seed=1), row(seed=2, recorded=older)], "job")
    if joined:
        store.compact(minimum=1)
    found = store.sql("SELECT seed, name, step, value FROM recorded JOIN runs USING (run_id) ORDER BY seed, name, step")
    expected = [
        (0, name, int(step), value)
        for name in ("flushed/fprop.x", "gnr", "reward")
        for step, value in zip(RECORDED.get(f"step/{name}", RECORDED["step"]), RECORDED[name], strict=True)
    ]
    expected += [(2, *line[1:]) for line in expected if line[1] == "gnr"]
    assert [(*line[:3], None if pd.isna(line[3]) else line[3]) for line in found.itertuples(index=False)] == expected
    ids = store.runs(["run_id", "seed"]).set_index("seed")["run_id"]
    assert store.recorded(list(ids)) == {ids[0]: RECORDED, ids[2]: older}


def test_runs_of_some_recipes_come_with_their_baselines_and_the_same_gaps(store, row):
    losses = {"bf16": 0.5, "nvfp4": 0.6, "mxfp4": 0.7}
    store.add([row(name, seed, loss + seed / 10) for name, loss in losses.items() for seed in range(2)], "a")
    some, every = store.runs(recipes=[row("nvfp4")["config_id"]]), store.runs()
    assert set(some["recipe_name"]) == {"bf16", "nvfp4"}
    assert some["gap"].tolist() == every[every["recipe_name"].isin(["bf16", "nvfp4"])]["gap"].tolist()
    assert set(store.runs(recipes=[])["recipe_name"]) == {"bf16"}
