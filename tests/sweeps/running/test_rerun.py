"""A job that failed is found again, from its folder or from the store alone, and runs in the foreground."""

import shutil
import sys
from pathlib import Path

import pytest

from fp4dse.dse import ConfigError, Recipe
from fp4dse.results import open_store
from fp4dse.sweeps import run_sweep
from fp4dse.sweeps.jobs.jobfolder import job_name
from fp4dse.sweeps.running import rerun
from fp4dse.sweeps.running.rerun import failed_jobs, find_job, run_one

FAKE = str(Path(__file__).parents[1] / "fake_worker.py")


@pytest.fixture(scope="module")
def once_failed(tmp_path_factory):
    """The folder of a store into which a sweep of two jobs went, both of which failed."""
    folder = tmp_path_factory.mktemp("failed")
    worker = (sys.executable, FAKE, "crash")
    arguments = {"tasks": [("regression", "smoke")], "seeds": [0, 1], "jobs": 1, "backoff_s": 0.01}
    result = run_sweep([Recipe.named("nvfp4")], store=folder / "store", worker=worker, **arguments)
    assert result.failed == 4
    return folder


@pytest.fixture
def failed(once_failed, tmp_path):
    """A copy of that store."""
    shutil.copytree(once_failed, tmp_path, dirs_exist_ok=True)
    return open_store(tmp_path / "store")


def test_a_failed_job_is_found_by_name_by_folder_and_by_file(failed):
    name = next((failed.path / "failed").iterdir()).name
    folder = failed.path / "failed" / name
    found = [find_job(text, failed) for text in (name, str(folder), str(folder / "job.json"))]
    assert found[0] == found[1] == found[2]
    assert job_name(found[0][0]) == name


def test_without_its_folder_it_is_put_together_from_its_rows(failed):
    kept = {folder.name: find_job(folder.name, failed) for folder in (failed.path / "failed").iterdir()}
    shutil.rmtree(failed.path / "failed")
    failed.compact(minimum=1)
    assert {job_name(job) for job, _, _ in failed_jobs(failed)} == set(kept)
    for name, (job, context) in kept.items():
        again, its = find_job(name, failed)
        assert sorted(again.lanes, key=repr) == sorted(job.lanes, key=repr)
        assert its["dataset_digest"] == context["dataset_digest"]


def test_a_failed_lane_is_a_job_of_its_own(failed):
    runs = failed.runs(["run_id", "seed", "recipe_label"])
    job, _ = find_job(runs["run_id"][1], failed)
    assert [(lane.seed, lane.recipe.label()) for lane in job.lanes] == [(runs["seed"][1], runs["recipe_label"][1])]


def test_an_unknown_job_is_refused_with_the_names_of_those_that_failed(failed):
    name = next((failed.path / "failed").iterdir()).name
    with pytest.raises(ConfigError, match=name):
        find_job("regression-smoke-000000000000", failed)


def test_run_in_the_foreground_it_is_stored_and_its_folder_goes(failed):
    names = [folder.name for folder in (failed.path / "failed").iterdir()]
    job, context = find_job(names[0], failed)
    seen = []
    run_one(job, context, failed, seen.append)
    assert {progress.phase for progress in seen} >= {"setup", "evaluate"}
    assert sorted(failed.runs()["status"]) == ["done", "done", "failed", "failed"]
    assert [folder.name for folder in (failed.path / "failed").iterdir()] == names[1:]


def test_what_does_not_fit_in_the_foreground_says_what_would_help(failed, monkeypatch):
    def gone(*_, **__):
        raise MemoryError

    job, context = find_job(next((failed.path / "failed").iterdir()).name, failed)
    monkeypatch.setattr(rerun, "train", gone)
    with pytest.raises(ConfigError, match=r"job: found .*; accepted: one that fits \(out of memory: \w+ lanes? of"):
        run_one(job, context, failed, lambda _: None)
