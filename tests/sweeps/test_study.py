"""The study says what the store says, whatever happened to it before, and wherever it is kept."""

import contextlib
import json
import math
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.results import open_store, summarize
from fp4dse.results.paired import OVERHEAD
from fp4dse.sweeps import study as studies
from fp4dse.sweeps.study import Line, close_storage, mend_journal, mirror, mirror_lines, open_storage, study_lines
from tests.sweeps import databases
from tests.sweeps.made import row

STATES = optuna.trial.TrialState
NAME = "few vision:small"
RECIPES = list(Space(axes={"*.scale": ["e4m3", "ue5m3", "e5m2"], "wgrad.rotation": ["none", "rht16"]}).recipes())


BASELINE = [row(Recipe.named("bf16"), seed, 1.0) for seed in (0, 1)]


def lanes(recipes=RECIPES, seeds=(0, 1)) -> list[dict]:
    return [row(recipe, seed, 1.1 + 0.1 * i + 0.01 * seed) for i, recipe in enumerate(recipes) for seed in seeds]


@pytest.fixture
def store(tmp_path):
    made = open_store(tmp_path / "store", create=True)
    made.add(BASELINE, "baseline")
    return made


@pytest.fixture
def storage(tmp_path):
    return open_storage(tmp_path / "study.journal")


def load(storage, name=NAME) -> optuna.Study:
    return optuna.load_study(study_name=name, storage=storage)


def contents(storage, name=NAME) -> list:
    """What a reader sees of a study."""
    return [(trial.state, trial.values, trial.params, trial.user_attrs) for trial in load(storage, name).trials]


def test_every_recipe_is_a_trial_with_its_gap_and_overhead(store, storage):
    store.add(lanes(), "lanes")
    assert mirror(store, storage, "few") == {NAME: len(RECIPES)}
    table = summarize(store.runs()).set_index("config_id")
    study = load(storage)
    assert study.metric_names == ["gap", "overhead"]
    for trial in study.trials:
        line = table.loc[trial.user_attrs["config_id"]]
        assert trial.state == STATES.COMPLETE
        assert trial.values == pytest.approx([line["gap"], line[OVERHEAD]])
        assert trial.user_attrs["label"] == line["label"]
    assert {trial.user_attrs["config_id"] for trial in study.best_trials} == set(table.index[table["on_front"]])


def test_the_parameters_are_the_axes_that_vary_and_agreeing_slots_are_one(store, storage):
    store.add(lanes(), "lanes")
    mirror(store, storage, "few")
    assert {tuple(sorted(trial.params)) for trial in load(storage).trials} == {("scale", "wgrad_rotation")}
    assert {trial.params["scale"] for trial in load(storage).trials} == {"e4m3", "ue5m3", "e5m2"}


def test_what_diverged_or_was_dropped_is_no_good_trial(store, storage):
    rows = lanes(seeds=(0,))
    rows += [row(RECIPES[0], 1, None), *(row(recipe, 1, 0.1) for recipe in RECIPES[2:])]
    rows.append(row(RECIPES[1], 1, None, status="pruned", pruned_step=5))
    store.add(rows, "lanes")
    mirror(store, storage, "few")
    found = {trial.user_attrs["config_id"]: trial for trial in load(storage).trials}
    assert found[RECIPES[0].config_id].state == STATES.FAIL
    assert found[RECIPES[1].config_id].state == STATES.PRUNED
    assert {trial.state for trial in load(storage).best_trials} == {STATES.COMPLETE}
    assert len(load(storage).get_trials(states=[STATES.COMPLETE])) == len(RECIPES) - 2


def test_mirroring_again_adds_only_what_is_new(store, storage):
    store.add(lanes(RECIPES[:5]), "some")
    mirror(store, storage, "few")
    before = [trial._trial_id for trial in load(storage).trials]
    mirror(store, storage, "few")
    store.add(lanes()[-2:], "more")
    mirror(store, storage, "few")
    after = [trial._trial_id for trial in load(storage).trials]
    assert after[:5] == before
    assert len(after) == 6


