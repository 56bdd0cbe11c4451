"""Data of a few kilobytes that would take gigabytes is refused, not unpacked."""

import gzip
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp4dse.dse import ConfigError
from fp4dse.dse.program import bounds
from fp4dse.tasks.data.images import load_images
from fp4dse.tasks.data.tabular import read_table
from fp4dse.tasks.data.user_files import read_column


@pytest.fixture(autouse=True)
def a_mebibyte_is_much(monkeypatch):
    monkeypatch.setattr(bounds, "LEAST_BYTES", 1 << 20)


def write_idx(folder, declared, there):
    (folder / "train-images-idx3-ubyte.gz").write_bytes(
        gzip.compress(struct.pack(">4B3I", 0, 0, 8, 3, *declared) + bytes(there))
    )


def test_a_packed_idx_file_that_declares_too_much_is_refused(tmp_path):
    write_idx(tmp_path, (1 << 12, 1 << 10, 1 << 10), 0)
    with pytest.raises(ConfigError, match=r"train-images-idx3-ubyte.gz: .*it would take 4 GiB of memory; the limit"):
        load_images(str(tmp_path))


def test_of_a_packed_idx_file_no_more_is_unpacked_than_it_declares(tmp_path, monkeypatch):
    write_idx(tmp_path, (3, 28, 28), 1 << 22)
    asked = []
    real = gzip.GzipFile.read
    monkeypatch.setattr(gzip.GzipFile, "read", lambda self, size=-1: asked.append(size) or real(self, size))
    with pytest.raises(ConfigError, match="found 'more than 2352 bytes of data'; accepted: 3 × 28 × 28 bytes"):
        load_images(str(tmp_path))
    assert asked == [16, 2353]


def test_a_parquet_table_and_a_column_of_text_that_would_take_too_much_are_refused(tmp_path):
    file = tmp_path / "bomb.parquet"
    text = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 1 << 18), pa.array(["x" * 1000]))
    pq.write_table(pa.table({"text": text.cast(pa.string()), "y": pa.repeat(pa.scalar(0.0), 1 << 18)}), file)
    assert file.stat().st_size < 100_000
    with pytest.raises(ConfigError, match=r"bomb.parquet.*memory \(it would take"):
        read_column(file, "text")
    with pytest.raises(ConfigError, match=r"bomb.parquet.*memory \(it would take"):
        read_table(f"{file}:y")
