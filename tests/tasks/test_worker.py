"""The worker process: jobs in, results out, each from a fork of its own, and an exit code that says what happened."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.tasks import Job, JobResult, Lane, Progress, environment, get_task, train, worker
from fp4dse.tasks.job import ELSEWHERE, STOPPED, Ended
from tests.forked import Forked


def lanes(name="bf16", lr=1e-3) -> list[Lane]:
    return [Lane(Recipe.named(name), lr, seed) for seed in (0, 1)]


class Parent:
    """A worker that is given jobs; files of job number n are in the folder n."""

    def __init__(self, folder: Path, process: subprocess.Popen | Forked) -> None:
        self.folder, self.process, self.jobs = folder, process, 0

    def give(self, job: Job) -> Path:
        folder = self.folder / str(self.jobs)
        self.jobs += 1
        folder.mkdir(exist_ok=True)
        (folder / "job.json").write_bytes(msgspec.json.encode(job))
        files = [str(folder / name) for name in ("job.json", "out.json", "stderr.txt")]
        print(json.dumps(files), file=self.process.stdin, flush=True)
        return folder

    def reports(self) -> list[Progress]:
        """Of the job, up to its end."""
        reports = []
        for line in filter(str.strip, self.process.stdout):
            if line.startswith('{"exit"'):
                self.code = msgspec.json.decode(line, type=Ended).exit
                return reports
            reports.append(msgspec.json.decode(line, type=Progress))
        raise AssertionError(f"the worker ended with {self.process.wait()}")

    def work(self, job: Job) -> tuple[int, Path]:
        folder = self.give(job)
        self.reports()
        return self.code, folder

    def wait_for_child(self) -> int:
        """The job's, once it has reported: before, there are the programs that are asked about the machine."""
        report = self.process.stdout.readline()
        assert '"phase"' in report, report
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        (child,) = children.read_text().split()
        return int(child)


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Iterator[Parent]:
    """A worker for all tests that leave it alive: to start one takes longer than most of what they ask of it."""
    with start(tmp_path_factory.mktemp("parent"), fork=False) as parent:
        yield parent


@contextmanager
def start(folder: Path, fork: bool = not torch.cuda.is_available()) -> Iterator[Parent]:
    """A worker; by a fork if nothing is asked of how it starts."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "fp4dse.tasks.worker"]
    with Forked(lambda: worker.main([]), **pipes) if fork else subprocess.Popen(command, **pipes) as process:
        yield Parent(folder, process)
        process.stdin.close()
        assert process.wait(60) in (0, STOPPED, -signal.SIGKILL)


def result(folder: Path) -> JobResult:
    return msgspec.json.decode((folder / "out.json").read_bytes(), type=JobResult)


@pytest.mark.heavy
def test_jobs_have_the_same_bits_in_processes_of_their_own(parent):
    for name in ("bf16", "nvfp4-sr-rht", "mxfp4", "nvfp4-sr-rht"):
        job = Job(task="regression", preset="smoke", lanes=lanes(name))
        folder = parent.give(job)
        reports = parent.reports()
        assert (parent.code, (folder / "stderr.txt").read_text()) == (0, "")
        assert result(folder).lanes == train(get_task("regression", "smoke"), job.lanes).lanes
        assert (reports[0].phase, reports[-1].phase) == ("setup", "evaluate")
        assert [file.name for file in folder.iterdir() if file.name.startswith(".")] == []


def test_a_crash_leaves_a_traceback_and_no_result_and_the_worker_goes_on(parent):
    code, folder = parent.work(Job(task="regression", preset="nonsense", lanes=lanes()))
    assert code == 1
    assert "preset of regression" in (folder / "stderr.txt").read_text()
    assert not (folder / "out.json").exists()
    assert parent.work(Job(task="regression", preset="smoke", lanes=lanes()))[0] == 0


def test_a_job_that_is_killed_is_told_by_its_signal_and_the_worker_goes_on(parent):
    parent.give(LONG)
    os.kill(parent.wait_for_child(), signal.SIGKILL)
    parent.reports()
    assert parent.code == -signal.SIGKILL
    assert parent.work(Job(task="regression", preset="smoke", lanes=lanes()))[0] == 0


LONG = Job(task="regression", preset="small", lanes=lanes())


@pytest.mark.heavy
def test_a_job_that_is_asked_to_stop_goes_on_from_its_checkpoint(tmp_path, parent):
    expected = train(get_task(LONG.task, LONG.preset), LONG.lanes).lanes
    with start(tmp_path) as stopped:
        folder = stopped.give(LONG)
        stopped.wait_for_child()
        while b'"train"' not in stopped.process.stdout.readline().encode():
            pass
        stopped.process.send_signal(signal.SIGUSR1)
        stopped.reports()
        assert stopped.code == STOPPED
        assert stopped.process.wait(60) == STOPPED
        assert (folder / "checkpoint.pt").exists()
        assert "of 500 steps" in (folder / "stderr.txt").read_text()
    there = parent.folder / str(parent.jobs)
    there.mkdir()
    (there / "checkpoint.pt").write_bytes((folder / "checkpoint.pt").read_bytes())
    assert parent.give(LONG) == there
    reports = parent.reports()
    assert parent.code == 0
    assert result(there).lanes == expected
    assert all(p.step > 1 for p in reports if p.phase == "train")
    assert not (there / "checkpoint.pt").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is asked through prctl")
def test_a_job_dies_with_its_worker_even_by_kill_9(tmp_path):
    with start(tmp_path) as killed:
        killed.give(LONG)
        child = killed.wait_for_child()
        killed.process.kill()
        wait_for(lambda: not is_running(child))


def test_a_worker_has_one_thread_whenever_it_forks(parent):
    """Threads do not survive a fork, and what waits for them then hangs."""
    tasks = Path(f"/proc/{parent.process.pid}/task")
    parent.work(Job(task="regression", preset="smoke", lanes=lanes("nvfp4-sr-rht")))
    assert len(list(tasks.iterdir())) == 1


def test_a_job_may_have_more_threads(parent):
    code, folder = parent.work(Job(task="regression", preset="smoke", lanes=lanes("nvfp4"), threads=2))
    assert code == 0
    assert result(folder).lanes == train(get_task("regression", "smoke"), lanes("nvfp4")).lanes


def is_running(pid: int) -> bool:
    """False if the process is gone or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value


def test_a_job_for_another_kind_of_device_is_given_back_in_words(parent):
    here = {"device_class": environment("cpu", 1)["device_class"]}
    code, folder = parent.work(Job("regression", "smoke", lanes(), only_on={"device_class": "NVIDIA B300"}))
    assert code == ELSEWHERE
    said = f"it is for NVIDIA B300; here is {here['device_class']}"
    assert said in (folder / "stderr.txt").read_text()
    assert parent.work(Job("regression", "smoke", lanes(), only_on=here))[0] == 0
