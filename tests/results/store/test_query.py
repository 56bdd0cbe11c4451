import shutil

import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import ConfigError
from fp4dse.results import open_store
from fp4dse.results.store import compaction, query
from fp4dse.results.store.query import _union


@pytest.fixture(scope="module", params=["through Arrow", "DuckDB itself"])
def full(tmp_path_factory, row, request):
    """Every kind of row: several rates, diverged, failed, without a baseline, not positive, copied, retired.

    DuckDB reads parts itself if no row is retired. All tests share it; none changes it.
    """
    store = open_store(tmp_path_factory.mktemp("full") / "store", create=True)
    store.add([row("bf16", s, 0.5 + s / 10, lr=lr) for s in range(3) for lr in (1e-3, 2e-3)], "bf16")
    store.add([row("nvfp4", s, 0.6 + s / 10, lr=lr) for s in range(4) for lr in (1e-3, 2e-3)], "nvfp4")
    store.compact(minimum=1)
    store.add([row("mxfp4", 0, None), row("mxfp4", 1, 0.0), row("mxfp4", 2, status="failed")], "mxfp4")
    store.add([row("mxfp4-sr-rht", 0, np.nan), row("mxfp4-sr-rht", 1, -1.0)], "odd")
    store.add([row("nvfp4-sr", 0, task="regression", metric_name=None, val_metric=None)], "alone")
    store.add([row("mxfp4", 2, 0.9), row("nvfp4", 0, 0.6)], "again")
    if request.param == "through Arrow":
        store.add([row("nvfp4", 0, 0.1, rev_quantizers=0)], "old")
        store.invalidate("quantizers", below=1)
    return store


@pytest.fixture(scope="module")
def joined(full, tmp_path_factory):
    """The same rows, in one part."""
    path = tmp_path_factory.mktemp("joined") / "store"
    shutil.copytree(full.path, path)
    store = open_store(path)
    store.compact(minimum=1)
    return store


def test_the_view_runs_has_the_rows_and_values_of_runs(full):
    ours = full.runs().sort_values("run_id", ignore_index=True)
    theirs = full.sql("SELECT * FROM runs ORDER BY run_id")
    assert list(ours) == list(theirs)
    assert len(ours) == 20
    for name in ours:
        a, b = ours[name], theirs[name]
        assert (a.isna() == b.isna()).all(), name
        if name in ("gap", "baseline_loss"):
            assert b.tolist() == pytest.approx(a.tolist(), nan_ok=True), name
        elif name != "fallbacks":
            assert (a[a.notna()] == b[b.notna()]).all(), name
    assert np.isinf(theirs["gap"]).sum() == 2


def test_the_view_curves_has_one_curve_per_run(full):
    found = full.sql("SELECT curves.* FROM curves JOIN runs USING (run_id) WHERE status = 'done'")
    assert len(found) == full.runs(["status"])["status"].eq("done").sum()
    ours = full.curves(list(found["run_id"])).set_index("run_id")["curve_loss"]
    for run_id, losses in zip(found["run_id"], found["curve_loss"], strict=True):  # some hold NaN
        np.testing.assert_array_equal(losses, ours[run_id])


def test_an_empty_store_answers(store):
    assert store.sql("SELECT count(*) AS n FROM runs")["n"].tolist() == [0]
    assert "gap" in store.sql("DESCRIBE runs")["column_name"].tolist()


def test_sums_of_integers_are_numbers_and_not_objects(full):
    assert full.sql("SELECT sum(seed) AS s FROM runs")["s"].dtype == np.float64


def test_columns_of_the_same_name_are_told_apart(full):
    found = full.sql("SELECT a.seed, b.seed, b.seed FROM runs a JOIN runs b USING (run_id)")
    assert list(found) == ["seed", "seed_1", "seed_2"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("SELCT 1", "syntax error"),
        ("SELECT speed FROM runs", "speed"),
        ("SELECT * FROM read_csv('none.csv')", "none.csv"),
    ],
)
def test_a_wrong_query_is_one_line_that_says_what_is_wrong(full, text, says):
    with pytest.raises(ConfigError, match=says) as caught:
        full.sql(text)
    assert "\n" not in str(caught.value)


