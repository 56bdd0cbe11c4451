"""Candidates are trained again with fresh seeds, once each, and what was screened stays what it was."""

import shutil
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pandas as pd
import pytest

from fp4dse.dse import ConfigError, Space
from fp4dse.results import Store, open_store, summarize, write_report
from fp4dse.results.stats.recipes.candidates import candidates
from fp4dse.results.stats.recipes.confirmed import confirmed
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.sweeps import plan_sweep, run_sweep
from fp4dse.sweeps.running.rerun import failed_jobs
from fp4dse.sweeps.stages import confirming
from fp4dse.sweeps.stages.confirming import plan_confirm, run_confirm

FAKE = str(Path(__file__).parents[1] / "fake_worker.py")
SPACE = Space.from_dict({"name": "few", "axes": {"*": ["mxfp4", "nvfp4"], "wgrad.rotation": ["none", "rht16"]}})
TASKS = [("regression", "quickstart"), ("vision", "quickstart")]
RATES = [1e-3, 2e-3]


def screen(tmp_path, **more) -> Store:
    arguments = {"tasks": TASKS, "seeds": [0, 1], "lrs": RATES, "jobs": 2, **more}
    run_sweep(SPACE, store=tmp_path / "store", worker=(sys.executable, FAKE, "ok"), **arguments)
    return open_store(tmp_path / "store")


def confirm(store: Store, mode: str = "ok", seeds: int = 4, budget_s: float | None = None, **more):
    planned = plan_confirm(store, seeds=seeds, jobs=2, budget_s=budget_s, tasks=more.pop("tasks", None))
    fake = (sys.executable, FAKE, mode)
    return run_confirm(store, planned, worker=fake, jobs=2, budget_s=budget_s, backoff_s=0.05, **more)


def fresh_rows(store: Store) -> pd.DataFrame:
    runs = store.runs()
    return runs[runs["stage"].eq("confirm")]


@pytest.fixture(scope="module")
def once_screened(tmp_path_factory) -> Path:
    """The folder in which `screen` has run."""
    folder = tmp_path_factory.mktemp("screened")
    screen(folder)
    return folder


@pytest.fixture
def store(once_screened, tmp_path) -> Store:
    """A copy of what was screened."""
    shutil.copytree(once_screened, tmp_path, dirs_exist_ok=True)
    return open_store(tmp_path / "store")


def test_each_candidate_is_trained_once_on_each_fresh_seed_at_the_rate_that_its_screened_seeds_chose(store, tmp_path):
    runs = store.runs()
    near, before = candidates(runs), summarize(runs)
    result = confirm(store)
    rows = fresh_rows(store)
    assert (result.left, result.failed) == (0, 0)
    assert result.done == len(rows) == 4 * (len(near) + len(TASKS))
    assert Counter(rows["seed"]) == dict.fromkeys(range(100, 104), len(near) + len(TASKS))
    rates = before.set_index(["task", "config_id"])["lr"]
    assert all(line.lr == rates[line.task, line.config_id] for line in rows.itertuples())
    assert rows["gap"].notna().all()  # BF16 at its own rate, whichever those of the recipes are
    assert summarize(store.runs()).equals(before)
    assert confirm(store).done == 0
    assert screen(tmp_path).runs(["stage"])["stage"].notna().sum() == len(rows)
    assert (tmp_path / "lanes.txt").read_text().count("\n") == len(store.runs(["run_id"]))


def test_more_seeds_are_added_to_those_that_there_are(store):
    confirm(store)
    assert confirm(store, seeds=6).done == len(fresh_rows(store)) / 3
    assert set(fresh_rows(store)["seed"]) == set(range(100, 106))
    assert confirmed(store.runs())["estimated_on"].eq(3).all()


def test_seeds_that_were_screened_are_not_fresh(tmp_path):
    store = screen(tmp_path, tasks=TASKS[:1], seeds=[100, 102, 7])
    assert plan_confirm(store, seeds=4).seeds == [101, 103, 104, 105]


def test_seeds_that_judged_candidates_are_not_screened(store, tmp_path):
    confirm(store)
    with pytest.raises(ConfigError, match=r"--seeds: found 101; .*`confirm`"):
        screen(tmp_path, seeds=[5, 101])
    with pytest.raises(ConfigError, match=r"--seeds: found 101; .*`confirm`"):
        plan_sweep(SPACE, tasks=TASKS, seeds=[5, 101], store=store.path)
    with pytest.raises(ConfigError, match=r"--seeds: found 0; .*`sweep`"):
        screen(tmp_path, seeds=[0], stage="confirm")
    screen(tmp_path, seeds=[5])


