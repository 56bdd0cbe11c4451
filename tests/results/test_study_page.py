"""The study's page of findings: numbers that it says are those of the rows, recomputed without what made the page."""

import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp

from fp4dse.dse import Recipe, Space
from fp4dse.dse.rounding import Stochastic
from fp4dse.results import compare, margins, open_store, summarize
from fp4dse.results.stats.estimates.rankings import spearman_interval
from fp4dse.results.stats.recipes.margins import BY_LAW
from fp4dse.results.stats.recipes.recommendation import verdicts
from fp4dse.results.stats.techniques.questions import load_questions
from fp4dse.sweeps.arguments import find_space

SCALE = range(30, 34)
"""Seeds of the study's stage *scale*."""
STUDY = Path(__file__).parents[2] / "docs" / "study"
CHEAPEST = "e2m1 1x16 e8m0-rceil, wgrad.g SR"


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
    assert "| confirmed | it helps on language:0.4M and on language:1M" in found


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
        assert line[3:5] == [f"{100 * np.expm1(half.mean()):+.2f} %" for half in (gap.iloc[:2], gap.iloc[2:])]
        assert line[5].startswith(f"{100 * np.expm1(gap.mean()):+.2f} % (")
        if before:
            step = loss[line[0]] - loss[before[0]]
            told[line[0]] = step.mean() + 3.182 * step.std(ddof=1) / 2 < 0
            assert line[7].startswith(f"{100 * np.expm1(step.mean()):+.2f} % (")
    assert [told[name].item() for name in told] == [True, True, False, True, True]


def test_what_the_best_recipe_is_better_by_is_beside_what_tokens_are_worth():
    runs = open_store(STUDY / "store").runs(margins=True).query("preset == '10M-long'")
    ids = runs.drop_duplicates("recipe_label").set_index("recipe_label")["config_id"]
    best, next_one = "bf16, wgrad ms-eden, wgrad rht128", "mxfp4, forward bf16, backward 3/4, backward rht32"
    [line] = compare(runs, ids[best], ids[next_one]).to_dict("records")
    page = " ".join((STUDY / "findings.md").read_text().split())
    by, worth = -line["difference"], line["margin"]
    assert round(by / worth) == 3
    said = f"better than the row above by, {100 * by:.2f} %, is three times what 2 % more tokens are worth "
    of = line["margin_of"].replace("its", "BF16's")
    said += f"({100 * worth:.4f} %, {of}), and `compare` calls its loss the lower one "
    assert said + f"(p = {line['p']:.4f})".replace("0.", ".") in page
    assert "has a lower loss than" in line["verdict"]


def test_what_tokens_are_worth_is_said_of_the_law_and_not_of_another_revisions_curve():
    """From 10M to 10M-long four times the tokens lower BF16's loss by .83 %: the check of the law that needs no fit."""
    runs = open_store(STUDY / "store").runs(margins=True).query("task == 'language'")
    lines = margins(runs)
    of = lines.set_index(["preset", "rev_engine", "device_class"]).sort_index()
    assert set(lines["margin_of"]) == {BY_LAW, f"{BY_LAW}, fitted at engine revision 8"}
    assert of.loc[("0.4M", 7), "margin_of"].tolist() == [f"{BY_LAW}, fitted at engine revision 8"]
    loss = runs[runs["is_baseline"]].groupby("preset")["val_loss"].apply(lambda of_seeds: np.log(of_seeds).mean())
    mean = (loss["10M"] - loss["10M-long"]) / np.log(4) * np.log(1.02)
    assert of.loc["10M-long", "margin"].max() < mean < of.loc["10M", "margin"].min()


def test_the_recipe_in_the_picture_is_the_one_to_use_for_the_reason_that_the_readme_gives():
    runs = open_store(STUDY / "store").runs(margins=True).query("preset == '0.4M' and rev_engine == 7")
    [verdict] = verdicts(runs)
    assert verdict.label == "mxfp4, forward bf16, backward 3/4, backward rht32"
    lines = summarize(runs).sort_values("time_to_quality")
    assert lines.loc[~lines["is_baseline"], "config_id"].iloc[0] == verdict.config_id  # by the means, too
    readme = " ".join((STUDY.parents[1] / "README.md").read_text().split())
    share = 100 * verdict.margin.value
    said = f"reaches BF16's loss in the least modelled time, {verdict.time.mean:.2f} of BF16's".replace(" 0.", " .")
    assert f"{said}, these tokens included" in readme
    assert f"2 % more lower it by [{share:.3f} %]" in readme


