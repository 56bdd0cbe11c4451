"""The worker process: a job in, a result out, and an exit code that says what happened."""

import subprocess
import sys

import msgspec

from fp4dse.dse import Recipe
from fp4dse.tasks import Job, JobResult, Lane, Progress, get_task, train


def work(tmp_path, job: Job) -> subprocess.CompletedProcess:
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(job))
    command = [sys.executable, "-m", "fp4dse.tasks.worker", str(tmp_path / "job.json"), str(tmp_path / "out.json")]
    return subprocess.run(command, capture_output=True, text=True)


def test_a_job_has_the_same_bits_in_its_own_process(tmp_path):
    lanes = [Lane(Recipe.named("bf16"), 1e-3, seed) for seed in (0, 1)]
    done = work(tmp_path, Job(task="regression", preset="smoke", lanes=lanes))
    assert done.returncode == 0, done.stderr
    result = msgspec.json.decode((tmp_path / "out.json").read_bytes(), type=JobResult)
    assert result.lanes == train(get_task("regression", "smoke"), lanes).lanes
    lines = [msgspec.json.decode(line, type=Progress) for line in done.stdout.splitlines()]
    assert lines[0].phase == "setup"
    assert lines[-1].phase == "evaluate"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_a_crash_leaves_a_traceback_and_no_result(tmp_path):
    done = work(tmp_path, Job(task="regression", preset="nonsense", lanes=[Lane(Recipe.named("bf16"), 1e-3, 0)]))
    assert done.returncode not in (0, 17)
    assert "preset of regression" in done.stderr
    assert not (tmp_path / "out.json").exists()
