"""Questions written down before the training: their pairs, intervals of known truth, and the rule."""

import json

import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import ConfigError, Recipe, Space, recipe_to_dict
from fp4dse.results.stats.paired import SETTING
from fp4dse.results.stats.techniques.answers import answers, effects_of
from fp4dse.results.stats.techniques.questions import load_questions
from fp4dse.results.text.answer_tables import answer_rows, effect_tables

FILE = """
screen = "language:small"
later = ["language:large", "language:medium"]
negligible = 0.1

[[question]]
id = "Q1"
asks = "Do rotations help?"
claim = "helps"

[[question.effect]]
name = "wgrad"
from = { "wgrad.rotation" = "none" }
to = { "wgrad.rotation" = "rht16" }
each = { "*.scale" = ["e4m3", "ue5m3"] }

[[question.effect]]
name = "fprop"
from = { "fprop.rotation" = "none" }
to = { "fprop.rotation" = "rht16" }

[[question]]
id = "Q2"
asks = "Does stochastic rounding harm?"
claim = "harms"
effect = [
    { name = "of gradients", from = { "*.g.rounding" = "nearest" }, to = { "*.g.rounding" = "stochastic" } },
]
"""


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    file = tmp_path_factory.mktemp("questions") / "mine.toml"
    file.write_text(FILE)
    return load_questions(file)


@pytest.fixture(scope="module")
def recipes():
    axes = {
        "*.scale": ["e4m3", "ue5m3"],
        "*.g.rounding": ["nearest", "stochastic"],
        "wgrad.rotation": ["none", "rht16"],
        "fprop.rotation": ["none", "rht16"],
    }
    return {recipe.config_id: recipe for recipe in Space("mine", base="nvfp4", axes=axes).recipes()}


def trained(recipes, preset="small", effect=None, noise=0.0, shared=0.0, seeds=3, rng=None):
    """Rows of all recipes and BF16, whose log loss is the sum of the `effect` (path, value -> size) that it has. noise:
    of a lane, or a function of its recipe that says it."""
    rng = rng or np.random.default_rng(0)
    rows = []
    bf16 = Recipe.named("bf16")
    for seed in range(seeds):
        of_seed = {key: rng.normal(0, shared) for key in effect or {}}
        for recipe in (bf16, *recipes.values()):
            plain = recipe_to_dict(recipe)
            size = sum(of_seed[key] + value for key, value in (effect or {}).items() if key(plain))
            loss = float(np.exp(size + rng.normal(0, noise(plain) if callable(noise) else noise)))
            rows.append(
                dict.fromkeys(SETTING, "x")
                | {
                    "task": "language",
                    "preset": preset,
                    "config_id": recipe.config_id,
                    "baseline_id": bf16.config_id,
                    "recipe": json.dumps(plain),
                    "lr": 0.001,
                    "seed": seed,
                    "is_baseline": recipe.is_baseline,
                    "points": 0 if recipe.is_baseline else 1,
                    "status": "done",
                    "val_loss": loss,
                    "val_loss_bf16": loss,
                }
            )
    return pd.DataFrame(rows)


def rotated(stage):
    return lambda plain: plain[stage].get("rotation") is not None


def stochastic(plain):
    return plain["wgrad"]["g"].get("rounding", {}).get("mode") == "stochastic"


def line(found, effect, evaluation="quantized"):
    return found[found["effect"].eq(effect) & found["evaluation"].eq(evaluation)].iloc[0]


def test_a_pair_differs_in_the_effect_alone_and_has_what_is_held(questions, recipes):
    (e4m3, ue5m3, fprop), (gradients,) = (question.effects for question in questions.questions)
    assert [len(effect.pairs(recipes)) for effect in (e4m3, ue5m3, fprop, gradients)] == [4, 4, 8, 8]
    for one, other in e4m3.pairs(recipes):
        before, after = (recipe_to_dict(recipes[name]) for name in (one, other))
        assert recipes[one].fprop.x.scale.__struct_config__.tag == "e4m3"
        assert before["wgrad"].pop("rotation", None) is None
        assert after["wgrad"].pop("rotation")["size"] == 16
        assert before == after
    assert not fprop.pairs({name: recipes[name] for name in list(recipes)[:1]})


