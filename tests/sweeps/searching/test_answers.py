"""A sampler is told one answer a recipe, whatever kinds of machines trained it, and none that is spoiled."""

import math

import pytest

from fp4dse.dse import Recipe, Space, points
from fp4dse.dse.cost import bits_per_element, overhead
from fp4dse.results import open_store
from fp4dse.sweeps.searching.answers import OBJECTIVES, Answers
from tests.sweeps.made import SETTING, row

BF16 = Recipe.named("bf16")
RECIPES = list(Space(axes={"*.scale": ["e4m3", "ue5m3", "e5m2"]}).recipes())
H200, L40S = {"device_class": "H200"}, {"device_class": "L40S"}


def answers(tmp_path, rows, objectives=("gap",), **context) -> Answers:
    store = open_store(tmp_path / "store", create=True)
    store.add(rows, "rows")
    found = Answers(store, {**SETTING, "device_class": "unknown", **context}, objectives)
    found.read([of["config_id"] for of in rows])
    return found


def test_each_kind_of_machine_counts_by_its_pairs_of_seeds(tmp_path):
    rows = [row(BF16, seed, 1.0, **kind) for kind in (H200, L40S) for seed in range(3)]
    rows += [row(RECIPES[0], 0, 2.0, **H200), *(row(RECIPES[0], seed, 4.0, **L40S) for seed in (1, 2))]
    found = answers(tmp_path, rows)
    assert found.states[RECIPES[0].config_id] == "done"
    assert found.values[RECIPES[0].config_id] == [pytest.approx((math.log(2) + 2 * math.log(4)) / 3)]
    assert [line["seeds"] for line in found.front([RECIPES[0].config_id])] == [3]


def test_a_kind_without_a_baseline_does_not_count_while_another_has_one(tmp_path):
    rows = [row(BF16, 0, 1.0, **H200), row(RECIPES[0], 0, 2.0, **H200), row(RECIPES[0], 1, 9.0, **L40S)]
    rows.append(row(RECIPES[1], 0, 2.0, **L40S))
    found = answers(tmp_path, rows)
    assert found.values == {RECIPES[0].config_id: [pytest.approx(math.log(2))], BF16.config_id: [0.0]}
    assert found.states[RECIPES[1].config_id] == "no baseline"


@pytest.mark.parametrize(("spoilt", "state"), [({"loss": None}, "diverged"), ({"status": "pruned"}, "pruned")])
def test_what_is_spoilt_on_one_kind_has_no_answer_although_it_is_good_on_another(tmp_path, spoilt, state):
    rows = [row(BF16, seed, 1.0, **kind) for kind in (H200, L40S) for seed in (0, 1)]
    rows += [row(RECIPES[0], 0, 0.5, **H200), row(RECIPES[0], 1, **{"loss": 0.5, **L40S, **spoilt})]
    found = answers(tmp_path, rows, ["loss"])
    assert found.states[RECIPES[0].config_id] == state
    assert RECIPES[0].config_id not in found.values
    assert found.front([RECIPES[0].config_id]) == []


def test_other_tasks_and_other_data_say_nothing(tmp_path):
    rows = [row(BF16, 0, 1.0), row(RECIPES[0], 0, 2.0)]
    rows = [{**of, **other} for of in rows for other in ({"task": "language"}, {"dataset_digest": "of others"})]
    assert answers(tmp_path, rows).values == {}


@pytest.mark.parametrize(("better", "best"), [("lower", 0), ("higher", 2)])
def test_the_front_of_a_metric_is_where_the_task_says(tmp_path, better, best):
    way = {"metric_better": better}
    metrics = zip(RECIPES, (0.2, 0.4, 0.6), strict=True)
    rows = [row(recipe, 0, 1.0, val_metric=value, **way) for recipe, value in metrics]
    found = answers(tmp_path, [row(BF16, 0, 1.0, **way), *rows], ["metric"], **way)
    (front,) = found.front([recipe.config_id for recipe in RECIPES])
    assert (front["config_id"], front["metric"]) == (RECIPES[best].config_id, (0.2, 0.4, 0.6)[best])


def test_only_what_is_asked_for_is_looked_up_and_earlier_answers_stay(tmp_path):
    rows = [row(BF16, 0, 1.0), *(row(recipe, 0, 2.0) for recipe in RECIPES)]
    found = answers(tmp_path, rows[:2])
    found.store.add(rows[2:], "more")
    found.store.add([row(RECIPES[0], 1, 8.0), row(BF16, 1, 1.0)], "another seed")
    found.read([RECIPES[1].config_id])
    assert found.values.keys() == {BF16.config_id, RECIPES[0].config_id, RECIPES[1].config_id}
    assert found.values[RECIPES[0].config_id] == [pytest.approx(math.log(2))]
    found.read([RECIPES[0].config_id])
    assert found.values[RECIPES[0].config_id] == [pytest.approx(math.log(4))]


def test_what_no_longer_has_an_answer_loses_the_one_that_it_had(tmp_path):
    found = answers(tmp_path, [row(BF16, 0, 1.0), row(RECIPES[0], 0, 2.0)])
    found.store.invalidate("quantizers", 2)
    found.read([RECIPES[0].config_id])
    assert RECIPES[0].config_id not in found.values
    assert found.states.get(RECIPES[0].config_id) is None


def test_rows_of_an_older_cost_model_are_answered_with_the_overhead_of_this_one(tmp_path):
    old = row(RECIPES[0], 0, 2.0, overhead=9.0, overhead_of="llama-1b on b200, revision 1")
    found = answers(tmp_path, [row(BF16, 0, 1.0), old, row(RECIPES[1], 0, 2.0)], ["overhead"])
    assert found.values[RECIPES[0].config_id] == [overhead(RECIPES[0])]


def test_every_objective_is_a_number_of_the_recipe(tmp_path):
    found = answers(tmp_path, [row(BF16, 0, 1.0), row(RECIPES[0], 0, 2.0)], list(OBJECTIVES))
    told = dict(zip(OBJECTIVES, found.values[RECIPES[0].config_id], strict=True))
    assert (told["gap"], told["loss"], told["metric"]) == (pytest.approx(math.log(2)), 2.0, -0.5)
    assert told["points"] == points(RECIPES[0])
    assert told["bits"] == bits_per_element(RECIPES[0])
    assert told["overhead"] == overhead(RECIPES[0])
