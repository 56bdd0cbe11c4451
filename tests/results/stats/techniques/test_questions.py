"""Questions written down before the training: their pairs, intervals of known truth, and the rule."""

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import ConfigError, Recipe, Space, recipe_to_dict
from fp4dse.results import open_store
from fp4dse.results.stats.paired import SETTING
from fp4dse.results.stats.techniques.answers import answers, effects_of
from fp4dse.results.stats.techniques.questions import load_questions
from fp4dse.results.text.answer_tables import answer_rows, effect_tables
from fp4dse.sweeps.arguments import find_space

SCALE = range(30, 34)
"""Seeds of the study's stage *scale*."""
STUDY = Path(__file__).parents[4] / "docs" / "study"

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
    """Rows of all recipes and BF16, whose log loss is the sum of the `effect` (path, value -> size) that it has."""
    rng = rng or np.random.default_rng(0)
    rows = []
    bf16 = Recipe.named("bf16")
    for seed in range(seeds):
        of_seed = {key: rng.normal(0, shared) for key in effect or {}}
        for recipe in (bf16, *recipes.values()):
            plain = recipe_to_dict(recipe)
            size = sum(of_seed[key] + value for key, value in (effect or {}).items() if key(plain))
            loss = float(np.exp(size + rng.normal(0, noise)))
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
    assert answer(questions, medium)[fprop] == ("not settled", "no pair was trained on language:small")
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


@pytest.mark.parametrize("file", ["questions.toml", "claims.toml"])
def test_every_effect_of_the_study_has_pairs_in_its_spaces(file):
    recipes = {recipe.config_id: recipe for recipe in find_space("study-part").recipes()}
    recipes |= {recipe.config_id: recipe.canonical() for recipe in map(Recipe.named, ("bf16", "nvfp4"))}
    without = [
        (question.id, effect.name)
        for question in load_questions(STUDY / file).questions
        for effect in question.effects
        if not effect.pairs(recipes)
    ]
    assert not without


def test_the_findings_begin_with_the_numbers_of_answers_that_their_table_has():
    page = (STUDY / "findings.md").read_text()
    table = page.partition("<!-- answers -->")[2].partition("<!-- end -->")[0]
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| Q")]
    quantized = Counter(line[-2] for line in cells)
    apart = [re.search(r"evaluated in BF16 (confirmed|refuted|not settled)", line[-1]) for line in cells]
    in_bf16 = Counter(found[1] if found else line[-2] for found, line in zip(apart, cells, strict=True))
    words = ["nought", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    numbers = [
        [str(n) if n > 9 else words[n] for n in (of["confirmed"], of["refuted"], of["not settled"])]
        for of in (quantized, in_bf16)
    ]
    said = f"**Of {len(cells)} effects {{}} are confirmed, {{}} refuted and {{}} not settled**".format(*numbers[0])
    assert said in page.replace("\n", " ")
    assert "evaluated in BF16 it is {}, {} and {}.".format(*numbers[1]) in page.replace("\n", " ")


def test_the_task_that_repeats_effects_resolves_as_the_findings_say():
    read = [("task", "==", "language"), ("preset", "in", ["1M", "10M"]), ("recipe_label", "in", ["bf16", "nvfp4"])]
    read += [("seed", "<", 30), ("device_class", "==", "NVIDIA H100 80GB HBM3")]  # of pairs and halve
    columns = ["preset", "recipe_label", "seed", "val_loss"]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=columns, filters=read)
    loss = np.log(rows.pivot_table(index=["preset", "seed"], columns="recipe_label", values="val_loss", observed=True))
    gap = (loss["nvfp4"] - loss["bf16"]).groupby("preset", observed=True).agg(["mean", "std"])
    ratio = (gap["mean"] / gap["std"]).map("{:.0f}".format)
    said = f"is {ratio['1M']} times the standard deviation of its three seeds ({ratio['10M']} times at 10M)"
    assert said in (STUDY / "findings.md").read_text().replace("\n", " ")


@pytest.mark.parametrize(
    ("before", "after", "row"),
    [
        ("bf16", "bf16, fprop.x nvfp4", "fprop.x alone in NVFP4"),
        ("nvfp4", "nvfp4, fprop.x bf16", "fprop.x alone in BF16"),
        ("bf16", "bf16, fprop.w nvfp4", "fprop.w alone in NVFP4"),
    ],
)
def test_numbers_of_the_findings_are_those_of_the_rows(before, after, row):
    read = [("task", "==", "regression"), ("recipe_label", "in", [before, after])]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=["recipe_label", "seed", "val_loss"], filters=read)
    loss = np.log(rows.pivot_table(index="seed", columns="recipe_label", values="val_loss"))
    change = (loss[after] - loss[before]).mean()
    table = (STUDY / "findings.md").read_text().partition("<!-- effects of regression:deep -->")[2]
    lines = table.partition("<!-- end -->")[0].splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {row} |"))
    assert f"| {100 * np.expm1(change):+.1f} % (" in line


