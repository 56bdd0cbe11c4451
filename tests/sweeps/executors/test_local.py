"""The executor says how each job ended, and no end of one job touches another."""

import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from fp4dse.dse import ConfigError, Recipe
from fp4dse.sweeps import run_sweep
from fp4dse.sweeps.executors import LocalExecutor, Outcome
from fp4dse.sweeps.jobs.jobfolder import job_name, last_words
from fp4dse.tasks.job import Job, Lane

FAKE = str(Path(__file__).parents[1] / "fake_worker.py")
LEASH = str(Path(__file__).parents[3] / "dse" / "program" / "leash.py")


def job(lanes=3, lr=0.1) -> Job:
    recipe = Recipe.named("nvfp4").canonical()
    return Job("regression", "quickstart", [Lane(recipe, lr, seed) for seed in range(lanes)])


def run(tmp_path, mode, *jobs, workers=2, **limits) -> list[Outcome]:
    executor = LocalExecutor(tmp_path / "jobs", [{}] * workers, (sys.executable, FAKE, mode), **limits)
    waiting, outcomes = list(jobs or [job()]), []
    deadline = time.monotonic() + 120
    while waiting or executor.running:
        while waiting and executor.has_room:
            executor.start(waiting.pop(0), {})
        outcomes += executor.poll(0.05)
        assert time.monotonic() < deadline
    executor.stop()
    return outcomes


def test_a_job_that_comes_back_is_done(tmp_path):
    [outcome] = run(tmp_path, "ok")
    assert outcome.kind == "done"
    assert outcome.result is not None
    assert len(outcome.result.lanes) == 3