def test_effects_are_what_was_put_in(questions, recipes):
    runs = trained(recipes, effect={rotated("wgrad"): -0.02, stochastic: 0.05})
    found = effects_of(runs, questions)
    assert line(found, "wgrad (e4m3)")["difference"] == pytest.approx(-0.02)
    assert line(found, "of gradients", "bf16")["difference"] == pytest.approx(0.05)
    assert line(found, "fprop")["difference"] == pytest.approx(0)
    assert line(found, "fprop")[["pairs", "seeds"]].tolist() == [8, 3]
    shown = effect_tables(found, questions)
    assert list(shown) == [
        "Q1  Do rotations help? Claimed: it helps.",
        "Q2  Does stochastic rounding harm? Claimed: it harms.",
    ]
    assert [row["pairs"] for rows in shown.values() for row in rows] == [4, 4, 8, 8]


def test_the_intervals_of_a_question_hold_together(questions, recipes):
    """95 % of studies have all effects of Q1 in their intervals, also where seeds differ in an effect."""
    rng, truth = np.random.default_rng(1), {rotated("wgrad"): -0.02, stochastic: 0.05}
    studies = [trained(recipes, str(i), truth, noise=0.01, shared=0.003, rng=rng) for i in range(40)]
    found = effects_of(pd.concat(studies, ignore_index=True), questions)
    mine = found[found["question"].eq("Q1") & found["evaluation"].eq("quantized")]
    right = np.where(mine["effect"].str.startswith("wgrad"), -0.02, 0.0)
    inside = (mine["low"].lt(right) & mine["high"].gt(right)).groupby(mine["preset"]).all()
    assert len(inside) == 40
    assert inside.mean() >= 0.85  # 0.95 less three standard errors of 40 studies
    assert mine["high"].sub(mine["low"]).median() < 0.1


def test_an_effect_is_held_against_the_noise_of_its_own_lanes(questions, recipes):
    """Of which some have fifteen times that of others: their effect is in its interval, and that of the others has a
    narrow one."""
    rng, noises = np.random.default_rng(5), {True: 0.03, False: 0.002}
    runs = [
        trained(recipes, str(i), noise=lambda plain: noises["ue5m3" in json.dumps(plain)], rng=rng) for i in range(40)
    ]
    found = effects_of(pd.concat(runs, ignore_index=True), questions).query("evaluation == 'quantized'")
    found = found.assign(
        width=found["own_high"] - found["own_low"], covers=found["own_low"].lt(0) & found["own_high"].gt(0)
    )
    by = found.groupby("effect")[["width", "covers"]].agg({"width": "median", "covers": "mean"})
    assert by["covers"].min() >= 0.85  # 0.95 less three standard errors of 40 studies
    assert by["width"]["wgrad (ue5m3)"] > 8 * by["width"]["wgrad (e4m3)"]


def test_a_pair_of_more_seeds_weighs_as_much_as_any_other(questions, recipes):
    runs = trained(recipes, effect={rotated("wgrad"): 0.01, stochastic: 0.05}, seeds=6)
    plain = runs["recipe"].map(json.loads)
    both = plain.map(lambda recipe: rotated("wgrad")(recipe) and stochastic(recipe))
    runs.loc[both, ["val_loss", "val_loss_bf16"]] *= np.exp(0.04)  # half of the pairs have an effect of 0.09
    few = ~plain.map(rotated("wgrad")) & ~runs["is_baseline"] & runs["seed"].ge(3)
    mine = line(effects_of(runs[~few], questions), "of gradients")
    assert mine[["pairs", "seeds"]].tolist() == [8, 6]
    assert mine["difference"] == pytest.approx(0.07)


def test_what_diverged_is_counted_and_not_averaged(questions, recipes):
    runs = trained(recipes, effect={stochastic: 0.05})
    (_, other), *_ = questions.questions[1].effects[0].pairs(recipes)
    runs.loc[runs["config_id"].eq(other), ["status", "val_loss"]] = ["diverged", np.nan]
    found = line(effects_of(runs, questions), "of gradients")
    assert found[["pairs", "diverges", "recovers"]].tolist() == [8, 1, 0]
    assert found["difference"] == pytest.approx(0.05)


def answer(questions, *tasks):
    found = answers(effects_of(pd.concat(tasks, ignore_index=True), questions), questions)
    return {(row["question"], row["effect"]): (row["answer"], row["why"]) for row in answer_rows(found)}


