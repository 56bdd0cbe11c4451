"""A store that cannot be written for a while: lanes go on, what is finished waits on the disk, nothing is lost."""

import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from fp4dse.dse import Recipe, StoreError
from fp4dse.results import Store, open_store
from fp4dse.results.store.remote import RemotePath
from fp4dse.sweeps import run_sweep
from fp4dse.sweeps.executors import GRACE_S
from fp4dse.sweeps.running import store_writer
from fp4dse.sweeps.running.state import HEARTBEAT_S, SweepState, read_state
from fp4dse.sweeps.running.stopping import heartbeat
from fp4dse.sweeps.stores import open_swept, work_folder

URL = "memory://bucket/store"
FAKE = str(Path(__file__).parents[1] / "fake_worker.py")
RECIPES = [Recipe.named(name) for name in ("mxfp4", "nvfp4", "nvfp4-sr", "nvidia-nvfp4")]
LANES = 5 * 8


def sweep(store, mode="ok", **more):
    worker = (sys.executable, FAKE, mode)
    arguments = {"tasks": [("regression", "quickstart")], "seeds": range(8), "jobs": 2, "backoff_s": 0.05, **more}
    return run_sweep(RECIPES, store=store, worker=worker, **arguments)


def assert_every_lane_once(store):
    runs = open_store(store).runs(["status", "config_id", "lr", "task", "seed"])
    assert Counter(runs["status"]) == {"done": LANES}
    assert not runs.duplicated(["config_id", "lr", "task", "seed"]).any()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A store behind a URL, on a server that is away while `server.away` is set."""
    pytest.importorskip("fsspec").filesystem("memory").store.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_LANES", "/dev/null")
    monkeypatch.setattr(store_writer, "RETRY_S", 0.2)
    monkeypatch.setattr(store_writer, "SLOW_S", 0.2)
    away = threading.Event()
    upload = RemotePath._upload

    def upload_unless_away(self, data):
        if away.is_set() and "inbox" in self.path:
            raise OSError("curl: no route to host")
        return upload(self, data)

    monkeypatch.setattr(RemotePath, "_upload", upload_unless_away)
    return away


def test_an_outage_costs_no_lane_and_the_sweep_says_what_it_waits_for(server):
    said = []

    def watch(state):
        if state.trouble and "no route" in state.trouble and not (state.running or state.jobs_waiting):
            said.append(state.trouble)  # all that could be trained was
            server.clear()

    server.set()
    result = sweep(URL, progress=watch)
    assert (result.done, result.failed, result.left, result.exit_code) == (LANES, 0, 0, 0)
    assert "finished jobs, which are safe on the disk" in said[0]
    assert_every_lane_once(URL)


def test_a_sweep_that_waits_no_more_leaves_its_work_to_the_same_command(server, monkeypatch):
    monkeypatch.setattr("fp4dse.sweeps.running.driver.PATIENCE_S", 0.5)
    monkeypatch.setattr("fp4dse.sweeps.running.driver.GRACE_S", 0.5)
    server.set()
    with pytest.raises(StoreError, match=r"no route to host.*finished jobs kept in .*the same command") as error:
        sweep(URL)
    assert isinstance(error.value.__cause__, OSError)  # exit code 1
    finished = list(work_folder(URL).glob("*/out.json"))
    assert finished
    server.clear()
    result = sweep(URL)
    assert (result.stored, result.done) == (LANES, 0)
    assert_every_lane_once(URL)


def test_a_sweep_that_is_stopped_during_an_outage_ends_soon_and_loses_nothing(server):
    server.set()
    begin = time.monotonic()
    with pytest.raises(StoreError, match=r"no route to host.*kept in"):
        sweep(URL, "slow=0.5", budget_s=1.5)
    assert time.monotonic() - begin < GRACE_S  # no wait is waited for to its end
    server.clear()
    sweep(URL)
    assert_every_lane_once(URL)


def test_a_server_that_goes_away_when_all_is_stored_is_no_fault_of_the_sweep(server, monkeypatch, caplog):
    def fail(*_, **__):
        raise StoreError("no route to host")

    monkeypatch.setattr("fp4dse.sweeps.running.driver.best_gaps", fail)
    monkeypatch.setattr("fp4dse.sweeps.running.driver.FIRST_BEST_S", 0.0)
    monkeypatch.setattr(Store, "compact", fail)
    result = sweep(URL)
    assert (result.done, result.exit_code) == (LANES, 0)
    assert "no route to host; all rows are stored, but not joined into parts yet" in caplog.text


def test_rows_of_a_wrong_shape_end_a_sweep_at_once(tmp_path):
    store = open_store(tmp_path / "store", create=True)
    with store.lock():
        thread = store_writer.StoreWriter(store)
        thread.put("job", [{"no": "row"}], "job")
        thread.finish(30)
        with pytest.raises(StoreError):
            thread.stored()
        thread.close()


def test_rows_are_stored_in_their_order_and_said_to_be_once(tmp_path, monkeypatch):
    added = []
    monkeypatch.setattr(Store, "add", lambda self, rows, name: added.append(name))
    thread = store_writer.StoreWriter(open_store(tmp_path / "store", create=True))
    for number in range(20):
        thread.put(number, [], str(number))
    thread.finish(30)
    assert (list(thread.stored()), list(thread.stored())) == (list(range(20)), [])
    assert added == [str(number) for number in range(20)]
    thread.close()


def test_a_store_that_was_deleted_under_a_sweep_is_begun_anew_with_what_the_folders_hold(tmp_path, caplog, monkeypatch):
    store = tmp_path / "store"
    deleted = []

    def delete(state):
        if state.done and not deleted:
            deleted.append(shutil.rmtree(store))

    monkeypatch.setenv("FAKE_LANES", "/dev/null")
    with pytest.raises((StoreError, OSError)):
        sweep(store, "slow=0.3", jobs=1, progress=delete)
    assert deleted
    (store / "jobs").mkdir(parents=True, exist_ok=True)  # as a job that is begun after it makes it
    result = sweep(store)
    assert (result.failed, result.left) == (0, 0)
    assert "the store is gone, but for" in caplog.text
    assert_every_lane_once(store)


def test_a_folder_that_holds_something_else_is_no_store_all_the_same(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match=r"holds thesis\.tex"):
        open_swept(tmp_path)


def test_a_driver_shows_life_while_its_workers_and_itself_stand_still(tmp_path):
    state = SweepState(name="few", asked=1, stored=0)
    with heartbeat(tmp_path, state) as is_asked:
        time.sleep(0.2)
        first = read_state(tmp_path).updated
        (tmp_path / "stop").touch()
        deadline = time.monotonic() + 20 * HEARTBEAT_S
        while (read_state(tmp_path).updated == first or not is_asked()) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert read_state(tmp_path).updated > first
        assert is_asked()
        state.ended = "finished"
    assert read_state(tmp_path).ended == "finished"
    assert not (tmp_path / "stop").exists()
