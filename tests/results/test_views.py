import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from fp4dse.dse import ConfigError
from fp4dse.results import open_store
from fp4dse.results.bench.generated import generated
from fp4dse.results.store.query import may_need_join
from fp4dse.results.views import BRIEF, VIEWS, VIEWS_READ, for_paper, to_arrow


@pytest.fixture(scope="module")
def three(tmp_path_factory, row):
    """A store of three recipes on three seeds, and its runs."""
    store = open_store(tmp_path_factory.mktemp("three") / "store", create=True)
    store.add(
        [row(r, s, 0.5 + 0.01 * s + i / 20) for i, r in enumerate(("bf16", "nvfp4", "mxfp4")) for s in (0, 1, 2)], "job"
    )
    return store, store.runs(VIEWS_READ)


@pytest.fixture(scope="module")
def made(three):
    """What the function of each view gives."""
    return {name: function(three[1]) for name, function in VIEWS.items()}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_holds_what_its_function_gives(three, made, name):
    ours, theirs = made[name], three[0].sql(f"SELECT * FROM {name}")
    assert list(theirs) == list(ours)
    assert len(theirs) == len(ours)
    for column in ours:
        a, b = ours[column], theirs[column]
        assert (a.isna() == b.isna()).all(), column
        assert (a[a.notna()].to_numpy() == b[b.notna()].to_numpy()).all(), column


@pytest.mark.parametrize("name", VIEWS)
def test_what_a_narrow_terminal_shows_of_a_view_are_columns_that_it_has(made, name):
    assert set(" ".join(BRIEF[name]).split()) <= set(made[name])


def test_effects_for_a_paper_are_six_columns_that_tell_every_row_apart():
    runs = generated(("*.g.rounding", "wgrad.rotation", "*.scale"), seeds=2)
    whole = VIEWS["effects"](runs.assign(baseline_loss=0.5, gap=np.linspace(0.1, 0.2, len(runs))))
    found = for_paper("effects", whole)
    assert list(found) == ["factor", "level", "with", "effect", "low", "high"]
    assert len(found) == len(whole)
    assert not found.duplicated(["factor", "level", "with"]).any()
    pairs = whole["with_factor"].notna()
    assert found["with"].notna().tolist() == pairs.tolist()


@pytest.fixture(scope="module")
def many():
    runs = generated(("*.g.rounding", "wgrad.rotation", "*.scale"), seeds=2)
    return runs.assign(baseline_loss=0.5, gap=0.1)


@pytest.mark.parametrize("name", VIEWS)
def test_columns_of_a_view_have_their_type_even_without_rows(many, name):
    runs = many
    full, empty = to_arrow(name, runs), to_arrow(name, runs.iloc[:0])
    assert full.column_names == empty.column_names
    for field in full.schema:
        other = empty.schema.field(field.name).type
        text = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        assert (text == pa.types.is_string(other)) or field.type == pa.null(), field.name


def test_views_of_an_empty_store_are_empty_and_can_be_asked(store):
    of_task = {name: "" if name == "pooled" else "WHERE task = 'vision'" for name in VIEWS}
    counts = [f"(SELECT count(*) FROM {name} {where})" for name, where in of_task.items()]
    assert not store.sql(f"SELECT {', '.join(counts)}").any(axis=None)
    assert store.sql("SELECT count(*) n FROM effects WHERE factor = 'x' AND effect < 0")["n"].tolist() == [0]


def test_a_view_is_made_only_for_a_query_that_names_it(store, row, monkeypatch):
    store.add([row("bf16"), row("nvfp4")], "job")
    made = []
    for name, function in VIEWS.items():
        monkeypatch.setitem(VIEWS, name, lambda runs, name=name, function=function: made.append(name) or function(runs))
    store.sql("SELECT count(*) FROM runs")
    assert made == []
    store.sql("SELECT * FROM recipes JOIN Front USING (config_id)")
    assert made == ["recipes", "front"]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT gap FROM runs",
        "SELECT baseline_loss FROM runs",
        "SELECT * FROM runs",
        "SELECT runs.* FROM runs",
        "SELECT * EXCLUDE (gap) FROM runs",
        "FROM runs",
        "DESCRIBE runs",
        "SUMMARIZE runs",
        "SELECT runs FROM runs",
        "SELECT r FROM runs r",
        "SELECT r FROM runs AS r",
        "SELECT seed FROM (FROM runs) WHERE 1",
        "SELECT COLUMNS('g.*') FROM runs",
        "TABLE runs",
        "WITH a AS (FROM runs) SELECT seed FROM a",
        'SELECT seed FROM "runs"',
    ],
)
def test_a_query_that_may_want_the_gap_gets_it(query):
    assert may_need_join(query)


@pytest.mark.parametrize(
    "query",
    [
        "SELECT seed, count(*) FROM runs WHERE status = 'done' GROUP BY ALL",
        "SELECT avg(val_loss) FROM runs",
        "SELECT seed FROM curves JOIN runs USING (run_id) ORDER BY 1",
        "SELECT count( * ) FROM (SELECT seed FROM runs)",
    ],
)
def test_a_query_that_names_its_columns_is_spared_the_join(query):
    assert not may_need_join(query)


@pytest.mark.parametrize("n", [0, 1, 2, 1000])
def test_repeated_rows_are_found_whatever_the_ids(n):
    from fp4dse.results.store.parquet import is_duplicate

    ids = [f"{i * 7919:016x}" for i in range(n)]
    assert not is_duplicate(pa.table({"run_id": pa.array(ids, pa.string())})).any()
    again = pa.table({"run_id": pa.array([*ids, *ids[-1:], "short"], pa.string())}).slice(min(n, 1))
    expected = pd.Series(again["run_id"].to_pylist(), dtype=object).duplicated(keep=False)
    assert is_duplicate(again).tolist() == expected.tolist()
    twice = pa.chunked_array([pa.array(ids, pa.string()), pa.array(ids, pa.string())])
    assert is_duplicate(pa.table({"run_id": twice})).sum() == 2 * n


def test_a_wrong_query_names_the_views(store):
    with pytest.raises(ConfigError, match="runs, curves, recorded, recipes, front, confirmed, hypervolume, effects"):
        store.sql("SELECT nothing FROM nowhere")


def test_nan_in_a_view_is_null_and_not_a_number(store, row):
    store.add([row("bf16", 0), row("nvfp4", 0, 0.6)], "job")
    found = store.sql("SELECT count(gap_low) AS n, count(gap) AS m FROM recipes")
    assert (found["n"].item(), found["m"].item()) == (0, 2)
    assert np.isnan(store.sql("SELECT gap_low FROM recipes")["gap_low"]).all()