def test_an_answer_takes_the_task_that_screens_and_the_first_later_one_that_has_pairs(questions, recipes):
    effect = {rotated("wgrad"): -0.02, rotated("fprop"): -0.02, stochastic: -0.02}
    less = {rotated("wgrad"): -0.02, rotated("fprop"): 0.02}
    rng = np.random.default_rng(2)
    small, medium, large = (
        trained(recipes, preset, of, noise=0.001, rng=rng)
        for preset, of in (("small", effect), ("medium", effect), ("large", less))
    )
    fprop, gradients, wgrad = ("Q1", "fprop"), ("Q2", "of gradients"), ("Q1", "wgrad (e4m3)")
    assert answer(questions, medium)[fprop] == (
        "not settled",
        "no pair with a seed in common finished on language:small",
    )
    assert answer(questions, small)[fprop][0] == "not settled"
    assert answer(questions, small, medium)[fprop] == (
        "confirmed",
        "it helps on language:small and on language:medium",
    )
    whole = answer(questions, small, medium, large)
    assert whole[fprop] == ("not settled", "it helps on language:small, which language:large does not repeat")
    assert whole[wgrad][0] == "confirmed"
    assert whole[gradients] == ("refuted", "it helps on language:small")
    none = trained(recipes, "small", {}, noise=0.0001, rng=rng)
    assert answer(questions, none)[fprop] == ("refuted", "negligible on language:small")
    wide = trained(recipes, "small", {}, noise=0.05, rng=rng)
    assert answer(questions, wide)[wgrad] == ("not settled", "the interval on language:small holds zero")


def test_an_effect_without_an_interval_is_said_to_have_none(questions, recipes):
    """With one seed there is no spread; and pairs that were trained on different seeds are none."""
    effect, fprop = {rotated("fprop"): -0.02}, ("Q1", "fprop")
    one, other = trained(recipes, effect=effect, seeds=1), trained(recipes, "medium", effect, seeds=1)
    small = trained(recipes, effect=effect, noise=1e-4)
    assert answer(questions, one)[fprop] == ("not settled", "the effect on language:small has no interval")
    why = "it helps on language:small; the effect on language:medium has no interval"
    assert answer(questions, small, other)[fprop] == ("not settled", why)
    apart = small[small["seed"].eq(small["recipe"].map(json.loads).map(rotated("fprop")))]
    found = effects_of(pd.concat([apart, small[small["is_baseline"]]], ignore_index=True).drop_duplicates(), questions)
    assert "fprop" not in set(found["effect"])
    assert answer(questions, apart)[fprop] == (
        "not settled",
        "no pair with a seed in common finished on language:small",
    )


def test_a_later_task_is_read_by_the_interval_of_one_effect_alone(questions, recipes):
    """Told from nothing alone and not together: that repeats it, and the table shows the interval that decided."""
    effect, noises = {rotated("fprop"): -0.02}, {"small": 1e-3, "medium": 0.02}
    runs = [
        trained(recipes, preset, effect, noise=noise, rng=np.random.default_rng(3)) for preset, noise in noises.items()
    ]
    found = effects_of(pd.concat(runs, ignore_index=True), questions)
    mine = line(found[found["preset"].eq("medium")], "fprop")
    assert mine["own_high"] < 0 < mine["high"]
    assert (mine["tells"], mine["repeats"]) == ("open", "helps")
    assert answer(questions, *runs)[("Q1", "fprop")][0] == "confirmed"
    first, second = (row for row in next(iter(effect_tables(found, questions).values())) if row["effect"] == "fprop")
    assert (first["task"], first["interval"]) == ("language:small", "for all of Q1")
    assert (second["task"], second["interval"], second["loss: it"]) == ("language:medium", "for it alone", "helps")
    assert f"to {100 * np.expm1(mine['own_high']):+.2f}" in second["loss"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('claim = "harms"', 'claim = "cures"', "cures"),
        ('to = { "fprop.rotation" = "rht16" }', 'to = { "dgrad.rotation" = "rht16" }', "the paths of `from`"),
        ('"*.g.rounding" = "stochastic"', '"*.g.rounding" = "random"', "random"),
        ('name = "fprop"', 'name = "wgrad (e4m3)"', "no other effect of the question has"),
        ("negligible = 0.1", "negligible = -1", "negligible"),
    ],
)
def test_a_wrong_file_is_an_error_that_names_what_is_wrong(tmp_path, old, new, says):
    file = tmp_path / "wrong.toml"
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError) as caught:
        load_questions(file)
    assert str(file) in str(caught.value)
    assert says in str(caught.value)
