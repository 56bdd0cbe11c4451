"""A job that was begun goes on as it was, and its lanes are not planned a second time."""

import pytest

from fp4dse.dse import Recipe
from fp4dse.sweeps.jobs.jobfolder import leftovers, part_of, write_job
from fp4dse.sweeps.running.resume import with_leftovers
from fp4dse.tasks.job import CHECKPOINT, Job, Lane

RECIPES = [Recipe.named(name).canonical() for name in ("nvfp4", "mxfp4")]


def job(*seeds, recipe=0, preset="small") -> Job:
    return Job("regression", preset, [Lane(RECIPES[recipe], 0.1, seed) for seed in seeds])


def lanes(jobs):
    return [(job.preset, lane.seed) for job in jobs for lane in job.lanes]


def test_a_begun_job_comes_first_and_takes_its_lanes_out_of_the_plan():
    planned = [job(0, 1, 2), job(3, 4)]
    assert with_leftovers(planned, [job(1, 3)]) == [job(1, 3), job(0, 2), job(4)]
    assert with_leftovers(planned, [job(3, 4)]) == [job(3, 4), job(0, 1, 2)]


@pytest.mark.parametrize("other", [job(0, 9), job(0, preset="smoke"), job(0, recipe=1)])
def test_a_begun_job_that_the_plan_does_not_cover_is_left_alone(other):
    planned = [job(0, 1), job(2)]
    assert with_leftovers(planned, [other]) == planned


def test_of_two_begun_jobs_with_a_common_lane_one_goes_on():
    assert with_leftovers([job(0, 1, 2)], [job(0, 1), job(1, 2)]) == [job(0, 1), job(2)]


def test_the_checkpoint_of_the_same_job_survives_a_new_attempt_and_no_other(tmp_path):
    folder = tmp_path / "job"
    write_job(folder, job(0, 1), {"a": 1})
    (folder / CHECKPOINT).write_bytes(b"state")
    (folder / "out.json").write_bytes(b"{")
    write_job(folder, job(0, 1), {"a": 1})
    assert sorted(entry.name for entry in folder.iterdir()) == [CHECKPOINT, "context.json", "job.json", "stderr.txt"]
    write_job(folder, job(0), {"a": 1})
    assert not (folder / CHECKPOINT).exists()


def test_leftovers_are_the_finished_and_the_begun(tmp_path):
    for name, files in {"begun": [CHECKPOINT], "idle": [], "torn": ["out.json"]}.items():
        write_job(tmp_path / name, job(0), {})
        for file in files:
            (tmp_path / name / file).write_bytes(b"{")
    found = list(leftovers(tmp_path))
    assert [(folder.name, result) for folder, _, _, result in found] == [("begun", None)]
    assert [folder.name for folder in tmp_path.iterdir()] == ["begun"]


def test_a_part_of_a_job_keeps_what_is_not_of_a_lane():
    whole = job(0, 1, 2, 3)
    assert part_of(whole, [1, 3]) == job(1, 3)