def test_a_query_cannot_change_the_store(full):
    before = full.info()
    for text in ("DELETE FROM rows", "DELETE FROM others", "CREATE TABLE x AS SELECT * FROM runs"):
        try:
            full.sql(text)
        except ConfigError:
            continue
    assert open_store(full.path).info() == before


@pytest.mark.parametrize(
    "text",
    [
        "COPY runs TO 'OUT'",
        "COPY runs TO 'PART' (USE_TMP_FILE false)",
        "EXPLAIN ANALYZE COPY runs TO 'OUT'",
        "WITH copied AS (cOpY (SELECT 1) TO 'OUT') SELECT 1",
        "SELECT 1; EXPORT DATABASE 'OUT'",
        "ATTACH 'OUT' AS other",
        "CREATE TABLE x AS SELECT * FROM runs",
        "SELECT * FROM enable_logging(storage = 'file', storage_path = 'OUT')",
        "SET enable_external_access = true",
    ],
)
def test_a_query_writes_nothing_anywhere(joined, tmp_path, text):
    part = min((joined.path / "parts").iterdir())
    before = part.read_bytes()
    with pytest.raises(ConfigError, match=r"only reads: SELECT|configuration has been locked"):
        joined.sql(text.replace("OUT", str(tmp_path / "out")).replace("PART", str(part)))
    assert not (tmp_path / "out").exists()
    assert part.read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "FROM runs",
        "DESCRIBE runs",
        "SUMMARIZE runs",
        "EXPLAIN FROM runs",
        "PIVOT runs ON status USING count(*)",
        "WITH a AS (SELECT 'a copy' AS copies) FROM a",
    ],
)
def test_all_that_reads_is_answered(full, text):
    assert len(full.sql(text))


@pytest.mark.parametrize("name", ["it's", "a[b]", "what?", "all*", 'two "words"', "ü"])
def test_a_store_may_have_any_name(tmp_path, row, name):
    store = open_store(tmp_path / name, create=True)
    store.add([row(seed=0)], "part")
    store.compact(minimum=1)
    store.add([row(seed=1)], "inbox")
    assert sorted(store.sql("SELECT seed FROM runs")["seed"]) == [0, 1]


def test_columns_and_types_are_the_same_whoever_reads_the_parts(store, row, monkeypatch):
    given = {"metrics": {"accuracy": 0.5, "other": None}, "pictures": {"samples": b"png"}, "fallbacks": ["eager"]}
    store.add([row("nvfp4", 0, **given), row("bf16", 0), row("mxfp4", 1, None)], "job")
    store.compact(minimum=1)
    texts = ("DESCRIBE runs", "DESCRIBE rows", "SELECT * FROM runs ORDER BY run_id", "SELECT * FROM rows ORDER BY ALL")
    itself = [store.sql(text) for text in texts]
    monkeypatch.setattr("fp4dse.results.store.query._readable_by_duckdb", lambda _: False)
    for text, found in zip(texts, itself, strict=True):
        pd.testing.assert_frame_equal(store.sql(text), found)


def test_a_part_that_vanishes_before_duckdb_reads_it_is_looked_for_again(store, row, monkeypatch):
    for seed in range(3):
        store.add([row(seed=seed)], "job")
        store.compact(minimum=1)
    gone = []

    def union_of_what_is_then_joined(files):
        text = _union(files)
        if not gone:
            gone.extend(files)
            with monkeypatch.context() as patch:
                patch.setattr(compaction, "JOIN_AT", 3)
                open_store(store.path).compact()
        return text

    monkeypatch.setattr(query, "_union", union_of_what_is_then_joined)
    assert sorted(store.sql("SELECT seed FROM runs")["seed"]) == [0, 1, 2]
    assert not any(file.exists() for file in gone)
