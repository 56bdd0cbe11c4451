"""A sweep on SLURM: a real controller, a real node, real sbatch, on this machine."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.results import open_store
from fp4dse.results.store.schema import ROW
from fp4dse.sweeps import read_state, run_search, run_sweep
from fp4dse.sweeps.executors import slurm, slurm_task

pytestmark = pytest.mark.slow

HERE = Path(__file__)
FAKE = str(HERE.parents[1] / "fake_worker.py")
TASKS = [("regression", "quickstart"), ("vision", "quickstart")]
SPACE = Space.from_dict({"name": "few", "axes": {"*": ["mxfp4", "nvfp4"], "wgrad.rotation": ["none", "rht16"]}})
LANES = 2 * 2 * (4 + 1)
OWN = ["train_s", "setup_s", "lane_s", "tokens_per_s", "peak_memory_bytes", "lanes", "host", "created_at", "git_commit"]


def helper():
    spec = importlib.util.spec_from_file_location("slurm_site", HERE.with_name("slurm_site.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SITE = helper()
WHY_NOT = slurm.why_not() or SITE.why_not()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if WHY_NOT:
        pytest.skip(f"no SLURM here: {WHY_NOT}")
    with SITE.site(tmp_path_factory.mktemp("slurm")):
        yield


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(slurm, "SQUEUE_S", 0.5)


def sweep(tmp_path, mode="ok", **more):
    arguments = {"tasks": TASKS, "seeds": [0, 1], "jobs": 2, "store": tmp_path / "store", "backoff_s": 0.05, **more}
    options = {"time": "5", "idle": "5", **more.pop("options", {})}
    worker = (sys.executable, FAKE, mode)
    return run_sweep(SPACE, worker=worker, executor="slurm", **{**arguments, "options": options})


def assert_every_lane_once(tmp_path):
    runs = open_store(tmp_path / "store").runs()
    assert Counter(runs["status"]) == {"done": LANES}


def rows(store):
    columns = [name for name in ROW.names if name not in OWN]
    found = open_store(store).runs(columns).sort_values("run_id").reset_index(drop=True)
    return found.astype({"fallbacks": str})


def test_slurm_gives_the_rows_that_the_local_executor_gives(tmp_path, site):
    arguments = {"tasks": [("regression", "smoke")], "seeds": [0, 1], "jobs": 2}
    for executor, options in (("local", {}), ("slurm", {"time": "5", "idle": "5"})):
        where = {"store": tmp_path / executor, "executor": executor, "options": options}
        result = run_sweep([Recipe.named("nvfp4-sr")], **where, **arguments)
        assert (result.done, result.failed, result.stopped) == (4, 0, None)
    assert rows(tmp_path / "local").equals(rows(tmp_path / "slurm"))


def test_a_search_on_slurm_tries_what_a_local_one_does(tmp_path, site):
    asked = {"sampler": "tpe", "trials": 6, "batch": 2, "tasks": TASKS, "seeds": [0], "jobs": 2}
    asked |= {"worker": (sys.executable, FAKE, "ok")}
    local = run_search(SPACE, store=tmp_path / "local", **asked)
    far = run_search(SPACE, store=tmp_path / "slurm", executor="slurm", options={"time": "5", "idle": "60"}, **asked)
    assert [study.front for study in far.studies] == [study.front for study in local.studies]
    assert rows(tmp_path / "local").equals(rows(tmp_path / "slurm"))


def test_an_array_task_trains_many_jobs(tmp_path, site):
    seen = []

    def watch(state):
        seen.extend(squeue())

    result = sweep(tmp_path, jobs=1, progress=watch)
    assert (result.done, result.left) == (LANES, 0)
    assert_every_lane_once(tmp_path)
    assert len(set(seen)) == 1
    assert list((tmp_path / "store" / "slurm").iterdir()) == []


def test_arrays_are_cut_to_what_the_site_takes(tmp_path, site):
    """The site takes indices below MAX_ARRAY; five tasks need three arrays of two."""
    executor = slurm.SlurmExecutor(tmp_path / "jobs", 5, (sys.executable, FAKE, "ok"), 60.0, dict(OPTIONS))
    executor._submit_arrays(5)
    assert Counter(task.partition("_")[0] for task in executor._tasks).most_common() == [
        (array, count) for array, count in zip((executor.pool / "arrays").read_text().split(), (2, 2, 1), strict=True)
    ]
    executor.stop()


OPTIONS = {**slurm.OPTIONS, "time": "5", "gpus": "0", "idle": "5"}


def test_an_array_task_that_is_killed_is_made_up_for(tmp_path, site):
    def kill():
        array, index = busy_task(tmp_path).split("_")
        os.kill(process_of(array, index), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    result = sweep(tmp_path, "slow=1")
    killer.join()
    assert (result.done, result.failed) == (LANES, 0)
    assert "is gone" in " ".join(read_state(tmp_path / "store").retries)
    assert_every_lane_once(tmp_path)


def test_a_warning_before_the_time_is_up_stops_the_job_which_goes_back_to_the_queue(tmp_path, site):
    def warn():
        subprocess.run(["scancel", "--signal=USR2", busy_task(tmp_path)], check=True)

    warner = threading.Thread(target=warn)
    warner.start()
    result = sweep(tmp_path, "slow=1")
    warner.join()
    assert (result.done, result.failed) == (LANES, 0)
    assert "stopped" in " ".join(read_state(tmp_path / "store").retries)
    assert_every_lane_once(tmp_path)


DRIVER = f"""
import sys
sys.path[:0] = [{str(HERE.parent)!r}]
from pathlib import Path
from test_slurm import sweep
sweep(Path(sys.argv[1]), sys.argv[2])
"""


def test_a_driver_that_is_killed_leaves_nothing_that_the_next_does_not_find(tmp_path, site):
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path), "slow=1"])
    while not list(tmp_path.glob("store/inbox/[!.]*")):
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    left = squeue()
    result = sweep(tmp_path)
    assert result.stored > 0
    assert result.left == 0
    assert_every_lane_once(tmp_path)
    assert not set(left) & set(squeue())


def test_what_sbatch_refuses_is_said_in_its_words(tmp_path, site):
    with pytest.raises(OSError, match="partition"):
        sweep(tmp_path, options={"partition": "elsewhere"})


def test_a_rename_has_one_winner(tmp_path):
    for folder in ("queue", "claimed"):
        (tmp_path / folder).mkdir()
    for number in range(50):
        (tmp_path / "queue" / f"{number:08d}-job{number}").touch()
    won = []

    def take(who):
        while folder := slurm_task.claim(tmp_path, tmp_path, who):
            won.append(folder.name)

    takers = [threading.Thread(target=take, args=(f"1_{index}",)) for index in range(8)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    assert sorted(won) == sorted(f"job{number}" for number in range(50))


def test_wrong_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="whole number"):
        sweep(tmp_path, options={"time": "soon"})


def squeue():
    command = ["squeue", "--noheader", "--array", "--me", "--format=%i", "--states=RUNNING,PENDING"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def busy_task(tmp_path) -> str:
    """An array task that has just begun to train a job."""
    while not (tmp_path / "lanes.txt").exists():
        time.sleep(0.05)
    return next((tmp_path / "store" / "slurm").glob("*/claimed/*@*")).name.partition("@")[2]


def process_of(array: str, index: str) -> int:
    """The Python process that is the array task."""
    wanted = {f"SLURM_ARRAY_JOB_ID={array}".encode(), f"SLURM_ARRAY_TASK_ID={index}".encode()}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            program = (entry / "cmdline").read_bytes()
            variables = set((entry / "environ").read_bytes().split(b"\0"))
        except OSError:
            continue
        if b"submitit.core._submit" in program and b"srun" not in program and wanted <= variables:
            return int(entry.name)
    raise AssertionError(f"no process of array task {array}_{index}")
