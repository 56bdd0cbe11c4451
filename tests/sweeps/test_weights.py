"""Checkpoints of lanes: made once, the same again, those of a store's rows, and starts of other sweeps."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp4dse.dse import ConfigError, Recipe, StoreError
from fp4dse.results import open_store, summarize
from fp4dse.sweeps import weights as of_sweeps
from fp4dse.sweeps.arguments import parse_tasks
from fp4dse.sweeps.jobs.rows import failed_rows, result_rows
from fp4dse.sweeps.planning.setting import find_setting
from fp4dse.sweeps.running.rerun import find_job
from fp4dse.sweeps.weights import about, checkpoint, checkpoint_of_row
from fp4dse.tasks import Lane, get_task, train
from fp4dse.tasks.worker import task_of
from tests.commands.running import call

ASKED = ("regression", "smoke")
LR = get_task(*ASKED).lr
BF16 = Recipe.named("bf16")


def rows_of(asked, lrs=(LR,), seeds=(0, 1), names=("nvfp4",)) -> list[dict]:
    """Rows as a sweep of these makes them."""
    setting = find_setting([asked])
    rows = []
    for job in setting.plan([Recipe.named(name) for name in names], seeds, list(lrs), set()).jobs:
        rows += result_rows(job, train(get_task(*(job.origin or asked)), job.lanes), setting.context(job))
    return rows


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Path]:
    """In a cache of this process: a test deletes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield checkpoint(ASKED, Lane(BF16, LR, 0))


@pytest.fixture(scope="module")
def store(start, tmp_path_factory):
    """Lanes from scratch, and lanes from the weights that one of them ends with."""
    found = open_store(tmp_path_factory.mktemp("swept") / "store", create=True)
    found.add(rows_of(ASKED), "scratch")
    found.add(rows_of((*ASKED, "", str(start)), lrs=(1e-4,)), "started")
    return found


def test_a_checkpoint_is_made_once_and_again_the_same(start, monkeypatch):
    before = start.read_bytes()
    assert checkpoint(ASKED, Lane(BF16, LR, 0)) == start
    start.unlink()
    assert checkpoint(ASKED, Lane(BF16, LR, 0)).read_bytes() == before
    other = checkpoint(ASKED, Lane(BF16, LR, 1))
    assert other.read_bytes() != before
    assert about(other)["seed"] == 1


def test_the_row_of_a_lane_and_its_checkpoint_have_one_run_id_and_loss(store, start):
    assert checkpoint_of_row(store, "bf16", 0, lr=LR) == checkpoint_of_row(store, "bf16", 0) == start
    row = store.runs().set_index("run_id").loc[about(start)["run_id"]]
    assert (row["val_loss"], row["config_id"]) == (about(start)["val_loss"], about(start)["config_id"])


def test_rows_of_another_start_are_another_setting(store, start):
    runs = store.runs()
    begun = runs[runs["start_digest"].eq(about(start)["digest"])]
    assert len(begun) == len(runs) / 2 == 4
    assert runs["start_digest"].isna().sum() == 4
    assert not set(begun["dataset_digest"]) & set(runs.loc[runs["start_digest"].isna(), "dataset_digest"])
    scratch = summarize(runs[runs["start_digest"].isna()])
    both = summarize(runs)
    gaps = both.merge(scratch, on=["config_id", "lr"])
    assert len(both) == 2 * len(gaps) == 4
    assert gaps["gap_x"].equals(gaps["gap_y"])


def test_what_is_stored_from_one_start_is_planned_from_another(store, start):
    recipes, seeds = [Recipe.named("nvfp4")], [0, 1]
    for asked, lr, missing in ((ASKED, LR, 0), ((*ASKED, "", str(start)), LR, 4), ((*ASKED, "", str(start)), 1e-4, 0)):
        assert find_setting([asked]).plan(recipes, seeds, [lr], store.done()).left == missing


def test_a_job_says_where_its_weights_are_and_which(start):
    setting = find_setting([(*ASKED, "", str(start))])
    [job, *_] = setting.plan([BF16], [0], None, set()).jobs
    assert job.origin == (*ASKED, "", str(start))
    assert job.digest == setting.tasks[0].digest
    assert set(setting.contexts[ASKED]["lr_source"].values()) == {"preset"}


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"lr": 0.5}, "--lr: found 0.5; accepted: that of a row"),
        ({"seed": 7}, "--seed: found 7; accepted: that of a row, 0, 1"),
        ({"recipe": "mxfp4"}, "accepted: one that was trained here"),
        ({"lr": 1e-4}, "dataset_digest: .*--from as in the sweep"),
        ({"asked": ("vision", "smoke")}, "task: found 'vision'; accepted: that of a row, regression"),
    ],
)
def test_a_row_that_is_not_there_is_one_line(store, more, word):
    with pytest.raises(ConfigError, match=word):
        checkpoint_of_row(store, **{"recipe": "bf16", "seed": 0, **more})


def test_a_failed_lane_from_weights_is_not_tried_again_from_scratch(start, tmp_path):
    setting = find_setting([(*ASKED, "", str(start))])
    [job, *_] = setting.plan([BF16], [0], None, set()).jobs
    store = open_store(tmp_path / "store", create=True)
    store.add(failed_rows(job, "the machine's fault", setting.context(job)), "failed")
    found, _ = find_job(store.runs()["run_id"][0], store)
    with pytest.raises(ConfigError, match="digest: found"):
        task_of(found)


def test_a_loss_that_comes_out_otherwise_is_said(store, start, monkeypatch):
    monkeypatch.setattr(of_sweeps, "about", lambda _: {"val_loss": 0.1})
    with pytest.raises(StoreError, match=r"but 0\.1 when it was trained again"):
        checkpoint_of_row(store, "bf16", 0, lr=LR)


def test_arguments_name_weights_beside_data():
    assert parse_tasks(["language:smoke"], start="w") == [("language", "smoke", "", "w")]
    assert parse_tasks(["language:smoke"], None, "t.txt", "w") == [("language", "smoke", "t.txt", "w")]
    with pytest.raises(ConfigError, match="accepted: weights for one task"):
        parse_tasks(["language", "regression"], start="w")


def test_the_command_writes_the_file_and_what_it_is(start, store, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call("weights", "make", "regression:smoke", "--out", "a.safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["digest"] == about(start)["digest"]
    assert call("weights", "export", str(store.path), "--lr", str(LR)) == 0
    exported = Path("runs/weights/regression-smoke-bf16-0.safetensors")
    assert exported.read_bytes() == Path("a.safetensors").read_bytes() == start.read_bytes()
    capsys.readouterr()
    assert call("weights", "make", "regression:smoke", "--out", "a.pt") == 2
    assert "accepted: a path that ends in .safetensors" in capsys.readouterr().err
