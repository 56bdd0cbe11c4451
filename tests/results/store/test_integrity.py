"""A file of the store is what was written, or it is noticed; what cannot be read now is no broken file."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp4dse.dse import StoreError
from fp4dse.results import open_store
from fp4dse.results.store import integrity
from fp4dse.results.store.inbox import encode_ipc, read_ipc
from fp4dse.results.store.integrity import Broken, VerifiedFiles, digest_in, file_name
from fp4dse.results.store.parquet import encode, read_part
from fp4dse.results.store.schema import to_table

FLIP = """
import json, sys
from pathlib import Path
from fp4dse.results import open_store
from fp4dse.results.store import reader
reader.count_lanes = lambda file: "some lanes"
file, positions = Path(sys.argv[1]), json.loads(sys.stdin.read())
data = file.read_bytes()
asks = (lambda store: store.runs(["seed"]), lambda store: store.sql("SELECT seed FROM runs"))
for number, (position, bit) in enumerate(positions):
    flipped = bytearray(data)
    flipped[position] ^= 1 << bit
    file.write_bytes(flipped)
    store = open_store(file.parent.parent)
    seeds = asks[number % 2](store)["seed"].tolist()
    print(json.dumps([position, bit, list(map(str, store._reader.left_out)), seeds]), flush=True)