def test_a_recipe_that_changed_or_has_a_new_value_makes_the_study_anew(store, storage):
    store.add(lanes(RECIPES[:2]), "some")
    mirror(store, storage, "few")
    store.add([row(RECIPES[0], 2, 9.0), row(Recipe.named("bf16"), 2, 1.0)], "a seed more")
    store.add(lanes(RECIPES[2:]), "new scales")
    mirror(store, storage, "few")
    fresh = open_storage(Path(store.path) / "fresh.journal")
    mirror(store, fresh, "few")
    assert contents(storage) == contents(fresh)
    assert len(contents(storage)) == len(RECIPES)


def test_recipes_of_a_running_sweep_come_when_they_have_all_lanes_of_the_baseline(store):
    store.add([*lanes(RECIPES[:2]), row(RECIPES[2], 0, 1.0)], "lanes")
    assert [line.key for line in study_lines(store, "few", unfinished=False)[NAME]] == [
        recipe.config_id for recipe in sorted(RECIPES[:2], key=lambda recipe: recipe.config_id)
    ]
    assert len(study_lines(store, "few", unfinished=True)[NAME]) == 3


def test_every_task_and_setting_has_a_study(store, storage):
    store.add([*lanes(), *(dict(one, task="regression") for one in [*BASELINE, *lanes()])], "two tasks")
    assert set(mirror(store, storage, "few")) == {NAME, "few regression:small"}
    store.add([dict(one, device_class="gpu") for one in [*BASELINE, *lanes()]], "two devices")
    assert set(study_lines(store, "few")) == {
        "few regression:small",
        "few vision:small d cpu torch 1 1 1",
        "few vision:small d gpu torch 1 1 1",
    }


def test_more_recipes_than_the_dashboard_takes_are_cut_to_the_best(store, monkeypatch, caplog):
    monkeypatch.setattr(studies, "MOST_TRIALS", 2)
    store.add(lanes(), "lanes")
    assert {line.key for line in study_lines(store, "few")[NAME]} == {recipe.config_id for recipe in RECIPES[:2]}
    assert "6 recipes" in caplog.text


def test_a_store_without_rows_has_no_studies(tmp_path, storage):
    assert mirror(open_store(tmp_path / "empty", create=True), storage, "few") == {}


# --- the journal ---------------------------------------------------------------------------------------------------


def some_lines(n: int, seed: int = 0) -> list[Line]:
    draws = random.Random(seed)
    return [
        Line(
            key=f"{i}",
            params={"a": draws.choice("xyz"), "b": draws.choice("uvw")},
            values=(draws.random(), draws.random()) if i % 5 else None,
            facts={"label": f"recipe {i}", "gap_low": None},
        )
        for i in range(n)
    ]


