"""The study says what the store says, whatever happened to it before."""

import json
import math
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import optuna
import pytest
from optuna_dashboard import get_note, save_note
from optuna_dashboard._note import get_note_from_system_attrs

from fp4dse.dse import ConfigError, Recipe, Space
from fp4dse.results import open_store, summarize
from fp4dse.results.stats.paired import OVERHEAD
from fp4dse.sweeps.dashboard import trials as trials_module
from fp4dse.sweeps.dashboard.mirror import mirror, mirror_trials
from fp4dse.sweeps.dashboard.storages import open_storage
from fp4dse.sweeps.dashboard.trials import POINTS, VALUES, study_data
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
    assert study.metric_names == list(VALUES)
    for trial in study.trials:
        line = table.loc[trial.user_attrs["config_id"]]
        assert trial.state == STATES.COMPLETE
        assert trial.values == pytest.approx([line[OVERHEAD], 100 * math.expm1(line["gap"])], rel=1e-5)
        assert trial.user_attrs["recipe"].endswith(line["label"])
    assert {trial.user_attrs["config_id"] for trial in study.best_trials} == set(table.index[table["on_front"]])


def test_the_parameters_are_the_axes_that_vary_and_agreeing_slots_are_one(store, storage):
    store.add(lanes(), "lanes")
    mirror(store, storage, "few")
    assert {tuple(sorted(trial.params)) for trial in load(storage).trials} == {("*.scale", "wgrad.rotation")}
    assert {trial.params["*.scale"] for trial in load(storage).trials} == {"e4m3", "ue5m3", "e5m2"}


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
    assert [line.key for line in study_data(store, "few", unfinished=False)[NAME].trials] == [
        recipe.config_id for recipe in sorted(RECIPES[:2], key=lambda recipe: recipe.config_id)
    ]
    assert len(study_data(store, "few", unfinished=True)[NAME].trials) == 3


def test_every_task_and_setting_has_a_study(store, storage):
    store.add([*lanes(), *(dict(one, task="regression") for one in [*BASELINE, *lanes()])], "two tasks")
    assert set(mirror(store, storage, "few")) == {NAME, "few regression:small"}
    store.add([dict(one, device_class="gpu") for one in [*BASELINE, *lanes()]], "two devices")
    assert set(study_data(store, "few")) == {
        "few regression:small",
        "few vision:small d cpu torch 1 1 1",
        "few vision:small d gpu torch 1 1 1",
    }


def test_more_recipes_than_the_dashboard_takes_are_cut_to_the_best(store, monkeypatch, caplog):
    monkeypatch.setattr(trials_module, "MOST_TRIALS", 2)
    store.add(lanes(), "lanes")
    assert {line.key for line in study_data(store, "few")[NAME].trials} == {recipe.config_id for recipe in RECIPES[:2]}
    assert "6 recipes" in caplog.text


def test_a_store_without_rows_has_no_studies(tmp_path, storage):
    assert mirror(open_store(tmp_path / "empty", create=True), storage, "few") == {}


def test_values_that_json_has_not_are_left_out(store):
    store.add([row(RECIPES[0], 0, 1.5)], "one seed: no interval")
    (line,) = study_data(store, "few")[NAME].trials
    assert line.facts["loss against BF16"] == "+50.0 %"
    assert line.facts["verdict"] == "with one seed nothing can be told apart from BF16"
    json.dumps(line.facts, allow_nan=False)


# --- what a trial shows beside its values --------------------------------------------------------------------------

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def timed(recipe, seed, loss, **more) -> dict:
    curve = {"curve_step": list(range(1, 41)), "curve_loss": [loss * (41 - i) for i in range(1, 41)]}
    return row(recipe, seed, loss, created_at=AT + timedelta(seconds=seed), lane_s=1.5, **curve, **more)


def test_a_trial_took_its_lanes_share_of_the_time_and_ended_with_the_last_of_them(store, storage):
    store.add([timed(RECIPES[0], seed, 1.5) for seed in (0, 1)], "lanes")
    mirror(store, storage, "few")
    (trial,) = load(storage).trials
    assert trial.duration == timedelta(seconds=3)
    assert trial.datetime_complete.astimezone(UTC) == AT + timedelta(seconds=1)


def test_a_trial_has_a_few_points_of_the_mean_curve(store, storage):
    store.add([timed(RECIPES[0], 0, 1.0), timed(RECIPES[0], 1, 2.0)], "lanes")
    mirror(store, storage, "few")
    (trial,) = load(storage).trials
    assert len(trial.intermediate_values) == POINTS
    assert trial.intermediate_values[1] == pytest.approx(1.5 * 40)
    assert trial.intermediate_values[40] == pytest.approx(1.5)


def test_the_notes_say_what_to_use_where_the_report_is_and_what_a_recipe_is(store, storage):
    store.add(lanes(), "lanes")
    mirror(store, storage, "few")
    study = load(storage)
    said = get_note(study)
    assert said.startswith("**Use**: ")
    assert "**How sure**: " in said
    assert f"[The report of this store](/report) (`{store.path.parent / 'report.html'}`)" in said
    trial = study.trials[0]
    attrs = storage.get_study_system_attrs(study._study_id)
    note = get_note_from_system_attrs(attrs, trial._trial_id)
    assert note["body"].startswith(f"**{trial.user_attrs['recipe']}**")
    assert trial.user_attrs["loss against BF16"] in note["body"]


def test_the_studys_note_follows_the_store_but_never_replaces_what_somebody_wrote(store, storage):
    store.add(lanes(RECIPES[:2]), "some")
    mirror(store, storage, "few")
    first = get_note(load(storage))
    store.add(lanes(RECIPES[:2], seeds=(2, 3)) + [row(Recipe.named("bf16"), seed, 1.0) for seed in (2, 3)], "more")
    mirror(store, storage, "few")
    assert get_note(load(storage)) != first
    save_note(load(storage), "my own words")
    mirror(store, storage, "few")
    assert get_note(load(storage)) == "my own words"


def test_a_long_note_that_becomes_a_short_one_is_whole(storage):
    for text in ("x" * 5000, "short", "y" * 2001):
        mirror_trials(storage, NAME, [], text)
        assert get_note(load(storage)) == text


def test_people_see_no_json_in_the_attributes_and_a_short_hash(store, storage):
    store.add(lanes(), "lanes")
    mirror(store, storage, "few")
    for trial in load(storage).trials:
        assert re.fullmatch("[0-9a-f]{12}", trial.user_attrs["digest"])
        assert max(len(f"{value!r}") for value in [*trial.values, trial.user_attrs["val loss"]]) <= 8
        assert not any("{" in str(value) or "[" in str(value) for value in trial.user_attrs.values())


@pytest.mark.parametrize("directions", [["minimize"], ["minimize", "minimize"]])
def test_a_study_of_somebody_else_is_left_alone(store, storage, directions):
    store.add(lanes(), "lanes")
    mine = optuna.create_study(study_name=NAME, storage=storage, directions=directions)
    mine.add_trial(optuna.trial.create_trial(values=[1.0] * len(directions)))
    with pytest.raises(ConfigError, match="nobody else made a study of that name"):
        mirror(store, storage, "few")
    assert len(load(storage).trials) == 1
    assert load(storage).trials[0].user_attrs == {}