def test_the_soonest_at_bf16s_loss_with_20_tokens_a_parameter_is_told_from_the_others_but_two():
    """By the t interval of four seeds of gaps at equal time."""
    read = [("task", "==", "language"), ("preset", "==", "10M-long")]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=["recipe_label", "seed", "val_loss"], filters=read)
    loss = np.log(rows.pivot_table(index="seed", columns="recipe_label", values="val_loss", observed=True))
    runs = open_store(STUDY / "store").runs(margins=True).query("preset == '10M-long'")
    of = runs.drop_duplicates("config_id").set_index("recipe_label")
    at_time = loss + np.log(of["overhead"][loss.columns]) * of["margin"].iloc[0] / np.log(1.02)
    later = at_time.drop(columns="hif4, backward rht64").sub(at_time["hif4, backward rht64"], axis="index")
    assert later.mean().min() > 0
    told = later.mean() > 3.182 * later.std(ddof=1) / 2
    assert [name[:6] for name in told.index[~told]] == ["mxfp4,", "nvfp4,"]
    page = (STUDY / "findings.md").read_text()
    times = of["overhead"][loss.columns] * np.exp(
        (loss.mean() - loss["bf16"].mean()) * np.log(1.02) / of["margin"].iloc[0]
    )
    for name in ("hif4, backward rht64", CHEAPEST, "e2m1 1x16 e4m3 T448 previous, gradients 16/17 SR"):
        (line,) = (line for line in cells("confirm") if line[0] == name)
        assert line[2].startswith(f"{times[name]:.2f} (")
        assert f"{times[name]:.2f}".removeprefix("0") in page


@pytest.mark.parametrize(
    ("before", "after", "question", "effect"),
    [
        ("mxfp4-rceil, gradients SR", "mxfp4-rceil, gradients SR, wgrad rht32", "Q7", "rotation of wgrad"),
        (CHEAPEST, "mxfp4-rceil, wgrad.g SR", "Q5", "blocks of 32 for 16, no tensor scale (e8m0-rceil)"),
    ],
)
def test_what_10m_does_not_repeat_is_a_pair_that_differs_by_nothing(before, after, question, effect):
    read = [("task", "==", "language"), ("preset", "==", "10M"), ("seed", "<", 30)]
    read += [("recipe_label", "in", [before, after]), ("device_class", "==", "NVIDIA H100 80GB HBM3")]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=["recipe_label", "seed", "val_loss"], filters=read)
    loss = np.log(rows.pivot_table(index="seed", columns="recipe_label", values="val_loss", observed=True))
    change = loss[after] - loss[before]
    assert loss.index.tolist() == [10, 11, 12]
    assert abs(change.mean()) < 4.303 * change.std(ddof=1) / np.sqrt(3) < 0.001
    (line,) = (line for line in cells("effects of language:10M") if line[0] == effect)
    assert line[1] == "1"
    assert line[2].startswith(f"{100 * np.expm1(change.mean()):+.2f} % (")
    (answer,) = (line for line in cells("answers") if line[:2] == [question, effect])
    assert answer[-2:] == ["not settled", answer[-1]]
    assert "which language:10M does not repeat" in answer[-1]


def short(correlation):
    """As the page writes it: `.93`, `1.00`, `−.05`."""
    return f"{correlation:.2f}".replace("0.", ".").replace("-", "−")