def test_a_journal_that_is_torn_anywhere_in_its_last_line_goes_on_as_if_it_were_not(tmp_path):
    path, lines = tmp_path / "torn.journal", some_lines(8)
    mirror_lines(open_storage(path), NAME, lines[:7])
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for length in [*range(last + 1, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        assert mend_journal(path)
        mirror_lines(open_storage(path), NAME, lines)
        assert [trial.user_attrs["label"] for trial in load(open_storage(path)).trials] == [
            f"recipe {i}" for i in range(8)
        ]


@pytest.mark.parametrize("broken", [b"\x00\xff\n", b'{"op": \n', b"[1, 2"])
def test_a_journal_that_is_broken_elsewhere_is_made_anew(tmp_path, broken, caplog):
    path, lines = tmp_path / "broken.journal", some_lines(4)
    mirror_lines(open_storage(path), NAME, lines)
    path.write_bytes(broken.rstrip(b"\n") + b"\n" + path.read_bytes())
    mirror_lines(open_storage(path), NAME, lines)
    assert len(load(open_storage(path)).trials) == 4
    assert "made anew" in caplog.text


def test_a_sound_journal_is_left_alone(tmp_path):
    path = tmp_path / "sound.journal"
    assert not mend_journal(path)
    mirror_lines(open_storage(path), NAME, some_lines(3))
    before = path.read_bytes()
    assert not mend_journal(path)
    assert path.read_bytes() == before
    for line in before.splitlines():
        json.loads(line)


# --- other storages ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def postgresql_url():
    if reason := databases.why_not():
        assert not os.environ.get("CI"), reason
        pytest.skip(reason)
    with databases.postgresql() as url:
        yield url


@pytest.fixture
def grpc_url(tmp_path):
    """A journal behind Optuna's proxy, served by a thread."""
    port = databases.free_port()
    served = threading.Thread(target=studies.serve_grpc, args=(tmp_path / "behind.journal", port), daemon=True)
    served.start()
    return f"grpc://127.0.0.1:{port}"


@pytest.fixture(params=["journal", "sqlite", "postgresql", "grpc"])
def url(request, tmp_path):
    """A storage of each kind."""
    if request.param in ("postgresql", "grpc"):
        return request.getfixturevalue(f"{request.param}_url")
    return str(tmp_path / "a.journal") if request.param == "journal" else f"sqlite:///{tmp_path / 'a.db'}"


@pytest.fixture
def opened():
    """Opens storages and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def open_(url):
            storage = open_storage(url)
            stack.callback(close_storage, storage)
            return storage

        yield open_


def test_every_storage_shows_the_same_study_and_two_writers_share_it(url, opened, tmp_path):
    expected = open_storage(tmp_path / "expected.journal")
    for name, lines in (("one", some_lines(12)), ("two", some_lines(9, seed=1))):
        mirror_lines(expected, name, lines)
        writer = opened(url)
        mirror_lines(writer, name, lines[:4])
        mirror_lines(writer, name, lines)
        mirror_lines(opened(url), name, lines)
    reader = opened(url)
    for name in ("one", "two"):
        assert contents(reader, name) == contents(expected, name)
        assert load(reader, name).metric_names == ["gap", "overhead"]


WRITER = """
import sys
from fp4dse.sweeps.study import Line, mirror_lines, open_storage
storage = open_storage(sys.argv[1])
for n in range(1, 9):
    lines = [Line(key=str(i), params={"a": "xyz"[i % 3]}, values=(i, -i), facts={"label": str(i)}) for i in range(n)]
    mirror_lines(storage, sys.argv[2], lines)
"""


@pytest.mark.slow
@pytest.mark.parametrize("url", ["journal", "postgresql", "grpc"], indirect=True)
def test_several_processes_that_write_at_a_time_lose_nothing(url, opened):
    reader = opened(url)  # makes the tables of a database
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, url, f"study {i}"]) for i in range(2)
    ]  # at the same time
    assert [writer.wait(timeout=120) for writer in writers] == [0, 0]
    for i in range(2):
        assert [trial.user_attrs["label"] for trial in load(reader, f"study {i}").trials] == [str(n) for n in range(8)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("postgresql://me:secret@127.0.0.1:1/none", "a database that answers"),
        ("grpc://127.0.0.1", "grpc://HOST:PORT"),
        ("nosql://x", "a database that answers"),
    ],
)
def test_a_storage_that_does_not_answer_is_named_without_its_password(wrong, said):
    with pytest.raises(ConfigError, match="--storage") as caught:
        open_storage(wrong)
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_values_that_json_has_not_are_left_out(store):
    store.add([row(RECIPES[0], 0, 1.5)], "one seed: no interval")
    (line,) = study_lines(store, "few")[NAME]
    assert line.facts["gap_low"] is None
    assert math.isfinite(line.values[0])
    json.loads(line.digest)
