"""What units cost and gain is what was planted; choices are the best; predictions are the sums of gains."""

import itertools

import msgspec
import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4dse.dse import Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.sensitivity import SCOPES, Grain, alone, products, spared, units
from fp4dse.results.stats.layers.knapsack import Option, best_choice, options
from fp4dse.results.stats.layers.sensitivity import measured_choice, sensitivity
from fp4dse.results.stats.layers.study import Measured, Spared, Study
from fp4dse.results.text.sensitivity_table import about

RECIPE, BF16 = Recipe.named("nvfp4").canonical(), Recipe.named("bf16").canonical()
MODEL = [Place("mlp", i, 4, role, name=f"block{i}.{role}") for i in range(4) for role in ("up", "down")]
UNITS = units(RECIPE, MODEL, Grain(parts=2))
OF = [products([unit], MODEL, "role") for unit in UNITS]
ALONE = [alone(RECIPE, of, MODEL) for of in OF]
SPARED = [spared(RECIPE, of, MODEL) for of in OF]
CHOSEN = spared(RECIPE, products([UNITS[0], UNITS[1]], MODEL, "role"), MODEL)
COSTS = [0.2, 0.1, 0.3, 0.4]
EFFECT, GAIN = [0.04, 0.01, 0.0, 0.02], [0.05, 0.03, 0.01, -0.01]
SEEDS, FRESH = range(6), range(100, 106)
STUDY = Study(
    "vision", "quickstart", RECIPE.label(), RECIPE.config_id, BF16.config_id, 1e-3, tuple(SEEDS), "",
    tuple(
        Measured(unit.layers, unit.scope, a.config_id, s.config_id, cost)
        for unit, a, s, cost in zip(UNITS, ALONE, SPARED, COSTS, strict=True)
    ),
)  # fmt: skip
CHOICE = Spared(0.3, "products", (0, 1), CHOSEN.config_id, 0.3, 0.3, tuple(FRESH), SPARED[3].config_id, "", 0.4)


@pytest.fixture(scope="module")
def rows(row):
    """The study's lanes, with fresh seeds of a choice, at two rates and beside another preset."""
    rng = np.random.default_rng(3)
    luck = dict(zip([*SEEDS, *FRESH], rng.normal(0, 0.05, 12), strict=True))

    def lanes(recipe, effect, seeds=SEEDS, **more):
        return [row(recipe, s, np.exp(effect + luck[s] + rng.normal(0, 1e-3)), **more) for s in seeds]

    found = [*lanes(BF16, 0.0), *lanes(RECIPE, 0.1)]
    for i in range(4):
        found += [*lanes(ALONE[i], EFFECT[i]), *lanes(SPARED[i], 0.1 - GAIN[i])]
    fresh = {"seeds": FRESH, "stage": "confirm"}
    found += [*lanes(BF16, 0.0, **fresh), *lanes(RECIPE, 0.1, **fresh), *lanes(CHOSEN, 0.05, **fresh)]
    found += lanes(SPARED[3], 0.11, **fresh)
    found += [*lanes(RECIPE, -1.0, lr=2e-3), *lanes(BF16, -1.0, lr=2e-3), *lanes(RECIPE, -1.0, preset="small")]
    return pd.DataFrame(found)


def test_effects_are_those_that_were_planted(rows):
    lines = sensitivity(rows, STUDY).set_index("unit").loc[[unit.label() for unit in UNITS]]
    assert np.allclose(lines["alone"], EFFECT, atol=2e-3)
    assert np.allclose(lines["gain"], GAIN, atol=2e-3)
    for name, true in (("alone", EFFECT), ("gain", GAIN)):
        assert (lines[f"{name}_low"] <= true).all()
        assert (true <= lines[f"{name}_high"]).all()
    assert lines["gain_verdict"].tolist() == ["higher", "higher", "higher", "lower"]
    assert lines["alone_verdict"].tolist() == ["higher", "higher", "same", "higher"]
    assert (lines["pairs"] == 6).all()
    assert np.allclose(lines["gain_per_percent"], lines["gain"] / (100 * np.array(COSTS)))


def test_the_largest_gain_comes_first(rows):
    assert sensitivity(rows, STUDY)["gain"].is_monotonic_decreasing