def test_the_order_of_recipes_that_lie_close_at_10m_is_what_the_findings_say():
    """Recipes that quantize both passes: the six worst, and the order of the others."""
    rows = open_store(STUDY / "store").runs()
    rows = rows[rows["task"].eq("language") & rows["preset"].isin(["0.4M", "1M", "10M"]) & ~rows["seed"].isin(SCALE)]
    recipes = trained_at_10m()
    both = [name for name, r in recipes.items() if not r.fprop.w.is_plain and not r.wgrad.g.is_plain]
    mine = rows[rows["config_id"].isin(both)]
    gaps = mine.pivot_table(index="config_id", columns="preset", values="gap", observed=True).sort_values("10M")
    assert len(gaps) == 22
    worst = set(gaps.index[-6:])
    assert all(set(gaps[size].nlargest(6).index) == worst for size in gaps)
    scales = {name: type(recipes[name].fprop.w.scale).__name__ for name in both}
    assert worst == {Recipe.named("nvfp4").config_id} | {name for name, scale in scales.items() if scale == "E8M0"}
    page = (STUDY / "findings.md").read_text().replace("\n", " ")
    said = {}
    for left, others, within in ((3, "nineteen", "0.15"), (6, "sixteen", "0.09")):
        near = gaps.iloc[:-left]
        assert f"{100 * (near['10M'].max() - near['10M'].min()):.2f}" == within
        assert re.search(rf"{others}\W? others[^.]{{0,20}}, within {within} %", page)
        rank = near.corr("spearman")["10M"]
        limits = {size: spearman_interval(near[size], near["10M"]) for size in ("0.4M", "1M")}
        said |= {(size, left): [short(x) for x in (rank[size], *limits[size])] for size in limits}
    small, close_small, large, close_large = (said[size, left] for size in ("0.4M", "1M") for left in (3, 6))
    assert f"with 10M is {small[0]} (95 % over recipes {small[1]} to {small[2]}; a perfect proxy" in page
    assert f"and without all six, {close_small[0]} ({close_small[1]} to {close_small[2]};" in page
    assert f"**1M has most of it, {large[0]}** ({large[1]} to {large[2]})" in page
    assert f"and {close_large[0]} ({close_large[1]} to {close_large[2]}), which is all" in page
    of = [f"{found[0]} ({found[1]} to {found[2]})" for found in (close_large, close_small)]
    said = f"Spearman's correlation with the order at 10M is {of[0]} for 1M and {of[1]} for 0.4M."
    assert said in " ".join(page.split())


def test_gaps_of_the_scale_stage_are_those_of_its_rows_and_their_order_is_one():
    """Recomputed from losses and the entropy of their texts, without the package's statistics."""
    columns = ["preset", "recipe_label", "seed", "val_loss", "val_loss_bf16", "val_metric"]
    read = [("task", "==", "language"), ("seed", "in", list(SCALE))]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=columns, filters=read)
    means = {}
    for marker, value in (("scale", "val_loss"), ("scale in BF16", "val_loss_bf16"), ("shares", "val_metric")):
        log = np.log(rows.pivot_table(index=["preset", "seed"], columns="recipe_label", values=value, observed=True))
        gaps = log.sub(log["bf16"], axis=0).drop(columns="bf16")
        means[marker] = gaps.groupby("preset", observed=True).mean()
        heads, *lines = cells(marker)
        assert {line[0] for line in lines} == set(gaps.columns)
        for line, preset in itertools.product(lines, ("0.4M", "1M", "10M", "30M")):
            of = gaps.loc[preset, line[0]].dropna()
            text = line[heads.index(preset)]
            if of.empty:
                assert (preset, text) == ("30M", "")
                continue
            assert len(of) == (3 if preset == "30M" else 4)
            assert float(text.split(" %")[0]) == pytest.approx(
                100 * np.expm1(of.mean()), abs=0.051 if marker == "shares" else 0.0051
            )
    percent = means["scale"].T
    assert percent["1M"].corr(percent["10M"], "spearman") == 1
    three = percent.dropna()
    assert len(three) == 3
    assert three["10M"].corr(three["30M"], "spearman") == 1
    for sizes, wanted in (("10M against 0.4M", {"nvfp4", "mxfp4"}), ("30M against 10M", {"nvfp4", CHEAPEST})):
        large, _, small = sizes.partition(" against ")
        assert {line[0] for line in lines if line[heads.index(sizes)].startswith("rises")} == wanted
        assert set(means["shares"].T.query(f"`{large}` > `{small}`").index) == wanted