"""


@pytest.mark.heavy
@pytest.mark.parametrize("kind", ["inbox", "parts"])
def test_a_flipped_bit_anywhere_in_a_file_is_noticed_and_crashes_nothing(store, row, kind):
    """Magic numbers, schema, rows, footer and its length: the first and last 12 bytes, and 12 places between them. It
    is read in two ways in turn."""
    store.add([row(name, seed=1) for name in ("nvfp4", "mxfp4")], "flipped")
    if kind == "parts":
        store.compact(minimum=1)
    store.add([row(seed=0)], "intact")
    [file] = [file for file in (store.path / kind).iterdir() if not file.name.startswith("intact")]
    size = file.stat().st_size
    places = sorted({*range(12), *range(size - 12, size), *np.linspace(12, size - 12, 12).astype(int).tolist()})
    flips = [(place, place % 8) for place in places]
    command = [sys.executable, "-c", FLIP, str(file)]
    asked = subprocess.run(command, input=json.dumps(flips), capture_output=True, text=True)
    assert asked.returncode == 0, asked.stderr[-2000:]
    found = [json.loads(line) for line in asked.stdout.splitlines()]
    assert len(found) == len(flips)
    assert all(left_out == [str(file)] and seeds == [0] for _, _, left_out, seeds in found)


def flip(file, place=200):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.fixture
def parts(store, row):
    """Two parts of a row each."""
    for seed in range(2):
        store.add([row(seed=seed)], "job")
        store.compact(minimum=1)
    return sorted((store.path / "parts").iterdir())


def test_a_bit_that_flips_after_a_part_was_verified_meets_the_checksums_of_its_pages(store, parts, monkeypatch, caplog):
    monkeypatch.setattr(integrity, "_fingerprint", lambda _: [1, 2, 3])  # the times of change stay
    assert len(store.runs()) == 2
    flip(parts[0], 4 + 30)
    assert len(store.runs(["run_id", "seed"])) == 2 or caplog.messages  # another page may have been read
    assert len(store.runs(curves=True)) == 1
    assert "left out, it is broken" in caplog.text


def test_a_part_is_verified_once_and_again_when_it_changed_or_was_copied(store, parts, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    seen = []
    real = integrity.check
    monkeypatch.setattr(integrity, "broken_file", lambda file: seen.append(file) or real(file) or {})
    for _ in range(2):
        assert len(open_store(store.path).runs()) == 2
    assert sorted(seen) == parts
    os.utime(parts[0])
    open_store(store.path).done()
    assert seen[2:] == [parts[0]]
    copy = shutil.copytree(store.path, tmp_path / "copy")
    open_store(copy).done()
    assert sorted(seen[3:]) == sorted((copy / "parts").iterdir())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"parts/x": 3}', b"[" * 100_000])
def test_what_was_remembered_may_be_lost_or_nonsense(store, parts, content):
    store.done()
    memory = VerifiedFiles(store.path)._file
    assert memory.exists()
    memory.write_bytes(content)
    flip(parts[0])
    assert len(open_store(store.path).runs()) == 1


@pytest.mark.usefixtures("parts")
def test_a_user_who_may_remember_nothing_reads_all_the_same(store, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(open_store(store.path).runs()) == 2


def test_files_have_their_digest_in_their_names(store, row):
    store.add([row()], "job 1")
    [file] = (store.path / "inbox").iterdir()
    assert file.name == file_name("job-1", file.read_bytes(), "arrow")
    assert digest_in(file.name) == file.name[6:22]
    assert digest_in("job-1-0a1b2c3d.parquet") == "0a1b2c3d"
    assert digest_in("join1-0123456789abcdef.parquet") == "0123456789abcdef"
    assert digest_in("000000100.parquet") is None
    assert digest_in("mine.arrow") is None


@pytest.mark.parametrize("name", ["mine.parquet", "mine.arrow"])
def test_a_file_of_unknown_origin_is_read_if_arrow_finds_it_valid(store, row, name):
    rows = to_table([row()])
    data = encode(rows) if name.endswith("parquet") else encode_ipc(rows)
    (store.path / "inbox").mkdir()
    (store.path / "inbox" / name).write_bytes(data)
    assert len(store.runs()) == 1
    (store.path / "inbox" / name).write_bytes(bytes(data)[:-50])
    assert len(store.runs()) == 0


def test_texts_that_are_no_utf8_and_lists_without_end_are_found_in_a_file_without_a_digest(store, row):
    data = bytes(encode_ipc(to_table([row()])))
    (store.path / "inbox").mkdir()
    file = store.path / "inbox" / "mine.arrow"
    file.write_bytes(data.replace(b"vision", b"vis\xff\xffn"))
    assert "Invalid UTF8" in read_ipc([file])[1][file]
    assert len(store.runs()) == 0


def test_parts_have_checksums_and_whole_compares_them(row, tmp_path):
    data = bytearray(encode(to_table([row()])))
    data[4 + 30] ^= 1
    (tmp_path / "a.parquet").write_bytes(data)
    with pytest.raises(Broken, match=r"CRC|checksum|[Tt]hrift|Corrupt|Deserial"):
        read_part(tmp_path / "a.parquet")


# --- what cannot be read now -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["inbox", "parts"])
@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "Input/output error")])
def test_a_file_that_cannot_be_read_now_is_an_error_and_stays_where_it_is(store, row, monkeypatch, kind, error):
    store.add([row(seed=0)], "job")
    if kind == "parts":
        store.compact(minimum=1)
    [file] = (store.path / kind).iterdir()

    owner, name = (Path, "read_bytes") if kind == "inbox" else (integrity, "_sha256")
    real = getattr(owner, name)

    def refuse(asked):
        if asked == file:
            raise error
        return real(asked)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        for act in (store.runs, store.done, store.mend, lambda: store.compact(minimum=1)):
            with pytest.raises(StoreError, match=r"cannot be read.*nothing was changed"):
                act()
    assert file.exists()
    assert len(store.runs()) == 1


def test_a_read_that_falls_short_is_no_broken_file(store, parts, monkeypatch):
    real = Path.stat

    class Longer:
        def __init__(self, found):
            self.st_size, self.st_mtime_ns, self.st_ctime_ns = found.st_size + 1, 1, 1

    flip(parts[0])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", lambda self, **more: Longer(real(self)) if self == parts[0] else real(self, **more))
        with pytest.raises(StoreError, match=r"cannot be read now .*bytes arrived"):
            store.runs()
    assert len(store.runs()) == 1


# --- what takes too much memory ----------------------------------------------------------------------------------


def test_a_part_that_would_take_gigabytes_is_refused_before_it_is_unpacked(store):
    text = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 400_000), pa.array(["x" * 8000]))
    (store.path / "parts").mkdir()
    file = store.path / "parts" / "bomb.parquet"
    pq.write_table(pa.table({"failure": text}), file, compression="zstd")
    assert file.stat().st_size < 100_000
    with pytest.raises(StoreError, match=r"bomb.parquet: it would take 2\.98\d GiB of memory; the limit .* is 1 GiB"):
        store.runs()
    assert file.exists()


@pytest.mark.parametrize("stem", ["", "by-hand"])
def test_rows_that_are_compressed_are_no_rows_of_a_store(store, row, caplog, stem):
    sink = pa.BufferOutputStream()
    table = to_table([row(seed=1)])
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    data = memoryview(sink.getvalue())
    store.add([row(seed=0)], "job")
    (store.path / "inbox" / (f"{stem}.arrow" if stem else integrity.file_name("job", data, "arrow"))).write_bytes(data)
    assert store.runs(["seed"])["seed"].tolist() == [0]
    assert "its rows are compressed" in caplog.text