def test_jobs_run_side_by_side_up_to_the_number_of_slots(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", [{}, {}], (sys.executable, FAKE, "hang"))
    executor.start(job(lr=1.0), {})
    assert executor.has_room
    executor.start(job(lr=2.0), {})
    assert not executor.has_room
    assert {run.slot for run in executor.running} == {0, 1}
    assert [outcome.kind for outcome in executor.stop()] == ["stopped", "stopped"]
    assert executor.has_room


def test_the_slot_and_the_threads_reach_the_worker_as_environment(tmp_path):
    program = "import os, sys; print(os.environ['CARD'], os.environ['OMP_NUM_THREADS'], file=sys.stderr); sys.exit(1)"
    executor = LocalExecutor(tmp_path / "jobs", [{"CARD": "third"}], (sys.executable, "-c", program))
    executor.start(job(), {})
    while executor.running:
        outcomes = executor.poll(0.05)
    assert outcomes[0].reason == "exit code 1: third 1"


def test_a_job_for_a_kind_of_device_waits_for_a_worker_of_that_kind(tmp_path):
    cards = [{"FAKE_CARD": "0"}, {"FAKE_CARD": "1"}]
    kinds = ("NVIDIA H200", "NVIDIA L40S")
    executor = LocalExecutor(tmp_path / "jobs", cards, (sys.executable, FAKE, "hang"), kinds=kinds)
    wanted = msgspec.structs.replace(job(), only_on={"device_class": "NVIDIA L40S"})
    assert executor.takes(wanted)
    executor.start(wanted, {})
    assert [run.slot for run in executor.running] == [1]
    assert executor.has_room
    assert not executor.takes(wanted)
    assert executor.takes(job())
    executor.stop()


def test_a_worker_of_another_kind_gives_the_job_back(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", [{"FAKE_CARD": "0"}], (sys.executable, FAKE, "ok"))
    executor.start(msgspec.structs.replace(job(), only_on={"device_class": "NVIDIA L40S"}), {})
    while not (outcomes := executor.poll(0.05)):
        pass
    assert (outcomes[0].kind, outcomes[0].reason) == ("elsewhere", "it is for NVIDIA L40S")
    executor.stop()


def test_a_crash_gives_exit_code_and_the_last_words(tmp_path):
    [outcome] = run(tmp_path, "crash")
    assert outcome.kind == "failed"
    assert outcome.reason == "exit code 1: Traceback ... | RuntimeError: the die was cast"
    assert "RuntimeError" in (outcome.folder / "stderr.txt").read_text()


@pytest.mark.parametrize("mode", ["memory=0", "killed=0"])
def test_too_little_memory_is_told_from_a_crash(tmp_path, mode):
    [outcome] = run(tmp_path, mode)
    assert outcome.kind == "memory"
    assert "memory" in outcome.reason


def test_what_fits_on_no_device_comes_with_its_last_words(tmp_path):
    [outcome] = run(tmp_path, "large")
    assert (outcome.kind, outcome.reason) == ("large", "out of memory: one lane")


def test_a_result_counts_though_the_worker_crashed_on_its_way_out(tmp_path):
    [outcome] = run(tmp_path, "crash-late")
    assert outcome.kind == "done"


def test_a_worker_over_its_time_is_killed(tmp_path):
    [outcome] = run(tmp_path, "hang", limit_s=0.5)
    assert (outcome.kind, outcome.reason) == ("timeout", "no result within 0 s")


def test_a_worker_that_falls_silent_is_killed(tmp_path):
    [outcome] = run(tmp_path, "hang", silence_s=0.5)
    assert outcome.kind == "timeout"
    assert "no report" in outcome.reason


def test_the_time_in_which_the_driver_itself_stood_still_is_no_silence_and_no_work(tmp_path, monkeypatch):
    monkeypatch.setattr("fp4dse.sweeps.executors.local.DRIVER_GAP_S", 0.5)
    executor = LocalExecutor(tmp_path / "jobs", [{}], (sys.executable, FAKE, "hang"), limit_s=1.5, silence_s=1.0)
    executor.start(job(), {})
    executor.poll(0.0)
    time.sleep(2.0)
    assert executor.poll(0.0) == []
    time.sleep(0.2)  # a job that was killed is back by then
    assert executor.poll(0.0) == []
    assert executor.running[0].worker.alive
    while not (outcomes := executor.poll(0.1)):
        pass
    assert outcomes[0].kind == "timeout"
    executor.stop()


def test_garbage_on_standard_output_is_no_report_and_no_harm(tmp_path):
    [outcome] = run(tmp_path, "garbage")
    assert outcome.kind == "done"


def test_a_result_for_other_lanes_is_no_result(tmp_path):
    fake = "import json; job, out, _ = json.loads(input()); open(out, 'w').write(open(job).read())"
    executor = LocalExecutor(tmp_path / "jobs", [{}], (sys.executable, "-c", fake))
    executor.start(job(), {})
    while executor.running:
        outcomes = executor.poll(0.05)
    assert outcomes[0].kind == "failed"


def test_one_crash_leaves_the_neighbour_alone(tmp_path):
    mode = f"crash-once={tmp_path / 'crashed'}"
    outcomes = run(tmp_path, mode, job(lr=1.0), job(lr=2.0))
    assert sorted(outcome.kind for outcome in outcomes) == ["done", "failed"]


def one_after_another(tmp_path, mode, jobs=2) -> tuple[list[int], list[Outcome]]:
    """Pids of the workers that are given the jobs, and how the jobs ended."""
    executor = LocalExecutor(tmp_path / "jobs", [{}], (sys.executable, FAKE, mode))
    pids, outcomes = [], []
    for lr in range(1, jobs + 1):
        executor.start(job(lr=float(lr)), {})
        pids.append(executor.running[0].worker.process.pid)
        while executor.running:
            outcomes += executor.poll(0.05)
    executor.stop()
    assert not any(alive(pid) for pid in pids)
    return pids, outcomes


def test_a_worker_is_kept_for_the_next_job_and_ends_with_the_executor(tmp_path):
    pids, outcomes = one_after_another(tmp_path, "ok", jobs=3)
    assert [outcome.kind for outcome in outcomes] == ["done"] * 3
    assert len(set(pids)) == 1


@pytest.mark.parametrize("mode", ["crash", "crash-late", "memory=0", "killed=0", "parent-crash", "parent-killed-late"])
def test_after_a_job_that_did_not_end_well_the_next_has_another_worker(tmp_path, mode):
    pids, _ = one_after_another(tmp_path, mode)
    assert len(set(pids)) == 2


def test_a_worker_that_died_between_jobs_is_replaced(tmp_path):
    executor = LocalExecutor(tmp_path / "jobs", [{}], (sys.executable, FAKE, "parent-leaves"))
    for lr in (1.0, 2.0):
        executor.start(job(lr=lr), {})
        process = executor.running[0].worker.process
        while executor.running:
            outcomes = executor.poll(0.05)
        assert [outcome.kind for outcome in outcomes] == ["done"]
        wait_for(lambda process=process: process.poll() is not None)
    executor.stop()


def test_a_worker_that_dies_when_it_is_given_a_job_is_a_crash_of_that_job(tmp_path):
    [outcome] = run(tmp_path, "parent-crash")
    assert (outcome.kind, outcome.reason) == ("failed", "exit code 1: RuntimeError: not ready")


def test_a_result_counts_though_the_worker_died_before_it_said_so(tmp_path):
    [outcome] = run(tmp_path, "parent-killed-late")
    assert outcome.kind == "done"


def test_a_stop_kills_what_a_worker_has_started(tmp_path):
    program = "import subprocess, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True); time.sleep(600)"
    # the child's pid is told in a file, as reports go to the executor
    program = program.replace("print(", "open('child', 'w').write(str(").replace(", flush=True)", "))")
    executor = LocalExecutor(
        tmp_path / "jobs", [{}], (sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {program}")
    )
    executor.start(job(), {})
    child = wait_for(lambda: (tmp_path / "child").exists() and (tmp_path / "child").read_text())
    executor.stop()
    wait_for(lambda: not alive(int(child)))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through prctl")
def test_a_worker_dies_with_its_driver_even_by_kill_9(tmp_path):
    driver = (
        "import os, subprocess, sys, time\n"
        f"p = subprocess.Popen([sys.executable, {LEASH!r}, str(os.getpid()), 'sleep', '600'], start_new_session=True)\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        wait_for(lambda: Path(f"/proc/{worker}/comm").read_text() == "sleep\n")
        process.kill()
    wait_for(lambda: not alive(worker))


def test_a_worker_whose_driver_is_gone_does_not_start():
    done = subprocess.run([sys.executable, LEASH, "1", "echo", "started"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")


def test_the_name_of_a_job_is_its_content():
    assert job_name(job()) == job_name(job())
    assert job_name(job()) != job_name(job(lr=0.2))


def test_jobs_on_other_data_or_from_another_start_have_folders_of_their_own():
    """Else the failure of one sweep would be overwritten by that of another into the same store."""
    origins = [(), ("a.csv",), ("b.csv",), ("a.csv", "start.safetensors"), ("", "start.safetensors")]
    jobs = [msgspec.structs.replace(job(), origin=("regression", "quickstart", *more)) for more in origins]
    assert len({job_name(one) for one in jobs}) == len(origins)
    assert job_name(jobs[0]) == job_name(job())


def test_last_words_are_the_end_of_a_long_standard_error(tmp_path):
    (tmp_path / "stderr.txt").write_text("noise\n" * 100_000 + "a\n\nb\nc\n")
    assert last_words(tmp_path) == "a | b | c"


def alive(pid: int) -> bool:
    """True unless the process is gone or a zombie, which nobody has collected in a container without init."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_option_lanes_is_the_most_that_a_job_has(tmp_path):
    seen = []
    asked = {"tasks": [("regression", "smoke")], "seeds": [0, 1], "store": tmp_path / "store", "jobs": 1}
    worker = (sys.executable, FAKE, "ok")

    def watch(state):
        seen.extend(job.lanes for job in state.running)

    recipes = [Recipe.named(name) for name in ("nvfp4", "nvfp4-sr", "mxfp4")]
    result = run_sweep(recipes, **asked, worker=worker, options={"lanes": "2"}, progress=watch)
    assert (result.done, max(seen)) == (8, 2)
    with pytest.raises(ConfigError, match=r"--option lanes: found '0'; accepted: a whole number above 0"):
        run_sweep(recipes, **asked, worker=worker, options={"lanes": "0"})
    with pytest.raises(ConfigError, match=r"--option of local: found 'time'; accepted: lanes"):
        run_sweep(recipes, **asked, worker=worker, options={"time": "1"})
