"""Whatever happens to a sweep, running the same command again ends with every lane stored exactly once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from fp4dse.dse import ConfigError, Recipe, Space, StoreError
from fp4dse.results import Store, open_store
from fp4dse.results.store.spaces import spaces
from fp4dse.sweeps import plan_sweep, read_state, run_search, run_sweep, stop_sweep
from fp4dse.sweeps.conclusions import conclusion
from fp4dse.sweeps.executors import LocalExecutor
from fp4dse.sweeps.jobs.jobfolder import job_name, write_job
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.sweeps.planning import setting as setting_module
from fp4dse.sweeps.planning.setting import find_setting
from fp4dse.sweeps.running.progress import remarks
from tests.forked import Forked

FAKE = str(Path(__file__).with_name("fake_worker.py"))
TASKS = [("regression", "quickstart"), ("vision", "quickstart")]
SPACE = Space.from_dict({"name": "few", "axes": {"*": ["mxfp4", "nvfp4"], "wgrad.rotation": ["none", "rht16"]}})
LANES = 2 * 2 * (4 + 1)  # tasks × seeds × (recipes and the baseline)


def sweep(tmp_path, mode="ok", **more):
    arguments = {"tasks": TASKS, "seeds": [0, 1], "jobs": 2, "store": tmp_path / "store", "backoff_s": 0.05, **more}
    return run_sweep(SPACE, worker=(sys.executable, FAKE, mode), **arguments)


def trained(tmp_path) -> int:
    """Lanes given to workers so far."""
    return len((tmp_path / "lanes.txt").read_text().splitlines())


def assert_every_lane_once(tmp_path, status="done"):
    runs = open_store(tmp_path / "store").runs(["status", "config_id", "lr", "task", "seed", "is_baseline"])
    assert Counter(runs["status"]) == {status: LANES}
    assert not runs.duplicated(["config_id", "lr", "task", "seed"]).any()
    assert len(runs[runs["is_baseline"]]) == 2 * 2


def test_a_sweep_stores_every_lane_and_the_baselines_once(tmp_path):
    result = sweep(tmp_path)
    assert (result.done, result.left, result.stopped, result.exit_code) == (LANES, 0, None, 0)
    assert trained(tmp_path) == LANES
    assert_every_lane_once(tmp_path)
    assert list((tmp_path / "store" / "jobs").iterdir()) == []


def test_a_sweep_notes_what_its_space_asks(tmp_path):
    space = Space.from_dict({"name": "one", "summary": "Does it train?", "base": "nvfp4", "axes": {"*": ["nvfp4"]}})
    run_sweep(space, tasks=TASKS[:1], seeds=[0], store=tmp_path / "store", worker=(sys.executable, FAKE, "ok"))
    assert spaces(open_store(tmp_path / "store")) == {"one": "Does it train?"}


def test_a_row_tells_recipe_task_machine_and_population(tmp_path):
    sweep(tmp_path, tasks=TASKS[:1])
    runs = open_store(tmp_path / "store").runs()
    row = runs[runs["recipe_name"] == "mxfp4"].iloc[0]
    assert (row["task"], row["preset"], row["device"], row["threads"]) == ("regression", "quickstart", "cpu", 1)
    assert row["wgrad_rotation"] == "none"
    assert row["lanes"] == 2
    assert row["lane_s"] == pytest.approx(row["train_s"] / 2)
    assert row["gap"] == row["gap"]


def test_the_same_command_again_trains_nothing(tmp_path):
    sweep(tmp_path)
    again = sweep(tmp_path)
    assert (again.stored, again.done) == (LANES, 0)
    assert trained(tmp_path) == LANES


def test_rerun_trains_all_again_and_stores_them_once(tmp_path):
    sweep(tmp_path)
    assert plan_sweep(SPACE, tasks=TASKS, seeds=[0, 1]).left == LANES
    assert sweep(tmp_path, rerun=True).done == LANES
    assert trained(tmp_path) == 2 * LANES
    assert_every_lane_once(tmp_path)


def test_more_seeds_train_only_the_new_ones(tmp_path):
    sweep(tmp_path, seeds=[0])
    result = sweep(tmp_path)
    assert (result.stored, result.done) == (LANES // 2, LANES // 2)
    assert_every_lane_once(tmp_path)


def test_a_dry_run_plans_the_same_and_writes_nothing(tmp_path):
    planned = plan_sweep(SPACE, tasks=TASKS, seeds=[0, 1], store=tmp_path / "store")
    assert (planned.asked, planned.stored, planned.left) == (LANES, 0, LANES)
    assert list(tmp_path.iterdir()) == []
    sweep(tmp_path, seeds=[0])
    assert plan_sweep(SPACE, tasks=TASKS, seeds=[0, 1], store=tmp_path / "store").left == LANES // 2


def test_diverged_is_a_result_and_is_not_trained_again(tmp_path):
    assert sweep(tmp_path, "diverge").diverged == LANES
    assert_every_lane_once(tmp_path, "diverged")
    assert sweep(tmp_path).done == 0


@pytest.mark.parametrize("mode", ["memory=1", "killed=1"])
def test_a_population_that_does_not_fit_is_cut_in_halves_until_it_does(tmp_path, mode):
    result = sweep(tmp_path, mode)
    assert (result.done, result.failed) == (LANES, 0)
    assert any("halves" in reason for reason in read_state(tmp_path / "store").retries)
    assert_every_lane_once(tmp_path)


def test_a_crash_is_tried_once_more(tmp_path):
    result = sweep(tmp_path, f"crash-once={tmp_path / 'crashed'}")
    assert (result.done, result.failed) == (LANES, 0)
    assert_every_lane_once(tmp_path)


def test_a_second_crash_is_recorded_with_its_reason_and_tried_again_by_the_next_sweep(tmp_path):
    result = sweep(tmp_path, "crash", tasks=TASKS[:1], seeds=[0], jobs=1)
    reason = "exit code 1: Traceback ... | RuntimeError: the die was cast"
    [failure] = result.failures
    assert (result.failed, failure.lanes, failure.reason, result.exit_code) == (3, 3, reason, 1)
    runs = open_store(tmp_path / "store").runs(["status", "failure"])
    assert set(runs[runs["status"] == "failed"]["failure"]) == {reason}
    kept = list((tmp_path / "store" / "failed").iterdir())
    assert failure.job in {folder.name for folder in kept}
    assert "the die was cast" in (kept[0] / "stderr.txt").read_text()
    assert sweep(tmp_path).failed == 0
    assert_every_lane_once(tmp_path)


def test_every_message_about_a_failed_job_says_which_and_why_and_how_to_run_it(tmp_path):
    result = sweep(tmp_path, "crash", tasks=TASKS[:1], seeds=[0], jobs=1)
    [failure] = result.failures
    for text in (conclusion(result), "\n".join(remarks(read_state(tmp_path / "store")))):
        assert f"fp4dse run-one {failure.job} --store {tmp_path / 'store'}" in text
        assert "the die was cast" in text
        assert failure.recipe in text
    assert "BF16" in failure.recipe.upper()


def test_a_fault_that_all_jobs_share_ends_the_sweep_early(tmp_path):
    result = sweep(tmp_path, "crash")
    assert result.stopped.startswith("given up: the first 3 jobs all failed with the same error: exit code 1")
    assert result.left > 0


def test_a_sweep_that_is_over_before_it_began_stores_nothing(tmp_path):
    result = sweep(tmp_path, budget_s=0.0)
    assert (result.left, result.done) == (LANES, 0)


def test_a_hanging_job_fails_at_its_limit(tmp_path):
    result = sweep(tmp_path, "hang", tasks=TASKS[:1], job_limit_s=0.5)
    assert result.failed > 0
    assert "no result within" in result.failures[0].reason


def test_the_budget_stops_running_jobs_and_keeps_what_is_finished(tmp_path):
    sweep(tmp_path, seeds=[0])
    result = sweep(tmp_path, "hang", budget_s=1.0)
    assert result.stopped == "the budget of 1 s is spent"
    assert (result.stored, result.left, result.exit_code) == (LANES // 2, LANES // 2, 0)
    assert sweep(tmp_path).done == LANES // 2
    assert_every_lane_once(tmp_path)


def test_a_full_disk_ends_the_sweep_and_the_finished_job_is_taken_in_later(tmp_path, monkeypatch):
    def full(*_):
        raise StoreError("the disk is full") from OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add", full)
        with pytest.raises(StoreError, match="disk is full"):
            sweep(tmp_path)
    before = trained(tmp_path)
    assert before < LANES
    assert "disk is full" in read_state(tmp_path / "store").ended
    result = sweep(tmp_path)
    assert result.stored > 0  # came from the job folder
    assert_every_lane_once(tmp_path)


def test_a_job_that_was_stored_but_whose_folder_was_left_is_stored_once(tmp_path):
    """The driver died between the two."""
    sweep(tmp_path)
    lane_file = (tmp_path / "lanes.txt").read_text().splitlines()
    setting = find_setting(TASKS, jobs=2)
    job = next(iter(setting.plan(SPACE, [0, 1], None, set()).jobs))
    folder = tmp_path / "store" / "jobs" / job_name(job)
    write_job(folder, job, setting.contexts[job.task, job.preset])
    line = json.dumps([str(folder / name) for name in ("job.json", "out.json", "stderr.txt")])
    subprocess.run([sys.executable, FAKE, "ok"], check=True, capture_output=True, input=line.encode())
    assert sweep(tmp_path).done == 0
    assert_every_lane_once(tmp_path)
    assert not folder.exists()
    assert len(lane_file) == LANES


def test_two_sweeps_do_not_write_one_store_at_a_time(tmp_path):
    with open_store(tmp_path / "store", create=True).lock(), pytest.raises(StoreError, match="is writing"):
        sweep(tmp_path)


def test_a_space_whose_rules_leave_nothing_is_refused_before_anything_is_written(tmp_path):
    never = {"when": {"wgrad.rotation": ["none", "rht16"]}, "reason": "out of fashion"}
    space = Space("nothing", axes={"wgrad.rotation": ["none", "rht16"]}, forbid=[never])
    for run in (run_sweep, plan_sweep, partial(run_search, sampler="random", trials=1)):
        with pytest.raises(ConfigError, match=r"space: found 'nothing'; .* \(2 rejected: out of fashion\)"):
            run(space, store=tmp_path / "store")
    assert not (tmp_path / "store").exists()


def test_wrong_tasks_and_devices_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="accepted: regression, vision"):
        sweep(tmp_path, tasks=[("chess", "small")])
    with pytest.raises(ConfigError, match="quickstart"):
        sweep(tmp_path, tasks=[("vision", "huge")])
    with pytest.raises(ConfigError, match="accepted: cpu, cuda"):
        sweep(tmp_path, device="abacus")
    with pytest.raises(ConfigError, match="--jobs"):
        sweep(tmp_path, jobs=0)
    assert list(tmp_path.iterdir()) == []


def test_the_state_names_what_runs_and_what_is_left(tmp_path):
    seen = []
    sweep(tmp_path, "slow=0.2", progress=lambda state: seen.append(json.loads(json.dumps(_plain(state)))))
    assert {job["task"] for state in seen for job in state["running"]} == {"regression", "vision"}
    assert seen[0]["jobs_waiting"] > seen[-1]["jobs_waiting"] == 0
    assert seen[-1]["ended"] == "finished"
    assert "nvfp4" in " ".join(seen[-1]["best"]) or "mxfp4" in " ".join(seen[-1]["best"])


def _plain(state):
    import msgspec

    return msgspec.to_builtins(state)


KINDS = ("NVIDIA H200", "NVIDIA L40S")
BASELINES = 2 * 2  # tasks × seeds


def two_cards(monkeypatch, known: bool):
    """Two workers on cards of two kinds; where they are not known, workers are handed out by others, as they like."""

    def machine(device, jobs=None, local=True):
        return Machine(device, 1, [{"FAKE_CARD": "0"}, {"FAKE_CARD": "1"}], KINDS if known else ())

    monkeypatch.setattr(setting_module, "find_machine", machine)
    if not known:
        free, chance = LocalExecutor._free, random.Random(0)
        monkeypatch.setattr(LocalExecutor, "_free", lambda self: chance.sample(found := free(self), len(found)))


def assert_every_gap_is_to_the_same_kind_of_card(tmp_path, lanes):
    rows = open_store(tmp_path / "store").runs(["device_class", "config_id", "seed", "task", "is_baseline", "gap"])
    assert len(rows) == lanes
    assert set(rows["device_class"]) == set(KINDS)
    assert rows["gap"].notna().all()
    assert not rows.duplicated(["device_class", "config_id", "seed", "task"]).any()
    assert not rows[~rows["is_baseline"]].duplicated(["config_id", "seed", "task"]).any()


def test_each_kind_of_card_has_its_own_baselines_and_no_lane_is_trained_twice(tmp_path, monkeypatch):
    two_cards(monkeypatch, known=True)
    assert plan_sweep(SPACE, tasks=TASKS, seeds=[0, 1], store=tmp_path / "store").asked == LANES + BASELINES
    assert sweep(tmp_path, "slow=0.1").done == LANES + BASELINES
    assert_every_gap_is_to_the_same_kind_of_card(tmp_path, LANES + BASELINES)
    assert sweep(tmp_path).stored == LANES + BASELINES
    assert trained(tmp_path) == LANES + BASELINES


def test_a_kind_that_shows_itself_late_gets_its_baselines_then(tmp_path, monkeypatch):
    two_cards(monkeypatch, known=False)
    result = sweep(tmp_path, "slow=0.2")
    rows = open_store(tmp_path / "store").runs(["device_class", "seed", "task", "is_baseline"])
    assert (result.asked, result.done, result.left) == (len(rows), len(rows), 0)
    assert_every_gap_is_to_the_same_kind_of_card(tmp_path, len(rows))
    assert trained(tmp_path) == len(rows)
    assert sweep(tmp_path).done == 0


def test_a_sweep_into_a_url_keeps_only_job_folders_here(tmp_path, monkeypatch):
    pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FAKE_LANES", str(tmp_path / "lanes.txt"))
    url = f"memory://{tmp_path.name}/store"
    assert sweep(tmp_path, store=url).done == LANES
    assert sweep(tmp_path, store=url).stored == LANES
    assert trained(tmp_path) == LANES
    assert read_state(url).ended == "finished"
    assert [path.name for path in tmp_path.glob("runs/*/*")] == ["jobs"]


def test_a_stop_from_elsewhere_ends_a_sweep_cleanly(tmp_path):
    process = start_driver(tmp_path, "slow=0.5")
    wait_until_half_done(tmp_path, process)
    state = stop_sweep(tmp_path / "store")
    assert process.wait(20) == 0
    assert state.ended == "stopped by `fp4dse stop`"
    with pytest.raises(StoreError, match="no sweep runs here"):
        stop_sweep(tmp_path / "store")
    assert not (tmp_path / "store" / "stop").exists()
    assert sweep(tmp_path).stored == state.done
    assert_every_lane_once(tmp_path)


# --- chaos: a driver in a process of its own -------------------------------------------------------------------------


def start_driver(tmp_path, mode) -> Forked:
    return Forked(lambda: sweep(tmp_path, mode).exit_code)


def wait_until_half_done(tmp_path, process):
    """Some jobs stored, others running."""
    store, deadline = tmp_path / "store", time.monotonic() + 120
    while not (list(store.glob("inbox/*.arrow")) and list(store.glob("jobs/*/stderr.txt"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_kill_9_of_the_driver_in_the_middle_loses_only_what_was_running(tmp_path):
    for _ in range(2):
        process = start_driver(tmp_path, "slow=0.3")
        wait_until_half_done(tmp_path, process)
        process.kill()
        process.wait()
    state = read_state(tmp_path / "store")
    assert (state.ended, state.driver_is_alive) == (None, False)
    before = len(open_store(tmp_path / "store").done())
    result = sweep(tmp_path)
    assert before <= result.stored < LANES
    assert_every_lane_once(tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_cleanly_and_the_same_command_continues(tmp_path, number):
    process = start_driver(tmp_path, "slow=0.5")
    wait_until_half_done(tmp_path, process)
    os.kill(process.pid, number)
    assert process.wait(20) == 130
    state = read_state(tmp_path / "store")
    assert state.ended == f"stopped by {number.name}"
    assert list((tmp_path / "store" / "jobs").iterdir()) == []
    assert sweep(tmp_path).stored == state.done
    assert_every_lane_once(tmp_path)


@pytest.mark.heavy
@pytest.mark.parametrize("whose", ["the worker", "its job"])
def test_a_process_killed_in_the_middle_is_made_up_for(tmp_path, whose):
    process = start_driver(tmp_path, "slow=0.5")
    wait_until_half_done(tmp_path, process)
    victims: list[int] = []
    while not victims:
        victims = children(process.pid)
        if whose == "its job":
            victims = [child for worker in victims for child in children(worker)]
    os.kill(victims[0], signal.SIGKILL)
    assert process.wait(40) == 0
    assert_every_lane_once(tmp_path)


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended
        return []


def test_job_files_of_an_unknown_form_are_thrown_away_and_trained_again(tmp_path):
    folder = tmp_path / "store" / "jobs" / "old"
    open_store(tmp_path / "store", create=True)
    folder.mkdir(parents=True)
    (folder / "job.json").write_text("{")
    (folder / "out.json").write_text("{}")
    assert sweep(tmp_path).done == LANES
    assert not folder.exists()


def test_a_result_that_makes_no_row_is_thrown_away_and_trained_again(tmp_path, caplog):
    setting = find_setting(TASKS, jobs=2)
    job = setting.plan(SPACE, [0, 1], None, set()).jobs[0]
    open_store(tmp_path / "store", create=True)
    folder = tmp_path / "store" / "jobs" / job_name(job)
    write_job(folder, job, {"of": "an earlier version"})
    line = json.dumps([str(folder / name) for name in ("job.json", "out.json", "stderr.txt")])
    subprocess.run([sys.executable, FAKE, "ok"], check=True, capture_output=True, input=line.encode())
    assert sweep(tmp_path).done == LANES
    assert "cannot be stored" in caplog.text
    assert_every_lane_once(tmp_path)


def test_the_recipes_of_a_sweep_may_be_a_list(tmp_path):
    worker = (sys.executable, FAKE, "ok")
    result = run_sweep([Recipe.named("nvfp4")], tasks=TASKS[:1], seeds=[0], store=tmp_path / "store", worker=worker)
    assert result.done == 2


def test_real_workers_train_what_is_planned(tmp_path):
    """Nothing is faked: BF16 and NVFP4 learn, and BF16 comes out ahead on the teacher-student task."""
    asked = {"tasks": [("regression", "smoke")], "seeds": [0, 1], "record": True, "jobs": 1}
    result = run_sweep([Recipe.named("nvfp4")], store=tmp_path / "store", **asked)
    assert (result.done, result.failed, result.stopped) == (4, 0, None)
    runs = open_store(tmp_path / "store").runs(curves=True)
    assert all(loss[-1] < loss[0] for loss in runs["curve_loss"])
    assert (runs[~runs["is_baseline"]]["gap"] > 0).all()
    assert set(runs["quantizer_backend"]) <= {"plain", "compiled", "eager"}
    recorded = open_store(tmp_path / "store").by_name(list(runs["run_id"][~runs["is_baseline"]]))["recorded"]
    assert all(list(of["step"]) == [1, 2, 4, 8, 16, 32, 40] and min(of["gnr"]) > 0 for of in recorded)


DRIVER_WITH_SEEDS = """
import sys
from fp4dse.dse import Recipe
from fp4dse.sweeps import run_sweep
seeds, store, *worker = sys.argv[1:]
recipes = [Recipe.named("nvfp4")]
result = run_sweep(recipes, tasks=[("vision", "smoke")], seeds=range(int(seeds)), store=store, worker=worker, jobs=1)
print(result.stored, result.done, "torch" in sys.modules)
"""


@pytest.mark.heavy
def test_a_driver_that_goes_on_starts_its_jobs_without_torch(tmp_path):
    worker = (sys.executable, FAKE, "ok")
    own = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}  # other tests may have asked for the same facts
    said = [
        subprocess.check_output(
            [sys.executable, "-c", DRIVER_WITH_SEEDS, seeds, tmp_path / "store", *worker], text=True, env=own
        ).split()
        for seeds in "12"
    ]
    assert said == [["0", "2", "True"], ["2", "2", "False"]]
