"""What a file would take in memory is told before it is unpacked."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp4dse.dse.program import bounds
from fp4dse.dse.program.bounds import is_compressed, why_parquet_too_large, why_too_large

MANY = 1 << 16


def texts(value: str, rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), rows), pa.array([value]))


@pytest.fixture(autouse=True)
def a_mebibyte_is_much(monkeypatch):
    monkeypatch.setattr(bounds, "LEAST_BYTES", 1 << 20)


@pytest.mark.parametrize(
    "column",
    [
        pa.repeat(pa.scalar(0), 1 << 18),
        pa.repeat(pa.scalar(0.5), 1 << 18),
        texts("x" * 100, MANY),
        texts("", 1 << 19),
        pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), texts("x" * 100, MANY).cast(pa.string())),
    ],
)
def test_one_value_many_times_is_counted_as_often_as_it_occurs(tmp_path, column):
    file = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"a": column}), file, compression="zstd")
    assert file.stat().st_size < 4096
    assert "of memory; the limit for a file of" in why_parquet_too_large(str(file), file.stat().st_size)


def test_texts_of_one_length_are_counted_with_it(tmp_path):
    file = tmp_path / "bomb.parquet"
    one = pa.DictionaryArray.from_arrays(
        pa.repeat(pa.scalar(0, pa.int32()), MANY), pa.array([b"x" * 100], pa.binary(100))
    )
    pq.write_table(pa.table({"a": one}), file, compression="zstd")
    assert "6.25 MiB of memory" in why_parquet_too_large(str(file), file.stat().st_size)


@pytest.mark.parametrize(("length", "refused"), [(10_000, True), (10, False)])
def test_texts_that_begin_as_the_one_before_are_counted_whole(tmp_path, length, refused):
    file = tmp_path / "bomb.parquet"
    encoding = {"use_dictionary": False, "column_encoding": {"a": "DELTA_BYTE_ARRAY"}}
    pq.write_table(pa.table({"a": ["x" * length] * 4000}), file, compression="zstd", **encoding)
    assert bool(why_parquet_too_large(str(file), file.stat().st_size)) == refused


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_an_arrow_message_says_whether_its_rows_are_compressed(compression):
    sink = pa.BufferOutputStream()
    table = pa.table({"a": pa.array(["x"] * 3).dictionary_encode(), "b": [0.0] * 3})
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    found = [is_compressed(message) for message in pa.ipc.MessageReader.open_stream(sink.getvalue())]
    assert found == [False, bool(compression), bool(compression)]


@pytest.mark.parametrize("column", [pa.array(range(100_000)), texts("nvfp4", 100_000), pa.nulls(100_000, pa.string())])
def test_ordinary_columns_are_not_refused(tmp_path, column):
    file = tmp_path / "fine.parquet"
    pq.write_table(pa.table({"a": column}), file)
    assert why_parquet_too_large(str(file), file.stat().st_size) is None


def test_a_large_file_may_take_many_times_its_size():
    assert why_too_large(256 << 20, 1 << 20) is None
    assert why_too_large((256 << 20) + 1, 1 << 20) == (
        "it would take 256 MiB of memory; the limit for a file of 1 MiB is 256 MiB"
    )
