"""A store behind a URL keeps the promises of one on a disk, here against a server that speaks S3."""

import importlib.util
import io
import json
import socket
import subprocess
import sys
import time
from dataclasses import replace
from os import P_PID, WEXITED, WNOWAIT, getpid, waitid
from pathlib import Path
from types import SimpleNamespace

import pyarrow.fs
import pytest

from fp4dse.dse import ConfigError, StoreError
from fp4dse.results import open_store
from fp4dse.results.store import locks, remote, retries
from fp4dse.results.store.locks import birth
from fp4dse.results.store.remote import RemotePath, locate

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("moto"), reason="moto is not installed")


@pytest.fixture
def url(server, request, monkeypatch):
    """A bucket of its own for each test."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    bucket = f"b{abs(hash(request.node.name))}"
    query = f"scheme=http&endpoint_override=127.0.0.1:{server}&region=us-east-1"
    fs, _ = pyarrow.fs.FileSystem.from_uri(f"s3://{bucket}?{query}&allow_bucket_creation=true")
    fs.create_dir(bucket)
    return lambda name: f"s3://{bucket}/{name}?{query}"


def test_rows_go_in_come_out_and_are_joined_once_each(url, row):
    store = open_store(url("a"), create=True)
    for seed in range(3):
        store.add([row(seed=seed)], f"job {seed}")
    store.add([row(seed=0)], "job 0")
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1, 2]
    assert store.compact(minimum=1) == 3
    again = open_store(url("a"))
    assert (again.info()["inbox_files"], again.info()["part_files"], again.info()["runs"]) == (0, 1, 3)
    assert len(again.done()) == 3
    assert again.sql("SELECT count(*) AS n FROM runs")["n"].tolist() == [3]


def test_rows_that_were_stored_twice_by_a_crash_count_once(url, row, monkeypatch):
    store = open_store(url("a"), create=True)
    store.add([row(seed=0), row(seed=1)], "job")
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "unlink", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.compact(minimum=1)
    assert (store.info()["inbox_files"], store.info()["part_files"], store.info()["runs"]) == (1, 1, 2)


def test_small_parts_are_joined_and_a_crash_in_between_shows_each_row_once(url, row, monkeypatch):
    store = open_store(url("a"), create=True)
    for seed in range(4):
        store.add([row(seed=seed)], "job")
        store.compact(minimum=1)
    monkeypatch.setattr("fp4dse.results.store.compaction.JOIN_AT", 4)
    real = RemotePath.unlink

    def unlink(self, **options):
        if self.parent.name == "parts":
            raise KeyboardInterrupt
        real(self, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            store.compact()
    assert (store.info()["part_files"], store.info()["runs"]) == (5, 4)
    assert sorted(store.sql("SELECT seed FROM runs")["seed"]) == [0, 1, 2, 3]
    store.compact()
    again = open_store(url("a"))
    assert (again.info()["part_files"], again.info()["runs"]) == (1, 4)


def test_stores_on_a_disk_and_behind_urls_merge_without_duplicates(url, row, tmp_path):
    here, far, target = (open_store(place, create=True) for place in (tmp_path / "here", url("far"), url("all")))
    here.add([row(seed=0), row(seed=1)], "job")
    far.add([row(seed=1), row(seed=2)], "job")
    assert [target.merge(here), target.merge(far), target.merge(here), target.merge(far)] == [2, 1, 0, 0]
    assert sorted(target.runs(["seed"])["seed"]) == [0, 1, 2]
    assert here.merge(target) == 1


def test_an_object_that_is_no_parquet_file_is_moved_aside(url, row):
    store = open_store(url("a"), create=True)
    store.add([row()], "job")
    (store.path / "inbox" / "torn.parquet").write_bytes(b"PAR1 and no more")
    assert len(store.runs()) == 1
    store.compact(minimum=1)
    assert [Path(name.partition("?")[0]).name for name in open_store(url("a")).info()["torn"]] == ["torn.parquet"]


def test_a_second_writer_is_told_who_the_first_is_and_a_reader_is_not_hindered(url, row):
    first, second = open_store(url("a"), create=True), open_store(url("a"))
    with first.lock():
        first.add([row()], "job")
        assert len(second.runs()) == 1
        with pytest.raises(StoreError, match=r"process \d+ on .* is writing to this store; see it with `fp4dse status"):
            second.add([row()], "job")
    second.add([row(seed=1)], "job")


def test_the_claim_of_a_dead_writer_is_swept_away(url, row, monkeypatch):
    store = open_store(url("a"), create=True)
    (store.path / ".lock-gone-1-0").write_bytes(json.dumps({"pid": 1, "host": "gone"}).encode())
    with pytest.raises(StoreError, match="process 1 on gone"):
        store.add([row()], "job")
    monkeypatch.setattr(locks, "STALE_S", -5.0)
    store.add([row()], "job")
    assert list(store.path.glob(".lock-*")) == []


def test_a_process_of_this_machine_that_is_gone_has_no_claim(url, row):
    store = open_store(url("a"), create=True)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        claim = {"pid": process.pid, "host": socket.gethostname(), "born": birth(process.pid)}
        waitid(P_PID, process.pid, WEXITED | WNOWAIT)  # it has ended, and nobody has asked
        for number, of in enumerate((claim, {**claim, "born": None, "pid": 2**22 + 1}, {"nonsense": 1})):
            (store.path / f".lock-{number}").write_bytes(json.dumps(of).encode())
        store.add([row()], "job")
    (store.path / ".lock-3").write_bytes(json.dumps({**claim, "pid": getpid(), "born": birth(getpid())}).encode())
    with pytest.raises(StoreError, match=f"process {getpid()} on"):
        store.add([row(seed=1)], "job")


def test_a_claim_is_renewed_as_long_as_it_is_held(url, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.2)
    store = open_store(url("a"), create=True)
    with store.lock():
        [lock] = store.path.glob(".lock-*")
        lock.unlink()
        deadline = time.monotonic() + 60
        while not lock.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert not lock.exists()


class Torn:
    """A file system whose uploads lose their last byte, and whose downloads end early, without an error."""

    def __init__(self, fs):
        self.fs = fs

    def __getattr__(self, name):
        return getattr(self.fs, name)

    def open_output_stream(self, path):
        stream = self.fs.open_output_stream(path)
        return SimpleNamespace(write=lambda data: stream.write(bytes(data)[:-1]), close=stream.close)

    def open_input_stream(self, path):
        return io.BytesIO(self.fs.open_input_stream(path).read()[:-1])


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(retries, "TOTAL_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_an_upload_that_breaks_off_leaves_nothing(url):
    place = locate(url("a")) / "file"
    with pytest.raises(OSError, match="2 of 3 bytes arrived"):
        replace(place, fs=Torn(place.fs)).write_bytes(b"abc")
    assert not place.exists()


@pytest.mark.usefixtures("impatient")
def test_an_upload_that_fails_leaves_what_stood_there_before(url):
    place = locate(url("a")) / "retired.json"
    place.write_bytes(b"abc")

    def fail(_):
        raise OSError("AWS Error NETWORK_CONNECTION during CreateMultipartUpload operation")

    fails = SimpleNamespace(open_output_stream=fail, get_file_info=place.fs.get_file_info)
    fails.delete_file = place.fs.delete_file
    with pytest.raises(OSError, match="NETWORK_CONNECTION"):
        replace(place, fs=fails).write_bytes(b"longer")
    assert place.read_bytes() == b"abc"


@pytest.mark.usefixtures("impatient")
def test_a_download_that_ends_early_without_an_error_is_an_error(url):
    place = locate(url("a")) / "file"
    place.write_bytes(b"abc")
    for read in (RemotePath.read_bytes, RemotePath.sha256):
        with pytest.raises(OSError, match="2 of 3 bytes arrived"):
            read(replace(place, fs=Torn(place.fs)))


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_not_there_is_one_line_once_it_was_waited_for(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    once = pyarrow.fs.AwsStandardS3RetryStrategy(max_attempts=1)  # its own attempts take six seconds
    nowhere = pyarrow.fs.S3FileSystem(
        scheme="http", endpoint_override="127.0.0.1:9", region="us-east-1", retry_strategy=once
    )
    monkeypatch.setattr(remote, "FileSystem", SimpleNamespace(from_uri=lambda _: (nowhere, "b/a")))
    with pytest.raises((StoreError, OSError), match="Could not connect"):
        open_store("s3://b/a", create=True)


def test_what_is_no_known_scheme_is_refused():
    with pytest.raises(ConfigError, match="s3://bucket/folder"):
        locate("gopher://old/store")


def test_fsspec_knows_what_pyarrow_does_not(row):
    pytest.importorskip("fsspec")
    store = open_store("memory://fp4dse-test/store", create=True)
    store.add([row()], "job")
    store.compact(minimum=1)
    assert len(open_store("memory://fp4dse-test/store").runs()) == 1


def test_a_path_stays_a_path(tmp_path):
    assert locate(str(tmp_path)) == tmp_path
    assert locate(f"file://{tmp_path}") == tmp_path
