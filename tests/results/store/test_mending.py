"""What is broken goes to torn/, what is whole comes back, and columns of a newer version are kept on the way."""

import pyarrow as pa
import pytest

from fp4dse.dse import StoreError
from fp4dse.results import open_store
from fp4dse.results.store import compaction, integrity
from fp4dse.results.store.inbox import encode_ipc
from fp4dse.results.store.integrity import file_name
from fp4dse.results.store.parquet import read_all
from fp4dse.results.store.schema import to_table


def flip(file):
    data = bytearray(file.read_bytes())
    data[300] ^= 1
    file.write_bytes(data)


@pytest.fixture
def filled(store, row):
    """A part and an inbox file."""
    store.add([row(seed=0)], "a")
    store.compact(minimum=1)
    store.add([row(seed=1)], "b")
    return store


def names(store, folder):
    return sorted(file.name for file in (store.path / folder).iterdir() if not file.name.startswith("."))


def test_mend_brings_back_what_is_whole_to_where_it_was(filled):
    inbox, parts = names(filled, "inbox"), names(filled, "parts")
    (filled.path / "torn").mkdir()
    for folder in ("inbox", "parts"):
        for file in (filled.path / folder).iterdir():
            file.rename(filled.path / "torn" / file.name)
    assert len(filled.runs()) == 0
    mended = filled.mend()
    assert (sorted(mended["returned"]), mended["broken"]) == (sorted([*inbox, *parts]), [])
    assert (names(filled, "inbox"), names(filled, "parts")) == (inbox, parts)
    assert sorted(filled.runs(["seed"])["seed"]) == [0, 1]


def test_mend_sets_aside_what_is_broken_says_why_and_takes_an_intact_copy_back(filled, monkeypatch):
    filled.done()
    monkeypatch.setattr(integrity, "_fingerprint", lambda _: [1])  # as if the times of change had stayed
    filled.done()
    files = [*(filled.path / "inbox").iterdir(), *(filled.path / "parts").iterdir()]
    intact = {file.name: file.read_bytes() for file in files}
    for file in files:
        flip(file)
    assert sorted(line.partition(":")[0] for line in filled.mend()["broken"]) == sorted(intact)
    assert names(filled, "torn") == sorted(intact)
    for name, data in intact.items():
        (filled.path / "torn" / name).write_bytes(data)
    assert sorted(filled.mend()["returned"]) == sorted(intact)
    assert sorted(filled.runs(["seed"])["seed"]) == [0, 1]
    assert filled.mend() == {"returned": [], "broken": []}


# --- columns of a newer version ----------------------------------------------------------------------------------


@pytest.fixture
def newer(store, row):
    """add(seed, column): an inbox file with a column that this version does not know."""
    integrity._warn_of.cache_clear()

    def add(seed, column, name="novelty"):
        table = to_table([row(seed=seed)]).append_column(name, column)
        data = encode_ipc(table)
        with store.lock():
            (store.path / "inbox" / file_name("newer", data, "arrow")).write_bytes(data)

    return add


def everything(store):
    return store._reader.read(read_all).sort_by("seed")


def test_columns_of_a_newer_version_are_kept_by_joins_and_merges_and_named_once(
    store, row, newer, caplog, tmp_path, monkeypatch
):
    monkeypatch.setattr(compaction, "JOIN_AT", 2)
    store.add([row(seed=0)], "a")
    newer(1, pa.array(["new"]))
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1]
    assert "novelty" not in store.runs()
    store.compact(minimum=1)
    newer(2, pa.array(["newer"]))
    store.compact(minimum=1)
    assert [compaction.level_of(part) for part in compaction.list_files(store.path, "parts")] == [1]
    assert everything(store)["novelty"].to_pylist() == [None, "new", "newer"]
    other = open_store(tmp_path / "other", create=True)
    assert other.merge(store) == 3
    assert everything(other)["novelty"].to_pylist() == [None, "new", "newer"]
    assert store.sql("SELECT count(*) n FROM runs")["n"].tolist() == [3]
    named_in = [message for message in caplog.messages if "novelty" in message]
    assert named_in == ["columns that this fp4dse does not know are kept but not shown; upgrade to read them: novelty"]


def test_columns_of_one_name_and_two_types_stay_in_two_parts(store, newer):
    newer(0, pa.array(["new"]))
    newer(1, pa.array([1.5]))
    assert store.compact(minimum=1) == 2
    assert len(names(store, "parts")) == 2
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1]


# --- the files beside the rows -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"engine": 1e400}', "engine: found inf; accepted: the first revision that counts"),
        ('{"engine": true}', "engine: found True"),
        ('{"vision": "2"}', "vision: found '2'"),
        ('{"engine": -1}', "engine: found -1"),
        ('{"engine": 99999999999999999999}', "engine: found 99999999999999999999"),
        ('{"engine": null}', "engine: found None"),
        ("[]", "found list; accepted: a JSON object"),
        ("{", "cannot be read"),
        ('{"a":' * 100_000, "cannot be read"),
    ],
)
def test_a_malformed_retired_json_is_an_error_that_names_the_fix_and_hides_nothing(filled, text, says):
    (filled.path / "retired.json").write_text(text)
    for act in (filled.runs, filled.done, filled.info, lambda: filled.sql("FROM runs")):
        with pytest.raises(StoreError, match=r"retired\.json: ") as caught:
            act()
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"mlp": 3}', "mlp: device_name: found '3'"),
        ('{"mlp": {"device_name": 3, "overheads": {}}}', "mlp: device_name"),
        ('{"mlp": {"device_name": "CPU"}}', "mlp: overheads: found 'None'"),
        ('{"mlp": {"device_name": "CPU", "overheads": {"x": "fast"}}}', "mlp: x: found 'fast'"),
        (
            '{"mlp": {"device_name": "CPU", "overheads": {"x": 1e400}}}',
            "mlp: x: found 'inf'; accepted: a time",
        ),
        ('{"mlp": {"device_name": "CPU", "overheads": {"x": NaN}}}', "mlp: x: found 'nan'"),
        ('{"mlp": {"device_name": "CPU", "overheads": {"x": 0}}}', "mlp: x: found '0'"),
        ("3", "found int; accepted: a JSON object"),
    ],
)
def test_a_malformed_measured_json_is_an_error_that_names_the_fix(filled, text, says):
    (filled.path / "measured.json").write_text(text)
    for act in (filled.runs, lambda: filled.sql("SELECT measured FROM runs")):
        with pytest.raises(StoreError, match=r"measured\.json: ") as caught:
            act()
        assert says in str(caught.value)


@pytest.mark.parametrize("nonsense", ["", "revision", "llama on b200, revision -3", "llama on b200, revision ²"])
def test_an_overhead_of_nobody_knows_what_is_an_error_that_says_so(filled, row, nonsense):
    filled.add([row("mxfp4", overhead_of=nonsense)], "made up")
    with pytest.raises(StoreError, match=r"overhead_of: found .*; accepted: model, chip and revision, as"):
        filled.pareto()


def test_a_store_merged_into_itself_gains_nothing(filled):
    assert filled.merge(open_store(filled.path)) == 0
    assert len(filled.runs()) == 2
