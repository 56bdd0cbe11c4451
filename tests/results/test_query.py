import numpy as np
import pytest

from fp4dse.dse import ConfigError
from fp4dse.results import open_store


@pytest.fixture
def full(store, row):
    """Every kind of row: several rates, diverged, failed, without a baseline, not positive, copied, retired."""
    store.add([row("bf16", s, 0.5 + s / 10, lr=lr) for s in range(3) for lr in (1e-3, 2e-3)], "bf16")
    store.add([row("nvfp4", s, 0.6 + s / 10, lr=lr) for s in range(4) for lr in (1e-3, 2e-3)], "nvfp4")
    store.compact(minimum=1)
    store.add([row("mxfp4", 0, None), row("mxfp4", 1, 0.0), row("mxfp4", 2, status="failed")], "mxfp4")
    store.add([row("mxfp4-sr-rht", 0, np.nan), row("mxfp4-sr-rht", 1, -1.0)], "odd")
    store.add([row("nvfp4-sr", 0, task="regression", metric_name=None, val_metric=None)], "alone")
    store.add([row("mxfp4", 2, 0.9), row("nvfp4", 0, 0.6)], "again")
    store.add([row("nvfp4", 0, 0.1, rev_quantizers=0)], "old")
    store.invalidate("quantizers", below=1)
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
    assert found["curve_loss"].iloc[0].tolist() == full.curves([found["run_id"].iloc[0]])["curve_loss"].iloc[0].tolist()


def test_an_empty_store_answers(store):
    assert store.sql("SELECT count(*) AS n FROM runs")["n"].tolist() == [0]
    assert "gap" in store.sql("DESCRIBE runs")["column_name"].tolist()


def test_sums_of_integers_are_numbers_and_not_objects(full):
    assert full.sql("SELECT sum(seed) AS s FROM runs")["s"].dtype == np.float64


def test_columns_of_the_same_name_are_told_apart(full):
    found = full.sql("SELECT a.seed, b.seed, b.seed FROM runs a JOIN runs b USING (run_id)")
    assert list(found) == ["seed", "seed_1", "seed_2"]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("SELCT 1", "syntax error"),
        ("SELECT speed FROM runs", "speed"),
        ("SELECT * FROM read_csv('none.csv')", "none.csv"),
    ],
)
def test_a_wrong_query_is_one_line_that_says_what_is_wrong(full, query, says):
    with pytest.raises(ConfigError, match=says) as caught:
        full.sql(query)
    assert "\n" not in str(caught.value)


def test_a_query_cannot_change_the_store(full):
    before = full.info()
    for query in ("DELETE FROM stored", "CREATE TABLE x AS SELECT * FROM runs"):
        try:
            full.sql(query)
        except ConfigError:
            continue
    assert open_store(full.path).info() == before
