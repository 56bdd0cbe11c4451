"""A server that is away for a while, or a connection that is cut, costs time and no rows."""

import contextlib
import importlib.util
import logging
import socket
import threading
import time

import pytest

from fp4dse.dse import StoreError
from fp4dse.results import open_store
from fp4dse.results.store import retries
from fp4dse.results.store.atomic import in_parallel
from fp4dse.results.store.remote import RemotePath
from fp4dse.results.store.retries import ShortRead, stop_waiting_when, with_retries


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_S", 0.01)
    monkeypatch.setattr(retries, "STEP_S", 0.01)
    monkeypatch.setattr(retries, "LONGEST_S", 0.1)
    monkeypatch.setattr(retries, "TOTAL_S", 60.0)


# --- waiting -----------------------------------------------------------------------------------------------------


def failing(times, error):
    """An action that fails so often, then answers."""
    left = [times]

    def act():
        left[0] -= 1
        if left[0] >= 0:
            raise error
        return "answer"

    return act


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError(),
        ShortRead("3 of 4 bytes arrived"),
        OSError("AWS Error NETWORK_CONNECTION during HeadObject operation: curlCode: 7"),
        OSError("AWS Error UNKNOWN (HTTP status 503) during ListObjectsV2 operation"),
        OSError("AWS Error UNKNOWN (HTTP status 429) during ListObjectsV2 operation"),
        OSError("AWS Error SLOW_DOWN during PutObject operation"),
    ],
)
def test_what_may_be_better_soon_is_tried_again_and_said_once(error, caplog):
    assert with_retries(failing(4, error), "s3://b/a") == "answer"
    assert len(caplog.messages) == 2
    assert caplog.messages[0].startswith("s3://b/a: cannot be reached (")
    assert "trying again for up to 1 min" in caplog.messages[0]
    assert caplog.messages[1].startswith("s3://b/a: reached again after")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("gone"),
        PermissionError("no"),
        OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body."),
        OSError("AWS Error NO_SUCH_BUCKET during ListObjectsV2 operation"),
        OSError("AWS Error UNKNOWN (HTTP status 301) during HeadObject operation"),
        OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation"),
    ],
)
def test_what_a_server_refuses_is_an_error_at_once(error, caplog):
    with pytest.raises(type(error)):
        with_retries(failing(1, error), "s3://b/a")
    assert caplog.messages == []


def test_waiting_ends_when_its_time_is_over_or_when_somebody_asks(monkeypatch):
    with stop_waiting_when(lambda: True), pytest.raises(ConnectionResetError):
        with_retries(failing(1, ConnectionResetError()), "s3://b/a")
    monkeypatch.setattr(retries, "TOTAL_S", 0.05)
    with pytest.raises(ConnectionResetError):
        with_retries(failing(10**6, ConnectionResetError()), "s3://b/a")


def away_until(when):
    """An action that no server answers before a time."""

    def act():
        if time.monotonic() < when:
            raise ConnectionResetError("reset")
        return "answer"

    return act


def test_many_that_wait_for_one_server_say_so_once(caplog):
    act = away_until(time.monotonic() + 0.5)
    assert in_parallel(lambda name: with_retries(act, f"s3://b/{name}"), range(40)) == ["answer"] * 40
    assert ["cannot be reached" in text for text in caplog.messages] == [True, False]
    assert "reached again" in caplog.messages[1]
    assert retries.why_unreachable("s3://b/a") is None


def test_who_asks_to_stop_ends_the_waits_of_all_threads():
    stop, never = threading.Event(), away_until(float("inf"))
    threading.Timer(0.3, stop.set).start()
    begin = time.monotonic()
    with stop_waiting_when(stop.is_set), stop_waiting_when(lambda: False), pytest.raises(ConnectionResetError):
        in_parallel(lambda name: with_retries(never, f"s3://b/{name}"), range(40))
    assert time.monotonic() - begin < retries.TOTAL_S / 2


