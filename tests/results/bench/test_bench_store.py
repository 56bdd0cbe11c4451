import pyarrow as pa
import pyarrow.compute
import pytest

from fp4dse.results.bench.store import LANES_PER_FILE, POINTS, _fill_inbox, _fill_parts, bench, lanes
from fp4dse.results.store.schema import ROW, run_id


@pytest.mark.heavy
def test_the_bench_measures_what_it_says_and_names_its_targets():
    lines = list(bench(rows=300, files=5, recipes=60, screened=40))
    assert [line["target_s"] for line in lines] == [20.0, 0.5, None, 5.0, 5.0, 5.0, 5.0, None, None]
    assert all(line["seconds"] >= 0 for line in lines)
    assert "5 inbox files" in lines[0]["what"]
    assert "300 rows with curves" in lines[1]["what"]


def test_generated_stores_hold_real_rows(store):
    _fill_inbox(store, 5)
    assert len(store.runs()) == 5 * LANES_PER_FILE
    assert store.compact(1) == 5
    assert store.runs()["gap"].notna().any()
    _fill_parts(store, 100)
    assert store.info()["part_files"] == 2


def test_generated_lanes_have_every_column_that_a_sweep_fills():
    table = lanes(40)
    assert table.schema.equals(ROW)
    assert set(pa.compute.list_value_length(table["curve_loss"]).to_pylist()) == {POINTS}
    rows = table.to_pylist()
    assert len({run_id(row) for row in rows}) == len({row["run_id"] for row in rows}) == 40