def test_what_recipes_lose_falls_as_the_findings_say():
    """Ratios of mean differences of losses, and which gradients are rounded how, by the recipes themselves."""
    columns = ["run_id", "preset", "config_id", "seed", "device_class", "rev_engine", "val_loss", "is_baseline"]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=columns, filters=[("task", "==", "language")])
    rows = rows[rows["rev_engine"].eq(8)].drop_duplicates("run_id")
    at = ["preset", "seed", "device_class"]
    lost = rows.merge(rows.loc[rows["is_baseline"], [*at, "val_loss"]], on=at, suffixes=("", "_of_bf16"))
    lost["nats"] = 1000 * (lost["val_loss"] - lost["val_loss_of_bf16"])
    mean = lost.pivot_table(index="config_id", columns="preset", values="nats", observed=True)
    plain, cured = [], []
    for name, recipe in trained_at_10m("scale").items():
        if recipe.fprop.x.is_plain or recipe.dgrad.g.is_plain:
            continue
        parts = (recipe.dgrad, recipe.wgrad)
        whole = all(isinstance(part.g.rounding, Stochastic) or part.rotation for part in parts)
        (cured if whole else plain).append(mean.loc[name, "10M"] / mean.loc[name, "1M"])
    assert [f"{ratio:.2f}" for ratio in sorted(plain)] == ["0.46", "0.52", "0.64", "0.91"]
    assert len(cured) == 19
    assert [f"{ratio:.2f}" for ratio in (min(cured), *sorted(cured)[-2:])] == ["0.35", "0.43", "0.48"]
    page = (STUDY / "findings.md").read_text().replace("\n", " ")
    assert "in all nineteen recipes of all three products" in page
    assert "to .35 to .43, one like the other" in page
    assert "| .35 to .48 (nineteen recipes) |" in page
    assert "| .46, .52, .64 and .91 (four recipes) |" in page
    shown = {line[0]: line[-1].split(" ")[0] for line in cells("falls")[2:]}
    assert len(shown) == len(plain) + len(cured) + 4  # that quantize the forward pass alone
    assert {"0.46", "0.52", "0.64", "0.91"} <= set(shown.values())


def test_no_recipe_is_told_on_vision_and_fourteen_are_on_diffusion():
    """Holm's adjustment of t tests of three seeds, from losses."""
    quantized = {"vision": 0, "diffusion": 14}
    read = [("task", "in", list(quantized))]
    rows = pd.read_parquet(
        STUDY / "store" / "parts", columns=["task", "recipe_label", "seed", "val_loss"], filters=read
    )
    for task, part in rows.groupby("task", observed=True):
        loss = np.log(part.pivot_table(index="seed", columns="recipe_label", values="val_loss", observed=True))
        kept = ("bf16, stable-spam", "bf16, muon", "bf16, learning rate")
        base = {name: next((b for b in loss if b.startswith(kept) and b[6:] in name), "bf16") for name in loss}
        gaps = pd.DataFrame({n: loss[n] - loss[b] for n, b in base.items() if n != "bf16" and not n.startswith(kept)})
        p = np.sort(ttest_1samp(gaps, 0).pvalue)
        told = np.cumprod(p * np.arange(len(p), 0, -1) < 0.05).sum()
        (line,) = (line for line in cells("images") if line[0].startswith(task))
        assert line[1] == str(gaps.shape[1]) == "52"
        assert line[3] == f"{gaps['nvfp4'].mean() / gaps['nvfp4'].std():.1f}"
        assert line[4] == f"{told}, 0"
        assert told == quantized[task]
        if task == "diffusion":
            assert f"{100 * np.expm1(gaps.mean().min()):.2f}".lstrip("0") == ".17"
            assert f"{100 * np.expm1(gaps.mean().max()):.0f}" == "25"
            assert (
                "all 52 lose by their means, .17 to 25 %, fourteen significantly" in (STUDY / "findings.md").read_text()
            )


def trained_at_10m(*more: str) -> dict[str, Recipe]:
    """config_id -> recipe, of the spaces of the stages before *scale* that were trained at 10M, and of others."""
    spaces = [Space.load(STUDY / f"{name}.toml") for name in ("halve", "halve-rest", "quartet2-10M", *more)]
    return {recipe.canonical().config_id: recipe.canonical() for space in spaces for recipe in space.recipes()}