def test_a_budget_takes_the_nearest_to_the_front_and_the_same_command_goes_on_with_the_rest(store, monkeypatch):
    whole = plan_confirm(store, seeds=4, jobs=2)
    assert whole.lanes == 4 * (len(whole.candidates) + len(TASKS))
    assert [one.behind for one in whole.candidates] == sorted(one.behind for one in whole.candidates)
    little = plan_confirm(store, seeds=4, jobs=2, budget_s=1e-9)
    assert [one.config_id for one in little.taken] == [whole.candidates[0].config_id]
    assert "room for the 1 nearest to the front" in little.sentences()
    run_confirm(store, little, worker=(sys.executable, FAKE, "ok"), jobs=2)
    rest = plan_confirm(store, seeds=4, jobs=2, budget_s=little.seconds + 1e-9)
    assert len(rest.taken) > 1
    assert rest.taken[0].left == 0
    [new] = [verdict.confirmed for verdict in verdicts(store.runs()) if verdict.confirmed]
    assert new.missing == sum(one.task == whole.candidates[0].task for one in whole.candidates) - 1


def test_what_it_takes_follows_from_the_screened_lanes_of_each_candidate(store):
    planned = plan_confirm(store, seeds=4, jobs=2)
    lane_s = store.runs(["task", "config_id", "lane_s"]).groupby(["task", "config_id"])["lane_s"].mean()
    one = planned.candidates[0]
    assert one.seconds == pytest.approx(4 * lane_s[one.task, one.config_id])
    assert planned.seconds == pytest.approx((planned.baseline_seconds + sum(c.seconds for c in planned.taken)) / 2)
    facts = planned.facts()
    assert facts["recipes"] == {"regression:quickstart": 4, "vision:quickstart": 4}
    assert facts["to_train"] == planned.lanes
    assert msgspec.json.encode(facts)


def test_a_failed_lane_of_the_stage_is_tried_again_as_one(store):
    confirm(store, mode="crash")
    assert fresh_rows(store)["status"].eq("failed").all()
    assert {context["stage"] for _, context, _ in failed_jobs(store)} == {"confirm"}
    result = confirm(store)
    assert (result.failed, result.left) == (0, 0)
    assert fresh_rows(store)["status"].eq("done").all()


def test_tasks_can_be_chosen_and_are_refused_by_name(store):
    planned = plan_confirm(store, tasks=TASKS[:1], seeds=4)
    assert {one.task for one in planned.candidates} == {"regression"}
    with pytest.raises(ConfigError, match="regression:quickstart, vision:quickstart"):
        plan_confirm(store, tasks=[("regression", "smoke")])
    with pytest.raises(ConfigError, match="--seeds: found 3; accepted: 4 or more"):
        plan_confirm(store, seeds=3)
    with pytest.raises(ConfigError, match="--device: found 'cuda'; accepted: cpu"):
        plan_confirm(store, device="cuda")


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("dataset_digest", "0123", "--data and --from as in the sweep"),
        ("rev_task", 99, "a sweep by this version first"),
        ("device_class", "another", "what it was screened on, another"),
    ],
)
def test_rows_that_cannot_be_compared_with_new_ones_are_refused_with_the_column_that_differs(
    store, monkeypatch, column, value, words
):
    runs = store.runs(confirming._READ)
    monkeypatch.setattr(Store, "runs", lambda self, *_, **__: runs.assign(**{column: value}))
    monkeypatch.setattr("fp4dse.sweeps.planning.setting.Setting.learn_classes", lambda *_: None)
    with pytest.raises(ConfigError, match=words):
        plan_confirm(store)


def test_a_task_of_ones_own_is_to_be_named_as_it_was_swept(store, monkeypatch):
    runs = store.runs(confirming._READ).assign(task="mine", preset="here")
    monkeypatch.setattr(Store, "runs", lambda self, *_, **__: runs)
    with pytest.raises(ConfigError, match=r"--task: found 'mine:here'.*FILE.py:NAME"):
        plan_confirm(store)


def test_one_seed_says_nobody_who_is_a_candidate(tmp_path):
    with pytest.raises(ConfigError, match="two seeds or more"):
        plan_confirm(screen(tmp_path, seeds=[0]))


@pytest.mark.heavy
def test_what_is_confirmed_goes_on_after_its_time_was_up_and_the_report_has_both_answers(tmp_path):
    store = screen(tmp_path, tasks=TASKS[:1])
    screened_answer = verdicts(store.runs())[0].label

    planned = plan_confirm(store, seeds=4)
    first = run_confirm(store, planned, jobs=1, worker=(sys.executable, FAKE, "slow=0.4"), budget_s=0.6)
    assert first.left
    second = confirm(store)
    assert (second.left, second.stored) == (0, first.done)
    rows = fresh_rows(store)
    assert not rows.duplicated(["config_id", "seed"]).any()
    assert rows["status"].eq("done").all()
    [verdict] = verdicts(store.runs())
    assert verdict.label == screened_answer
    assert verdict.confirmed.estimated_on == 2
    write_report(store, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Screened and confirmed" in page
    assert "Confirmed: loss" in page
    assert '<span class="key">Screened</span>' in page
