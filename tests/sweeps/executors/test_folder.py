"""Jobs that are carried to another machine and back give the rows that they give here."""

import subprocess
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import torch

from fp4dse.dse import ConfigError, Recipe
from fp4dse.results import open_store
from fp4dse.sweeps import run_search, run_sweep
from fp4dse.sweeps.arguments import find_space
from fp4dse.sweeps.jobs.jobfolder import job_name, write_job
from fp4dse.sweeps.jobs.machine import Machine
from fp4dse.sweeps.planning.plan import plan
from fp4dse.tasks import Lane, get_task, train, worker
from fp4dse.tasks.job import NO_ROOM, OUT_OF_MEMORY, Job
from fp4dse.tasks.worker import jobs_in
from tests.forked import Forked

RECIPES = [Recipe.named("nvfp4"), Recipe.named("mxfp4")]
TASKS = [("regression", "smoke")]


def sweep(folder: Path, **more):
    away = {"executor": "folder", "options": {"at": str(folder / "jobs"), "lanes": "2"}}
    return run_sweep(RECIPES, tasks=TASKS, seeds=[0, 1, 2], store=folder / "store", **{**away, **more})


def work(folder: Path, *more: str) -> None:
    asked = ["--folder", str(folder / "jobs"), *more]
    if torch.cuda.is_available():  # which no fork survives
        subprocess.run([sys.executable, "-m", "fp4dse.tasks.worker", *asked], check=True, stdout=subprocess.DEVNULL)
        return
    with Forked(lambda: worker.main(asked), stdout=subprocess.DEVNULL) as process:
        assert process.wait(300) == 0


def losses(folder: Path) -> dict:
    rows = open_store(folder / "store").runs(["config_id", "seed", "val_loss"])
    return {(row.config_id, row.seed): row.val_loss for row in rows.itertuples()}


def here() -> dict:
    """What all lanes have when they are trained in this process."""
    task, found = get_task(*TASKS[0]), {}
    for recipe in (*RECIPES, Recipe.named("bf16")):
        lanes = [Lane(recipe, task.lr, seed) for seed in (0, 1, 2)]
        found |= {
            (recipe.config_id, lane.seed): one.val_loss
            for lane, one in zip(lanes, train(task, lanes).lanes, strict=True)
        }
    return found


def of_baseline(job: Path) -> bool:
    return all(lane.recipe.is_baseline for lane in msgspec.json.decode(job.read_bytes(), type=Job).lanes)


@pytest.mark.heavy
def test_what_another_machine_trained_is_stored_as_if_it_were_trained_here(tmp_path):
    first = sweep(tmp_path / "away")
    assert (first.left, first.done, first.exit_code) == (9, 0, 0)
    assert "6 jobs with 9 lanes wait in" in first.stopped  # two lanes a job, of three recipes with three lanes each
    jobs = sorted(path.parent.name for path in (tmp_path / "away" / "jobs").glob("*/job.json"))
    baselines = {str(path) for path in (tmp_path / "away" / "jobs").glob("*/job.json") if of_baseline(path)}
    assert {job for job, *_ in islice(jobs_in(tmp_path / "away" / "jobs", "0/1", {}), len(baselines))} == baselines
    work(tmp_path / "away", "--share", "0/2")
    assert len(list((tmp_path / "away" / "jobs").glob("*/out.json"))) == 3
    second = sweep(tmp_path / "away")
    assert 0 < second.left < 9  # half was stored, the rest waits
    assert {path.parent.name for path in (tmp_path / "away" / "jobs").glob("*/job.json")} < set(jobs)
    work(tmp_path / "away")
    third = sweep(tmp_path / "away")
    assert (third.left, third.stored, third.stopped) == (0, 9, None)
    assert not list((tmp_path / "away" / "jobs").glob("*"))
    assert losses(tmp_path / "away") == here()


def test_a_worker_takes_baselines_then_what_trains_nothing_then_the_longest(tmp_path):
    """A share of two workers, too: the first half of the jobs has all that others are measured against."""
    space, task = list(find_space("finetune").recipes()), get_task("finetune", "smoke")
    machine = Machine("cpu", 1, [{}])
    planned = plan(space, [task], seeds=(0,), lrs=None, is_stored=lambda *_: False, machine=machine)
    for job in planned.jobs:
        write_job(tmp_path / job_name(job), job, {})
    read = [msgspec.json.decode(Path(job).read_bytes(), type=Job) for job, *_ in jobs_in(tmp_path, "0/1", {})]
    assert [job.turn for job in read] == [0] + 5 * [1] + (len(read) - 6) * [2]
    sizes = [len(job.lanes) for job in read if job.turn == 2]
    assert sizes == sorted(sizes, reverse=True)


def test_a_job_that_finds_no_room_is_tried_again_after_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(worker, "PAUSE_S", 0.0)
    for name in ("a", "b", "c"):
        write_job(tmp_path / name, Job("regression", "smoke", [Lane(Recipe.named("bf16"), 1e-3, 0)]), {})
    codes, tried = {}, []
    for job, *_ in worker.jobs_in(tmp_path, "0/1", codes):
        name = Path(job).parent.name
        tried.append(name)
        codes[job] = {"a": NO_ROOM, "b": OUT_OF_MEMORY, "c": NO_ROOM if tried.count("c") < 2 else 0}[name]
    assert "".join(tried) == "abc" + "ac" + "a" * (worker.ROUNDS - 2)


def test_the_folder_has_to_be_named(tmp_path):
    with pytest.raises(ConfigError, match="--option at: found nothing; accepted: the folder for the jobs"):
        sweep(tmp_path, options={})
    with pytest.raises(ConfigError, match="--option lanes: found '0'"):
        sweep(tmp_path, options={"at": str(tmp_path / "jobs"), "lanes": "0"})
    with pytest.raises(ConfigError, match="--option of folder: found 'to'"):
        sweep(tmp_path, options={"at": str(tmp_path / "jobs"), "to": "x"})


def test_a_search_cannot_wait_for_another_machine(tmp_path):
    with pytest.raises(ConfigError, match="--executor: found 'folder'; accepted: local, ray, slurm"):
        run_search(
            find_space("rounding"),
            sampler="random",
            trials=2,
            tasks=TASKS,
            store=tmp_path / "store",
            executor="folder",
            options={"at": str(tmp_path / "jobs")},
        )