def cells(marker: str) -> list[list[str]]:
    """The rows of a table of the findings, its heading the first."""
    table = (STUDY / "findings.md").read_text().partition(f"<!-- {marker} -->")[2].partition("<!-- end -->")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return [lines[0], *lines[2:]]


def test_at_one_bf16_loss_the_smaller_model_with_more_tokens_loses_more_to_plain_rounding():
    """3M with 20 tokens a parameter and 10M with 5, on the seeds of *scale*, from the rows themselves."""
    read = [("task", "==", "language"), ("preset", "in", ["3M", "10M"]), ("seed", ">=", 30), ("seed", "<=", 33)]
    columns = ["recipe_label", "preset", "seed", "val_loss"]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=columns, filters=read)
    loss = rows.pivot_table(index=["preset", "seed"], columns="recipe_label", values="val_loss", observed=True)
    lost = loss.sub(loss["bf16"], axis="index").groupby("preset", observed=True).mean()
    bf16 = loss["bf16"].groupby("preset", observed=True).mean()
    page = (STUDY / "findings.md").read_text()
    assert f"({bf16['3M']:.4f} and {bf16['10M']:.4f}; " in page
    said = " there for {}, NVFP4 {} for {}, the cheapest {} for {}, each a significantly larger share. "
    said += "So is UE5M3's ({} for {})."
    names = "mxfp4", "nvfp4", CHEAPEST, "ue5m3-t448, dgrad.g SR, backward rht32"
    numbers = [f"{lost.loc[at, name]:.4f}".removeprefix("0") for name in names for at in ("3M", "10M")]
    assert f"MXFP4 loses {numbers[0]} nats" in page
    text = " ".join(page.split())
    assert said.strip().format(f"{numbers[1]} at 10M", *numbers[2:]) in text
    others = lost.drop(columns=[*names, "bf16"]).dropna(axis="columns")
    assert len(others.columns) == 4
    assert (others.loc["3M"] - others.loc["10M"]).abs().max() < 0.00095


def test_the_short_tables_at_the_top_of_the_findings_are_those_below():
    page = (STUDY / "findings.md").read_text()
    readme = (STUDY.parents[1] / "README.md").read_text()

    def row(name: str, text: str = page) -> list[str]:
        text = text if text is readme else text.partition("\n## ")[0]
        (found,) = (line for line in text.splitlines() if line.strip().startswith(f"| {name} |"))
        return [cell.strip() for cell in found.strip().strip("|").split("|")[1:]]

    nvidia = "nvfp4, weights nvfp4-2d, gradients 16/17 SR, wgrad rht16, precise embedding+head+router, first 0.032, "
    sizes = {line[0]: [float(cell.split(" %")[0]) for cell in line[1:]] for line in cells("scale")[1:] if line[-1]}
    assert row("NVIDIA's") == [f"{loss:.2f} %" for loss in sizes[f"{nvidia}last 0.129"]]
    plain = row("NVFP4, everything to nearest")
    assert plain == [f"{loss:.{1 if loss > 1 else 2}f} %" for loss in sizes["nvfp4"]]
    of = {line[0]: line for line in cells("confirm")[1:]}
    for name, label in (
        ("NVFP4, tensor maximum of the last step, gradients rounded stochastically", "e2m1 1x16 e4m3 T448 previous, "),
        ("HiFloat4, gradients rotated", "hif4, backward rht64"),
        ("MXFP4 in the backward pass alone, rotated", "mxfp4, forward bf16, backward 3/4, backward rht32"),
    ):
        (line,) = (line for key, line in of.items() if key.startswith(label))
        expected = [f"{line[5].split(' (')[0]}", *(line[i].split(" (")[0].removeprefix("0") for i in (1, 2))]
        *said, software = row(name)
        assert said == expected
        assert row(name, readme) == [*expected[:2], f"{expected[2]} ({software})"]
    left = [line[5].split(" ")[0].removeprefix("0") for line in cells("falls")[2:] if line[5]]
    plain, cured = left[:3], sorted(left[3:])
    assert row("that do neither with some gradient")[0] == "{2}, {1} and {0} (three recipes)".format(*plain)
    assert row("that round each gradient stochastically or rotate it")[0] == f"{cured[0]} to {cured[-1]} (four recipes)"
