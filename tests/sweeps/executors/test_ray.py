"""A sweep on Ray: the rows of a local one, every loss made up for, nothing that listens beyond loopback."""

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.results import open_store
from fp4dse.results.store.schema import ROW
from fp4dse.sweeps import read_state, run_search, run_sweep
from fp4dse.sweeps.executors.ray import RayExecutor, RayRun
from fp4dse.sweeps.executors.ray_cluster import STARTS, connect
from fp4dse.sweeps.executors.ray_task import PREFIX, clear_folders, folder_of_task
from fp4dse.tasks.job import Job, Lane

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="Ray is not installed")]

FAKE = str(Path(__file__).parents[1] / "fake_worker.py")
TASKS = [("regression", "quickstart"), ("vision", "quickstart")]
SPACE = Space.from_dict({"name": "few", "axes": {"*": ["mxfp4", "nvfp4"], "wgrad.rotation": ["none", "rht16"]}})
LANES = 2 * 2 * (4 + 1)
OWN = ["train_s", "setup_s", "lane_s", "tokens_per_s", "peak_memory_bytes", "lanes", "host", "created_at", "git_commit"]
"""What may differ between two machines that train the same."""


@pytest.fixture(scope="module")
def cluster():
    """A local cluster for all tests of this file. They count lanes in a file that its workers learn of here."""
    lanes = Path(os.environ.setdefault("FAKE_LANES", f"/tmp/fake-lanes-{os.getpid()}"))
    assert connect("")
    yield lanes
    import ray

    ray.shutdown()
    lanes.unlink(missing_ok=True)
    del os.environ["FAKE_LANES"]


def sweep(tmp_path, mode="ok", executor="ray", **more):
    arguments = {"tasks": TASKS, "seeds": [0, 1], "jobs": 2, "store": tmp_path / executor, "backoff_s": 0.05, **more}
    return run_sweep(SPACE, worker=(sys.executable, FAKE, mode), executor=executor, **arguments)


def rows(store):
    columns = [name for name in ROW.names if name not in OWN]
    found = open_store(store).runs(columns).sort_values("run_id").reset_index(drop=True)
    return found.astype({"fallbacks": str})


def test_ray_gives_the_rows_that_the_local_executor_gives(tmp_path, cluster):
    recipes = [Recipe.named("nvfp4-sr")]
    arguments = {"tasks": [("regression", "smoke")], "seeds": [0, 1], "jobs": 2}
    for executor in ("local", "ray"):
        result = run_sweep(recipes, store=tmp_path / executor, executor=executor, **arguments)
        assert (result.done, result.failed, result.stopped) == (4, 0, None)
    local, far = rows(tmp_path / "local"), rows(tmp_path / "ray")
    assert local.equals(far)
    assert local["val_loss"].notna().all()


def test_what_ray_brought_is_stored_once_and_reports_are_seen(tmp_path, cluster):
    seen = []
    result = sweep(tmp_path, "slow=2.5", progress=lambda state: seen.extend(job.phase for job in state.running))
    assert (result.done, result.left, result.exit_code) == (LANES, 0, 0)
    assert "setup" in seen
    assert open_store(tmp_path / "ray").info()["runs"] == LANES
    assert sweep(tmp_path).stored == LANES


def test_a_search_on_ray_tries_what_a_local_one_does_and_trains_nothing_twice(tmp_path, cluster):
    asked = {"sampler": "tpe", "trials": 4, "batch": 2, "tasks": TASKS, "seeds": [0], "jobs": 2}
    asked |= {"worker": (sys.executable, FAKE, "ok")}
    local, far, again = (
        run_search(SPACE, store=tmp_path / executor, executor=executor, **asked) for executor in ("local", "ray", "ray")
    )
    assert [study.trials for study in far.studies] == [4, 4]
    assert [study.front for study in far.studies] == [study.front for study in local.studies]
    assert rows(tmp_path / "local").equals(rows(tmp_path / "ray"))
    assert (again.lanes, [study.stored for study in again.studies]) == (0, [4, 4])


def test_a_job_that_fails_on_its_node_says_why(tmp_path, cluster):
    result = sweep(tmp_path, "crash", tasks=TASKS[:1], seeds=[0], jobs=1)
    assert "the die was cast" in result.failures[0].reason
    kept = tmp_path / "ray" / "failed" / result.failures[0].job / "stderr.txt"
    assert "the die was cast" in kept.read_text()


def test_a_job_for_another_kind_of_device_comes_back_from_its_node(tmp_path, cluster):
    lanes = [Lane(Recipe.named("nvfp4").canonical(), 0.1, 0)]
    command = (sys.executable, FAKE, "ok")
    executor = RayExecutor(tmp_path, 1, command, 60.0, {"num_cpus": 1.0, "num_gpus": 0.0}, owns_cluster=False)
    executor.start(Job("vision", "smoke", lanes, only_on={"device_class": "NVIDIA B300"}), {})
    while not (outcomes := executor.poll(0.2)):
        pass
    assert (outcomes[0].kind, outcomes[0].reason) == ("elsewhere", "it is for NVIDIA B300")