def test_the_first_error_ends_the_waits_of_all_threads():
    def act(name):
        if name == 39:
            time.sleep(0.3)
            raise FileNotFoundError
        with_retries(away_until(float("inf")), f"s3://b/{name}")

    begin = time.monotonic()
    with pytest.raises(FileNotFoundError):
        in_parallel(act, range(40))
    assert time.monotonic() - begin < retries.TOTAL_S / 2


# --- a server behind a proxy -------------------------------------------------------------------------------------


class Proxy:
    """Passes connections on to a port. `away`: new ones are closed at once; `cut`: bytes of an answer after which the
    next so many connections are."""

    def __init__(self, port):
        self.port, self.away, self.cut, self.times = port, False, 0, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.own_port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with client, contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)) as server:
            if not self.away:
                threading.Thread(target=self._pass_on, args=(client, server, False), daemon=True).start()
                self._pass_on(server, client, True)

    def _pass_on(self, source, target, answers):
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if self.away:
                    break
                if answers and self.times and passed + len(data) > self.cut:
                    self.times -= 1
                    target.sendall(data[: self.cut - passed])
                    break
                passed += len(data)
                target.sendall(data)
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def proxy(server):
    made = Proxy(server)
    yield made
    made.listener.close()


@pytest.fixture
def place(proxy, monkeypatch, request):
    """A folder of a server that is reached through the proxy, by a client that itself tries once."""
    if not importlib.util.find_spec("moto"):
        pytest.skip("moto is not installed")
    from pyarrow.fs import AwsStandardS3RetryStrategy, S3FileSystem

    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    fs = S3FileSystem(
        access_key="test",
        secret_key="test",
        scheme="http",
        region="us-east-1",
        endpoint_override=f"127.0.0.1:{proxy.own_port}",
        allow_bucket_creation=True,
        retry_strategy=AwsStandardS3RetryStrategy(max_attempts=1),
    )
    bucket = f"o{abs(hash(request.node.name))}"
    fs.create_dir(bucket)
    return RemotePath(f"s3://{bucket}/store", f"{bucket}/store", fs)


def test_an_outage_is_waited_out_by_reader_and_writer(place, proxy, row, caplog):
    store = open_store(place, create=True)
    store.add([row(seed=0)], "before")
    for act in (lambda: store.add([row(seed=1)], "meanwhile"), store.runs, lambda: store.compact(minimum=1)):
        proxy.away = True
        threading.Timer(0.5, setattr, (proxy, "away", False)).start()
        begin = time.monotonic()
        act()
        assert time.monotonic() - begin > 0.4
    assert sorted(store.runs(["seed"])["seed"]) == [0, 1]
    assert "cannot be reached (" in caplog.text
    assert "reached again after" in caplog.text


@pytest.mark.parametrize("joined", [False, True])
def test_connections_that_are_cut_in_the_middle_lose_no_row(place, proxy, row, joined, caplog):
    caplog.set_level(logging.WARNING)
    store = open_store(place, create=True)
    for seed in range(3):
        store.add([row(seed=seed)], "job")
        if joined:
            store.compact(minimum=1)
    proxy.cut, proxy.times = 5000, 4
    assert sorted(open_store(place).runs(["seed"])["seed"]) == [0, 1, 2]
    assert proxy.times == 0
    proxy.cut, proxy.times = 5000, 4
    store.compact(minimum=1)
    assert proxy.times == 0 or joined
    proxy.times = 0
    assert sorted(store.sql("SELECT seed FROM runs")["seed"]) == [0, 1, 2]
    assert open_store(place).info()["torn"] == []
    assert "broken" not in caplog.text


def test_a_server_that_stays_away_is_an_error_and_nothing_is_moved_or_lost(place, proxy, row, monkeypatch):
    store = open_store(place, create=True)
    store.add([row(seed=0)], "job")
    monkeypatch.setattr(retries, "TOTAL_S", 0.2)
    with store.lock():
        proxy.away = True
        for act in (store.runs, lambda: store.compact(minimum=1), lambda: store.add([row(seed=1)], "job")):
            with pytest.raises((StoreError, OSError)) as caught:
                act()
            assert "\n" not in str(caught.value)
        proxy.away = False
    again = open_store(place)
    assert again.info()["torn"] == []
    assert again.runs(["seed"])["seed"].tolist() == [0]
