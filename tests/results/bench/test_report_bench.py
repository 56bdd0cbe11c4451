"""The report's bench measures what it says, on a store of the size it was asked for."""

import pytest

from fp4dse.results import open_store, summarize
from fp4dse.results.bench.browser import why_no_browser
from fp4dse.results.bench.report import TASKS, bench, fill


def test_the_generated_store_has_the_recipes_and_some_diverge(tmp_path):
    store = open_store(tmp_path / "store", create=True)
    fill(store, 400, seeds=2)
    runs = store.runs()
    lines = summarize(runs)
    assert (~lines["is_baseline"]).sum() == 400
    assert len(runs) == 2 * (400 + TASKS)
    assert 0 < lines["note"].eq("diverged").sum() < 40
    assert len(store.curves([runs["run_id"].iloc[0]])["curve_loss"].iloc[0]) == 64


@pytest.mark.slow
def test_every_row_has_a_value_where_there_is_a_browser():
    rows = list(bench(recipes=60, seeds=2, screened=40))
    assert [row["target"] for row in rows] == [20, 20, 15, 2, None, 200, None]
    assert all(row["value"] is not None for row in rows[: 3 if why_no_browser() else None])