def test_a_ray_worker_that_is_killed_is_made_up_for(tmp_path, cluster):
    def kill():
        while not cluster.exists() or not cluster.read_text():
            time.sleep(0.05)
        victim = next(pid for pid, name in processes() if name.startswith("ray::work"))
        os.kill(victim, signal.SIGKILL)

    cluster.write_text("")
    killer = threading.Thread(target=kill)
    killer.start()
    result = sweep(tmp_path, "slow=1")
    killer.join()
    assert (result.done, result.failed) == (LANES, 0)
    assert any("Ray lost it" in reason for reason in read_state(tmp_path / "ray").retries)


OWN_CLUSTER = f"""
import os, signal, sys, threading, time
from pathlib import Path
from fp4dse.dse import Recipe
from fp4dse.sweeps import run_sweep
kills = int(sys.argv[2])

def raylets():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"raylet/raylet" in (entry / "cmdline").read_bytes():
                    yield int(entry.name)
            except OSError:
                continue

def kill(state):
    global kills
    if kills and any(job.phase == "setup" for job in state.running):
        kills -= 1
        for raylet in raylets():
            os.kill(raylet, signal.SIGKILL)

recipes = [Recipe.named(name) for name in ("mxfp4", "nvfp4", "nvfp4-sr")]
worker = (sys.executable, {FAKE!r}, "slow=4")
arguments = dict(tasks=[("regression", "quickstart")], seeds=[0, 1], jobs=2, backoff_s=0.05, executor="ray")
result = run_sweep(recipes, store=sys.argv[1], worker=worker, progress=kill, **arguments)
print("RESULT", result.done, result.failed, result.left, kills)
"""


@pytest.fixture
def short():
    """A folder for temporary files whose name is short enough for Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="f-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def test_a_cluster_of_our_own_that_dies_is_started_again_and_no_lane_fails(tmp_path, short):
    command = [sys.executable, "-c", OWN_CLUSTER, str(tmp_path / "store"), "1"]
    environment = {**os.environ, "FAKE_LANES": "/dev/null", "TMPDIR": str(short)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert "RESULT 8 0 0 0" in done.stdout, done.stderr
    assert "they are started again, with the jobs that they ran" in done.stderr
    assert "Traceback" not in done.stderr
    assert open_store(tmp_path / "store").info()["runs"] == 8
    assert not list(short.glob(f"{PREFIX}*"))


def test_a_cluster_of_somebody_else_that_is_gone_ends_the_sweep_in_words_and_fails_no_job(tmp_path, cluster):
    executor = RayExecutor(tmp_path, 1, (sys.executable, FAKE, "ok"), 60.0, {"num_cpus": 1.0}, owns_cluster=False)
    executor.running.append(RayRun(None, tmp_path))
    executor._node, executor._checked_at = "no such node", 0.0
    with pytest.raises(OSError, match=r"the Ray cluster is gone, .* the same command continues"):
        executor.poll(0.1)


def test_a_slow_start_is_waited_for_and_one_that_never_comes_is_one_line(monkeypatch, caplog):
    import ray

    tries = []

    def init(**_):
        tries.append(1)
        raise Exception("The current node timed out\nduring startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(OSError, match=r"Ray did not start here \(try 4 of 4\): The current node timed out"):
        connect("")
    assert len(tries) == STARTS
    assert f"trying again, 2 of {STARTS}" in caplog.text
    with pytest.raises(ConfigError, match="accepted: the address of a Ray cluster that answers"):
        connect("127.0.0.1:1")


def test_folders_of_killed_tasks_are_deleted_and_those_of_living_ones_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"{PREFIX}dead").mkdir()
    os.utime(tmp_path / f"{PREFIX}dead", (0, 0))
    (tmp_path / f"{PREFIX}young").mkdir()
    (tmp_path / "other").mkdir()
    with folder_of_task() as mine:
        clear_folders()
        assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / f"{PREFIX}young", tmp_path / "other"])
        clear_folders(young_s=0.0)
        assert sorted(tmp_path.iterdir()) == sorted([mine, tmp_path / "other"])
    assert list(tmp_path.iterdir()) == [tmp_path / "other"]


def test_a_budget_asks_the_tasks_to_stop(tmp_path, cluster):
    begin = time.monotonic()
    result = sweep(tmp_path, "hang", budget_s=3.0)
    assert (result.done, result.left) == (0, LANES)
    assert time.monotonic() - begin < 300  # they would hang for ten minutes


def test_nothing_of_our_own_cluster_listens_beyond_loopback(cluster):
    ours = {os.getpid(), *(pid for pid, name in processes() if "ray" in name)}
    sockets = {inode for pid in ours for inode in inodes(pid)}
    listening = []
    for table, loopback in (("tcp", ("0100007F",)), ("tcp6", ("FFFF00000100007F", "00000000" * 3 + "01000000"))):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                listening.append(fields[1])
                assert fields[1].partition(":")[0].endswith(loopback), line
    assert listening


def test_a_cluster_that_does_not_answer_and_wrong_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="accepted: address, gpus, cpus"):
        sweep(tmp_path, options={"adress": "auto"})
    with pytest.raises(ConfigError, match="local, ray, slurm"):
        sweep(tmp_path, executor="sge")


def processes():
    """(pid, name) of all processes."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue


def inodes(pid):
    try:
        links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []
    return [link[8:-1] for link in links if link.startswith("socket:[")]