@pytest.mark.parametrize(
    ("pairs", "row"),
    [
        (
            [
                ("nvfp4", "nvfp4, wgrad rht32"),
                ("e4m3-b16", "e4m3-b16, wgrad rht32"),
                ("nvfp4, dgrad.g SR", "nvfp4, dgrad.g SR, wgrad rht32"),
            ],
            "rotation of wgrad (e4m3)",
        ),
        ([("nvfp4", "nvfp4, wgrad.g SR"), ("e4m3-b16", "e4m3-b16, wgrad.g SR")], "stochastic gradient of wgrad (e4m3)"),
    ],
)
def test_what_the_findings_say_is_repeated_is_so_by_the_t_interval_of_the_rows(pairs, row):
    """Confirmed effects whose interval for the whole question holds zero at 1M: recomputed without pooling."""
    labels = sorted({label for pair in pairs for label in pair})
    read = [("task", "==", "language"), ("preset", "==", "1M"), ("recipe_label", "in", labels), ("seed", "<", 30)]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=["recipe_label", "seed", "val_loss"], filters=read)
    loss = np.log(rows.pivot_table(index="seed", columns="recipe_label", values="val_loss", observed=True))
    change = np.mean([loss[after] - loss[before] for before, after in pairs], axis=0)
    assert len(change) == 3
    assert change.mean() + 4.303 * change.std(ddof=1) / np.sqrt(3) < 0
    page = (STUDY / "findings.md").read_text().partition("<!-- effects of language:1M -->")[2]
    table, _, rest = page.partition("<!-- end -->")
    (line,) = (line for line in table.splitlines() if line.startswith(f"| {row} |"))
    assert line.startswith(f"| {row} | {len(pairs)} | {100 * np.expm1(change.mean()):+.2f} % (")
    assert line.split(" | ")[3] == "helps"
    found = next(line for line in rest.splitlines() if line.startswith(f"| Q3 | {row} |"))
    assert "| confirmed | it helps on language:0.4M and on language:1M;" in found


def test_steps_along_the_confirmed_front_are_told_where_the_findings_say_so():
    """The confirm stage, recomputed from its rows: t intervals of four seeds."""
    read = [("task", "==", "language"), ("preset", "==", "10M-long")]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=["recipe_label", "seed", "val_loss"], filters=read)
    loss = np.log(rows.pivot_table(index="seed", columns="recipe_label", values="val_loss", observed=True))
    table = (STUDY / "findings.md").read_text().partition("<!-- confirm -->")[2].partition("<!-- end -->")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][2:]
    assert loss.index.tolist() == [20, 21, 22, 23]
    assert {line[0] for line in lines} == set(loss.columns) - {"bf16"}
    told = {}
    for before, line in zip([None, *lines], lines, strict=False):
        gap = loss[line[0]] - loss["bf16"]
        assert line[2:4] == [f"{100 * np.expm1(half.mean()):+.2f} %" for half in (gap.iloc[:2], gap.iloc[2:])]
        assert line[4].startswith(f"{100 * np.expm1(gap.mean()):+.2f} % (")
        if before:
            step = loss[line[0]] - loss[before[0]]
            told[line[0]] = step.mean() + 3.182 * step.std(ddof=1) / 2 < 0
            assert line[6].startswith(f"{100 * np.expm1(step.mean()):+.2f} % (")
    assert [told[name].item() for name in told] == [True, True, False, True, True]


def test_the_order_of_the_twelve_that_lie_close_at_10m_is_what_the_findings_say():
    """Recipes that quantize both passes; the two worst of the fourteen are left out."""
    rows = open_store(STUDY / "store").runs()
    rows = rows[rows["task"].eq("language") & rows["preset"].isin(["0.4M", "1M", "10M"]) & ~rows["seed"].isin(SCALE)]
    spaces = [Space.load(STUDY / f"{name}.toml") for name in ("halve", "quartet2-10M")]
    recipes = {recipe.canonical().config_id: recipe for space in spaces for recipe in space.recipes()}
    both = [name for name, r in recipes.items() if not r.fprop.w.is_plain and not r.wgrad.g.is_plain]
    mine = rows[rows["config_id"].isin(both)]
    gaps = (
        mine.pivot_table(index="config_id", columns="preset", values="gap", observed=True).sort_values("10M").iloc[:-2]
    )
    assert len(gaps) == 12
    assert gaps["10M"].max() - gaps["10M"].min() < 0.0011
    rank = gaps.corr("spearman")["10M"].map("{:.2f}".format).str.lstrip("0")
    page = (STUDY / "findings.md").read_text().replace("\n", " ")
    assert f"with 10M is {rank['0.4M']} (p = .32). **1M has most of it, {rank['1M']}**" in page


def test_gaps_of_the_scale_stage_are_those_of_its_rows_and_their_order_is_one():
    """Recomputed from losses and the entropy of their texts, without the package's statistics."""
    columns = ["preset", "recipe_label", "seed", "val_loss", "val_metric"]
    read = [("task", "==", "language"), ("seed", "in", list(SCALE))]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=columns, filters=read)
    rows = rows[rows["preset"].ne("30M")]
    page = (STUDY / "findings.md").read_text()
    means = {}
    for marker, value in (("scale", "val_loss"), ("shares", "val_metric")):
        log = np.log(rows.pivot_table(index=["preset", "seed"], columns="recipe_label", values=value, observed=True))
        gaps = log.sub(log["bf16"], axis=0).drop(columns="bf16")
        means[marker] = gaps.groupby("preset", observed=True).mean()
        table = page.partition(f"<!-- {marker} -->")[2].partition("<!-- end -->")[0]
        lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
        heads, lines = lines[0], lines[2:]
        assert {line[0] for line in lines} == set(gaps.columns)
        for line in lines:
            for preset in ("0.4M", "1M", "10M"):
                of = gaps.loc[preset, line[0]]
                assert len(of) == 4
                assert float(line[heads.index(preset)].split(" %")[0]) == pytest.approx(
                    100 * np.expm1(of.mean()), abs=0.051 if marker == "shares" else 0.0051
                )
    percent = means["scale"].T
    assert percent["1M"].corr(percent["10M"], "spearman") == 1
    rises = {line[0] for line in lines if "rises" in line}
    assert rises == {"nvfp4", "mxfp4"}
    assert set(means["shares"].T.query("`10M` > `0.4M`").index) == rises
