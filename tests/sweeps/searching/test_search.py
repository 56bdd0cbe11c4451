"""A search tries what it was asked to, trains nothing twice, and never takes a spoiled recipe for a good one."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fp4dse.dse import SLOTS, ConfigError, Space
from fp4dse.results import open_store
from fp4dse.sweeps import read_state, run_search
from fp4dse.sweeps.conclusions import search_conclusion
from fp4dse.sweeps.planning.halving import Halving
from fp4dse.sweeps.planning.setting import find_setting
from fp4dse.sweeps.running.progress import headline
from fp4dse.sweeps.searching import sampling
from fp4dse.sweeps.searching.sampling import SAMPLERS
from fp4dse.sweeps.searching.search import batch_size, count_recipes

FAKE = str(Path(__file__).parents[1] / "fake_worker.py")
TASK = ("regression", "quickstart")
SPACE = Space(
    "small",
    axes={
        "*.scale": ["e4m3", "ue5m3", "e5m2", "bf16"],
        "*.block": [16, 32, 64],
        "wgrad.rotation": ["none", "rht16"],
    },
    forbid=[{"when": {"*.scale": "bf16", "*.block": 64}, "reason": "too many bits"}],
)
RECIPES = 24 - 2
THREE = Space("three", axes={"*.scale": ["e4m3", "ue5m3", "bf16"]})


def run(tmp_path, space=SPACE, mode="ok", **more):
    asked = {"sampler": "random", "trials": 8, "tasks": [TASK], "seeds": [0, 1], "jobs": 2, "batch": 4, **more}
    return run_search(space, store=tmp_path / "store", worker=(sys.executable, FAKE, mode), backoff_s=0.05, **asked)


def one(tmp_path, *arguments, **more):
    """The study of a search of one task."""
    (study,) = run(tmp_path, *arguments, **more).studies
    return study


def trained(tmp_path) -> int:
    """Lanes given to workers so far."""
    return len((tmp_path / "lanes.txt").read_text().splitlines())


def tried(tmp_path) -> set[str]:
    runs = open_store(tmp_path / "store").runs(["config_id", "is_baseline"])
    return set(runs["config_id"][~runs["is_baseline"]])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_tries_as_many_distinct_recipes_as_asked_for(tmp_path, sampler):
    result = one(tmp_path, sampler=sampler)
    assert (result.trials, result.trained, result.stored, result.stopped) == (8, 8, 0, None)
    assert len(tried(tmp_path)) == 8
    assert trained(tmp_path) == 2 * (8 + 1)
    assert tried(tmp_path) <= {recipe.config_id for recipe in SPACE.recipes()}


def test_what_the_store_has_is_looked_up_and_the_same_search_ends_the_same(tmp_path):
    first = one(tmp_path)
    lanes = trained(tmp_path)
    again = one(tmp_path)
    assert (again.trained, again.stored, again.trials) == (0, 8, 8)
    assert trained(tmp_path) == lanes
    assert again.front == first.front


def test_a_search_that_was_stopped_goes_on_where_it_was(tmp_path):
    whole = one(tmp_path / "whole", trials=12)
    part = run(tmp_path, trials=12, budget_s=1.0, mode="slow=0.3")
    assert part.studies[0].trials < 12
    assert part.stopped == "the budget of 1 s is spent"
    rest = one(tmp_path, trials=12)
    assert rest.front == whole.front
    assert tried(tmp_path) == tried(tmp_path / "whole")


def test_the_front_is_that_of_what_was_tried(tmp_path):
    result = one(tmp_path, trials=12, batch=12)
    table = open_store(tmp_path / "store").pareto()
    assert {row["config_id"] for row in result.front} == set(table["config_id"])
    assert [row["gap"] for row in result.front] == sorted(row["gap"] for row in result.front)


def test_the_whole_space_may_be_tried_and_what_a_rule_forbids_never_is(tmp_path):
    result = one(tmp_path, trials=RECIPES, batch=RECIPES)
    assert tried(tmp_path) == {recipe.config_id for recipe in SPACE.recipes()}
    assert result.rejected > 0


def test_a_sampler_that_knows_all_gets_further_seeds_until_there_are_enough(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling, "MOST_SEEDS", 4)
    result = one(tmp_path, THREE, trials=20)
    assert (result.trials, result.trained, result.replicates) == (6, 3, 3)
    assert result.stopped == "the sampler proposes nothing new"
    runs = open_store(tmp_path / "store").runs(["config_id", "seed"])
    assert {tuple(sorted(part["seed"])) for _, part in runs.groupby("config_id")} == {(0, 1, 2, 3)}
    assert {row["seeds"] for row in result.front} == {4}


def test_diverged_recipes_are_counted_and_no_result(tmp_path):
    result = one(tmp_path, mode="diverge")
    assert (result.trials, result.diverged, result.front) == (8, 8, [])


def test_failed_recipes_are_counted_and_tried_again_by_the_same_command(tmp_path):
    result = run(tmp_path, trials=4, mode="crash")
    assert "the first 3 jobs all failed" in result.stopped
    assert result.studies[0].front == []
    assert "the die was cast" in search_conclusion(result)
    assert one(tmp_path, trials=4).trained == 4


def test_a_failed_job_is_a_failed_trial_and_the_search_goes_on(tmp_path):
    run(tmp_path, trials=1, seeds=[0])  # the baseline is there, and jobs come back
    result = run(tmp_path, trials=3, batch=1, seeds=[0], mode="crash")
    (study,) = result.studies
    assert (study.trials, study.stored, study.failed, result.exit_code) == (3, 1, 2, 1)


def test_what_was_dropped_at_a_rung_is_no_result(tmp_path):
    result = one(tmp_path, THREE, trials=3, batch=3, seeds=[0], halving=Halving(1, 0.5))
    runs = open_store(tmp_path / "store").runs(["config_id", "status"])
    dropped = set(runs["config_id"][runs["status"] == "pruned"])
    assert dropped
    assert not dropped & {row["config_id"] for row in result.front}


def test_every_task_has_a_study_as_if_it_were_alone_and_all_are_trained_side_by_side(tmp_path):
    seen = []  # in the order in which they ran
    tasks = [TASK, ("vision", "quickstart")]
    look = lambda state: seen.extend(job.task for job in state.running)  # noqa: E731
    result = run(tmp_path, sampler="tpe", trials=12, tasks=tasks, mode="slow=0.1", progress=look)
    for task in ("regression", "vision"):
        assert seen.index(task) < len(seen) // 2 < len(seen) - seen[::-1].index(task)
    for task, study in zip(tasks, result.studies, strict=True):
        assert ((study.task, study.preset), study.trials, study.trained) == (task, 12, 12)
        assert study.front == one(tmp_path / study.task, sampler="tpe", trials=12, tasks=[task]).front
    lanes = open_store(tmp_path / "store").runs(["task"])["task"].value_counts().to_dict()
    assert lanes == {"regression": 26, "vision": 26}


def test_how_long_jobs_take_does_not_change_what_is_proposed(tmp_path):
    quick = one(tmp_path / "quick", sampler="tpe", trials=12)
    slow = one(tmp_path / "slow", sampler="tpe", trials=12, mode="slow=0.1", jobs=1)
    assert tried(tmp_path / "quick") == tried(tmp_path / "slow")
    assert quick.front == slow.front


def test_workers_have_the_next_batch_before_the_last_one_is_back(tmp_path):
    idle = []

    def look(state):
        left = state.trials_asked - state.trials
        idle.append(len(state.running) < 2 and left > 4)

    run(tmp_path, trials=16, mode="slow=0.5", progress=look)
    assert sum(idle) <= 2  # at the start


def test_trials_and_lanes_are_told_apart_on_the_way_and_in_the_end(tmp_path):
    run(tmp_path, trials=4)
    result = run(tmp_path, trials=8)
    state = read_state(tmp_path / "store")
    assert headline(state) == "8/8 trials (4 from the store), 8/8 lanes; finished"
    said = search_conclusion(result)
    assert "regression:quickstart: 8 of 8 trials: 4 trained, 4 from the store" in said
    assert f"8 recipes of {RECIPES} in the space tried (36.4 %)" in said


def test_a_search_that_is_cut_off_says_how_much_is_left(tmp_path):
    said = search_conclusion(run(tmp_path, trials=8, budget_s=0.0))
    assert "the budget of 0 s is spent; 8 trials left, the same command continues" in said


def test_a_batch_fills_the_workers_but_leaves_the_sampler_something_to_learn():
    one, two = (find_setting([("regression", "smoke"), ("vision", "smoke")][:n], jobs=8) for n in (1, 2))
    assert [batch_size(one, 4, trials) for trials in (8, 80, 1000)] == [4, 10, 32]
    assert batch_size(two, 4, 1000) == 16


def test_recipes_of_a_space_are_counted_unless_there_are_very_many():
    assert count_recipes(SPACE) == RECIPES
    scales = ["e4m3", "ue5m3", "e5m2", "e8m0", "bf16", "fp32"]
    many = Space("many", axes={f"{slot}.scale": scales for slot in SLOTS})
    assert (many.size, count_recipes(many)) == (6**6, None)


def test_one_objective_has_one_best(tmp_path):
    result = one(tmp_path, objectives=["loss"], sampler="tpe")
    runs = open_store(tmp_path / "store").runs(["config_id", "is_baseline", "val_loss"])
    means = runs[~runs["is_baseline"]].groupby("config_id")["val_loss"].mean()
    assert [row["config_id"] for row in result.front] == [means.idxmin()]
    assert result.front[0]["loss"] == pytest.approx(means.min())


def test_seeds_and_rates_of_the_space_are_taken_unless_others_are_given(tmp_path):
    space = Space("three", axes=THREE.axes, lanes={"seeds": [7], "lr": [0.5]})
    run(tmp_path, space, trials=2, seeds=None)
    runs = open_store(tmp_path / "store").runs(["seed", "lr"])
    assert (set(runs["seed"]), set(runs["lr"])) == ({7}, {0.5})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"sampler": "cmaes"}, "--sampler: found 'cmaes'; accepted: tpe, nsga2"),
        ({"objectives": ["gap", "speed"]}, "--objectives: found 'speed'; accepted: some of gap, overhead"),
        ({"objectives": []}, "--objectives"),
        ({"objectives": ["loss", "gap", "loss"]}, "--objectives: found 'loss'"),
        ({"objectives": ["metric"]}, "regression has no metric of which it says whether higher or lower is better"),
        ({"trials": 0}, "--trials: found 0"),
        ({"batch": 0}, "--batch: found 0"),
        ({"tasks": [("chess", "small")]}, "chess"),
        ({"space": Space(join=[{"base": "mxfp4"}])}, "a space with axes"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path, wrong, said):
    with pytest.raises(ConfigError, match="accepted") as caught:
        run(tmp_path, **wrong)
    assert said in str(caught.value)
    assert not (tmp_path / "store").exists()


@pytest.mark.slow
def test_real_workers_train_what_a_sampler_proposes(tmp_path):
    """Nothing is faked, and a killed search goes on."""
    tasks = [("regression", "smoke"), ("vision", "smoke")]
    asked = {"sampler": "tpe", "trials": 3, "batch": 2, "tasks": tasks, "seeds": [0], "store": tmp_path / "store"}
    stopped = run_search(THREE, **asked, progress=lambda state: state.done and os.kill(os.getpid(), signal.SIGTERM))
    assert stopped.stopped == "stopped by SIGTERM"
    assert (stopped.exit_code, sum(study.trials for study in stopped.studies) < 6) == (130, True)
    result = run_search(THREE, **asked)
    assert [(study.trials, study.failed, len(study.front) > 0) for study in result.studies] == [(3, 0, True)] * 2
    runs = open_store(tmp_path / "store").runs(["status"])
    assert runs["status"].tolist() == ["done"] * 8
    assert result.lanes < 8


def test_an_unknown_executor_and_its_options_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="local, ray, slurm"):
        run(tmp_path, executor="sge")
    with pytest.raises(ConfigError, match="--option of local: found 'gpus'"):
        run(tmp_path, options={"gpus": "1"})


def test_optuna_is_not_imported_before_it_is_needed():
    code = "import sys, fp4dse.sweeps; sys.exit('optuna' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