def test_a_unit_that_diverged_says_so_and_one_that_was_not_trained_is_unknown(rows, row):
    diverged = rows["config_id"].eq(SPARED[0].config_id) & rows["seed"].eq(2)
    without = rows[~diverged & ~rows["config_id"].eq(ALONE[1].config_id)]
    broken = pd.concat([without, pd.DataFrame([row(SPARED[0], 2, None)])])
    lines = sensitivity(broken, STUDY).set_index("unit")
    assert lines.loc[UNITS[0].label(), "gain_verdict"] == "diverged"
    assert np.isnan(lines.loc[UNITS[0].label(), "gain"])
    assert np.isnan(lines.loc[UNITS[1].label(), "alone"])
    assert sensitivity(rows[rows["seed"] > 99], STUDY).empty


def test_a_choice_is_held_against_the_sum_of_its_units_gains(rows):
    lines = measured_choice(rows, STUDY, CHOICE).set_index("recipe")
    assert list(lines.index) == ["base", "chosen", "ends"]
    assert np.allclose(lines["gap"], [0.1, 0.05, 0.11], atol=2e-3)
    assert np.allclose(lines.loc[["chosen", "ends"], "gain"], [0.05, -0.01], atol=2e-3)
    chosen = lines.loc["chosen"]
    assert chosen["predicted"] == pytest.approx(0.08, abs=2e-3)
    assert chosen["missed"] == pytest.approx(chosen["gain"] - chosen["predicted"])
    assert chosen["missed_low"] < -0.03 < chosen["missed_high"] < 0
    assert lines.loc[["base", "ends"], "predicted"].isna().all()
    gains = sensitivity(rows, STUDY).set_index("unit")["gain"]
    assert chosen["predicted"] == pytest.approx(gains[UNITS[0].label()] + gains[UNITS[1].label()])


def test_predicted_and_measured_are_independent_samples(rows):
    """The half-width is Welch's."""
    chosen = measured_choice(rows, STUDY, CHOICE).set_index("recipe").loc["chosen"]
    halves = [(chosen[f"{name}_high"] - chosen[f"{name}_low"]) / 2 for name in ("gain", "predicted", "missed")]
    assert max(halves[:2]) < halves[2] < sum(halves[:2])


OPTIONS = st.lists(
    st.lists(st.tuples(st.floats(0.001, 1), st.floats(0, 1)), min_size=0, max_size=3), min_size=1, max_size=5
)


@settings(max_examples=200)
@given(OPTIONS, st.floats(0.05, 2))
def test_the_choice_is_the_best_that_fits(groups, budget):
    """As good as the best of all combinations within a budget that is less by what rounding up can take."""
    asked = [[Option(value, cost, (i, j)) for j, (value, cost) in enumerate(of)] for i, of in enumerate(groups)]
    found = best_choice(asked, budget)
    assert found.cost <= budget * (1 + 1e-6)
    nothing = Option(0.0, 0.0, ())
    combinations = list(itertools.product(*([nothing, *of] for of in asked)))
    room = budget * (1 - len(groups) / 10_000)
    best = max(sum(o.value for o in of) for of in combinations if sum(o.cost for o in of) <= room)
    assert found.value >= best - 1e-9


def test_with_no_budget_only_what_is_free_is_taken():
    assert best_choice([[Option(1.0, 0.0, (0,)), Option(2.0, 0.1, (1,))]], 0.0).units == (0,)


def test_units_that_share_a_product_are_never_taken_together():
    scopes = ("all", "forward", "fprop", "wgrad", "dgrad")
    measured = tuple(Measured("mlp", scope, "", scope, 0.1) for scope in scopes)
    study = msgspec.structs.replace(STUDY, units=measured)
    [group] = options(study, [5.0, 1.0, 1.5, 2.0, -1.0], "products", SCOPES)
    found = {tuple(sorted(scopes[i] for i in option.units)): option.value for option in group}
    assert found == {
        ("all",): 5.0, ("forward",): 1.0, ("fprop",): 1.5, ("wgrad",): 2.0, ("forward", "wgrad"): 3.0,
        ("fprop", "wgrad"): 3.5,
    }  # fmt: skip
    assert options(study, [np.nan] * 5, "products", SCOPES) == [[]]


def test_a_step_is_said_to_be_of_a_model_and_a_chip(rows):
    units = tuple(msgspec.structs.replace(unit, step=0.1) for unit in STUDY.units)
    priced = msgspec.structs.replace(STUDY, units=units, step_of="llama-8b on gb200")
    said, without = (about(study, sensitivity(rows, study)) for study in (priced, STUDY))
    assert said == f"{without}\nof the step: as modelled for llama-8b on gb200"
