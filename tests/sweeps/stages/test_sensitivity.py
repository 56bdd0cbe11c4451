"""A study of layers is planned from the task's model, trained as any sweep, and spends its budget."""

import math

import msgspec
import pytest

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.cost import DEFAULT_COST
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.sensitivity import Grain
from fp4dse.results import open_store
from fp4dse.results.stats.layers.study import Measured
from fp4dse.results.store.studies import read_studies
from fp4dse.sweeps.stages import sensitivity
from fp4dse.sweeps.stages.sensitivity import choose, make_grain, note_study, plan_study, run_choice, run_study
from fp4dse.tasks import get_task
from fp4dse.tasks.layers import find_layers
from tests.commands.running import FAKE

NVFP4 = Recipe.named("nvfp4")
TASK = ("language", "tiny")


ROLES = Grain()


def planned(grain=ROLES, task=TASK, recipe=NVFP4, **more):
    return plan_study(recipe, task, grain, cost=DEFAULT_COST, **more)


def test_units_cover_what_the_recipe_quantizes():
    plan = planned()
    labels = [unit.label for unit in plan.study.units]
    assert labels[:4] == [f"{role}, part 1 of 2" for role in ("qkv", "attention-out", "up", "down")]
    assert len(labels) == 8  # thirds of two blocks are the blocks
    head = next(layer for layer in find_layers(*TASK) if layer.place.kind == "head")
    whole = sum(layer.products for layer in find_layers(*TASK))
    assert math.isclose(sum(unit.products for unit in plan.study.units), 1 - head.products / whole)
    assert len(plan.recipes) == 1 + 2 * 8
    assert set(plan.recipes) >= {unit.alone for unit in plan.study.units} | {plan.study.config_id}


def test_products_share_out_a_layers_cost():
    whole, each = planned(Grain("kind", 1)), planned(Grain("kind", 1, ("fprop", "backward")))
    assert [unit.label for unit in each.study.units] == [
        "attention: fprop", "attention: backward", "mlp: fprop", "mlp: backward"
    ]  # fmt: skip
    for unit in whole.study.units:
        parts = [other.products for other in each.study.units if other.layers == unit.layers]
        assert parts == pytest.approx([unit.products / 3, unit.products * 2 / 3])


def test_all_train_at_one_rate_that_of_the_recipes_class():
    plan = planned()
    assert plan.study.lr == get_task(*TASK).rates["forward"] == 7.8e-3
    assert planned(lr=1e-3).study.lr == 1e-3
    assert plan.study.seeds == (0, 1, 2, 3, 4)


def test_what_cannot_be_asked_is_refused():
    for asked, where in ((("role", 3, "all,dgrd"), "--products"), (("role", -1, "all"), "--parts")):
        with pytest.raises(ConfigError, match=where):
            make_grain(*asked)
    with pytest.raises(ConfigError, match=r"--by: found 'rol'.*did you mean 'role'"):
        make_grain("rol", 3, "all")
    with pytest.raises(ConfigError, match="--spend"):
        sensitivity.check_spend("time")
    with pytest.raises(ConfigError, match="one that quantizes a layer of the model"):
        planned(recipe=Recipe.named("bf16"))


def test_first_and_last_blocks_are_taken_while_they_fit():
    plan = planned()
    places = list(plan.work)
    qkv, out, *_ = (plan.work[place] for place in places[4:8])
    taken, used = sensitivity._first_and_last(plan, qkv + out)
    assert [place.name for place in taken] == ["block1.qkv", "block1.out"]
    assert used == pytest.approx(qkv + out)
    taken, used = sensitivity._first_and_last(plan, out)  # what does not fit is passed over
    assert [place.name for place in taken] == ["block1.out"]
    taken, _ = sensitivity._first_and_last(plan, 1.0)
    assert Place("head", name="head") not in taken  # the recipe keeps it in BF16 anyway
    assert len(taken) == 8


def test_the_step_is_unknown_where_the_cost_model_says_nothing_of_a_unit():
    unit = planned().units[0]
    assert sensitivity._step(NVFP4, msgspec.structs.replace(unit, word="conv"), Grain(), DEFAULT_COST) is None


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A study with workers that train nothing, and its store."""
    # losses are drawn by the lane, so many units are needed for one that gains, and seeds with which one does
    plan = planned(Grain("role", 1, ("forward", "backward")), ("language", "smoke"), seeds=[4, 5, 6])
    path = tmp_path_factory.mktemp("study") / "store"
    result = run_study(plan, str(path), worker=(*FAKE, "ok"), jobs=1)
    assert result.done == 3 * (1 + 1 + 2 * 8)
    return plan, open_store(path)


def test_it_is_trained_once_and_noted(trained):
    plan, store = trained
    assert run_study(plan, str(store.path), worker=(*FAKE, "ok"), jobs=1).done == 0
    assert note_study(plan, store) == read_studies(store)[-1] == plan.study


def test_a_budget_buys_what_fits_and_is_trained_on_fresh_seeds(trained):
    plan, store = trained
    with pytest.raises(ConfigError, match=r"--budget: found '0.01%'"):
        choose(plan, store, 1e-4, "products")
    if plan.study.spend == "products":
        with pytest.raises(ConfigError, match="--spend"):
            choose(plan, store, 0.5, "step")
    choice, recipes = choose(plan, store, 1.0, "products")
    assert choice.units
    assert choice.products == pytest.approx(sum(plan.study.units[i].products for i in choice.units))
    assert choice.ends_products <= choice.products * (1 + 1e-9)
    assert [recipe.config_id for recipe in recipes[:2]] == [plan.study.config_id, choice.config_id]
    result = run_choice(plan, store, choice, recipes, worker=(*FAKE, "ok"), jobs=1)
    assert result.done == 3 * (1 + len({recipe.config_id for recipe in recipes}))
    rows = store.runs()
    fresh = rows[rows["seed"].isin(choice.seeds)]
    assert fresh["stage"].eq("confirm").all()
    assert read_studies(store)[-1].choices == (choice,)
    assert choose(plan, store, 1.0, "products")[0] == choice  # fresh seeds choose nothing


def test_the_record_says_what_sparing_takes():
    unit = Measured("mlp", "all", "", "", 0.2, -0.01)
    assert unit.cost("products") == 0.2
    assert unit.cost("step") == 0.0
