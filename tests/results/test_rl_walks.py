"""What the page of reinforcement learning says of walks, and of what is as good as BF16, is what the store has."""

import re
from functools import cache

import numpy as np
import pandas as pd
import pytest
from scipy.special import stdtrit

from fp4dse.dse import Recipe
from fp4dse.results.stats.estimates.intervals import half_width, holm
from fp4dse.results.stats.recipes.equivalence import compare, seeds_to_decide
from fp4dse.tasks.rl.presets import PRESETS
from tests.results.rl_page import FIXED, IN_ROLLOUTS, MANY, PAGE, numbers, queries_of, section, table

MARGIN = 0.007
WALKS = ["walks-small", "walks-medium"]
SLOWER, RATES = (1.5e-5, 3e-5, 6e-5), (1.2e-4, 2.4e-4, 4.8e-4)
OF_MEDIUM = ["mxfp4-rceil", FIXED, "bf16, noise weights"]
COMPARED = [*(("small", name) for name in MANY), *(("walks-small", name) for name in MANY)]
COMPARED += [("walks-medium", name) for name in OF_MEDIUM]
"""The rows of the table of what is as good as BF16."""
LACKING = [("walks-small", FIXED), ("walks-medium", FIXED)]
"""Those of them of which no lane is trained."""
OTHERS = ["small", "small-500", "medium", "edits-small", "carries-small", "walks-long-small", *WALKS[:1], *WALKS]
"""The rows of the table of seeds 0, 1 and 2."""


@pytest.fixture(scope="module")
def store(rl_store):
    return rl_store


@pytest.fixture(scope="module")
def page():
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def compared(store):
    """A function of two labels: the lines of `compare`, by preset, walks of 200 updates left out."""
    runs = store.runs()
    ids = runs.drop_duplicates("recipe_label").set_index("recipe_label")["config_id"]

    @cache
    def lines(first, second="bf16"):
        return compare(runs, ids[first], ids[second], MARGIN).set_index("preset")

    return lines


@pytest.fixture(scope="module")
def deviations(store, page):
    """The page's query of pairs, by preset and recipe."""
    [query] = [query for query in queries_of(page) if "pairs_to_show_none" in query]
    return store.sql(query).set_index(["preset", "recipe_label"])


def points(line, names=("difference", "high", "low")):
    """A difference of losses and its limits as points of accuracy."""
    return [round(-100 * line[name], 2) for name in names]


def short(p):
    """p as tables have it: `.012`, `.45`."""
    return f"{p:.3f}".lstrip("0") if p < 0.1 else f"{p:.2f}".lstrip("0")


def verdict(line):
    """The word of the table for a sentence of `compare`."""
    if "are not told apart" in line["verdict"]:
        return "open"
    return "same" if "are the same" in line["verdict"] else "worse" if line["low"] > 0 else "better"


def test_what_is_as_good_as_bf16_is_what_compare_says(page, compared, deviations):
    rows = table(page, "| preset, decoder | recipe |")
    for cells, (preset, name) in zip(rows, COMPARED, strict=True):
        if (preset, name) in LACKING:
            assert cells[2:] == ["0", *[""] * 6]
            assert (preset, name) not in deviations.index
            continue
        line, pairs = compared(name).loc[preset], deviations.loc[(preset, name)]
        assert line["lr_a"] == line["lr_b"] == 2.4e-4
        assert int(cells[2]) == line["pairs"] == pairs["pairs"], name
        assert numbers(cells[3]) == points(line), (preset, name)
        assert round(pairs["points"], 2) == numbers(cells[3])[0]
        assert cells[4:6] == [short(line["p"]), verdict(line)], (preset, name)
        assert numbers(cells[6]) == [pairs["lost_5"], pairs["won_5"]]
        assert float(cells[7]) == round(pairs["deviates"], 1)
        assert int(cells[8].replace(",", "")) == pairs["pairs_to_show_none"]
    assert set(deviations.index) == set(COMPARED) - set(LACKING), "rows of walks came: the table lacks them"


def test_the_pairs_that_would_show_none_are_those_of_the_package(page, deviations):
    std = deviations["deviates"].reset_index(drop=True) / 100
    needed = seeds_to_decide(std * 0, std, MARGIN)
    assert needed.to_numpy() == pytest.approx(deviations["pairs_to_show_none"], rel=0.03)
    text, at_the_top = section(page, "As good as BF16?"), section(page, "What was found")
    spread = deviations["deviates"]
    least, most = deviations["pairs_to_show_none"].agg(["min", "max"])
    said = f"pairs deviate by {spread.min():.0f} to {spread.max():.0f} points, and {least:.0f} to {most:,.0f} would be"
    assert said in at_the_top
    half = (spread.min() / 100) * stdtrit(31, 0.95) / 32**0.5
    assert f"90 % interval of 32 pairs is ±{100 * half:.1f} points wide" in text
    assert half > MARGIN
    assert f"A pair deviates by {spread.min():.1f} to {spread.max():.1f} points" in text
    tried = pd.Series(np.arange(0.01, 2, 0.01) / 100)
    enough = tried[seeds_to_decide(tried * 0, tried, MARGIN) <= 32].max()
    assert f"with 32 that takes a deviation of {100 * enough:.1f} points at most" in text


def test_what_the_page_makes_of_the_comparisons(page, store, compared):
    text, at_the_top = section(page, "As good as BF16?"), section(page, "What was found")
    small, medium = (compared("mxfp4-rceil").loc[preset] for preset in WALKS)
    alone = compared(IN_ROLLOUTS, "mxfp4-rceil").loc["walks-small"]
    found = "by {:.1f} points ({:.1f} to {:.1f}, {} pairs) and {:.1f} ({:.1f} to {:.1f}, {})".format(
        *(100 * small["difference"], 100 * small["low"], 100 * small["high"], small["pairs"]),
        *(100 * medium["difference"], 100 * medium["low"], 100 * medium["high"], medium["pairs"]),
    )
    assert found in at_the_top
    mean, low, high = (-100 * alone[name] for name in ("difference", "high", "low"))
    assert f"by {mean:.1f} points at the smaller size ({low:.1f} to {high:.1f}, {alone['pairs']} pairs)" in at_the_top
    p = short(alone["p"])
    assert f"is {mean:.2f} points better than in all operands ({low:+.2f} to {high:+.2f}, p = {p})" in text
    other = compared(IN_ROLLOUTS, "mxfp4-rceil").loc["small"]
    assert f"On `rl:small` it is {-100 * other['difference']:.2f} (p = {short(other['p'])})" in text
    assert "(Holm's p {} and {})".format(*map(short, holm([alone["p"], other["p"]]))) in text
    p = [compared(name).loc[preset, "p"] for preset, name in COMPARED[5:] if (preset, name) not in LACKING]
    assert len(p) == 6
    assert f"(Holm's p {holm(p).min():.2f})".replace("0.", ".") in text
    means = [-100 * compared("mxfp4-rceil").loc[preset, "difference"] for preset in ("small", *WALKS)]
    assert f"by {-max(means):.1f} to {-min(means):.1f} points" in text
    for preset in WALKS:
        recipes = store.sql(f"FROM recipes WHERE preset = '{preset}' AND label = 'mxfp4-rceil' AND lr = 2.4e-4").iloc[0]
        mean, low, high = points(recipes, ("gap_bf16", "gap_bf16_high", "gap_bf16_low"))
        assert f"{mean:.2f} points ({low:.2f} to {high:+.2f})" in text
    elsewhere = compared(IN_ROLLOUTS).loc["walks-medium"]
    assert (elsewhere["lr_a"], elsewhere["lr_b"]) == (1.2e-4, 2.4e-4), "as the page says"
    lanes = store.sql("SELECT val_metric FROM runs WHERE steps = 160 AND lr = 2.4e-4")["val_metric"]
    assert f"the lowest of the {len(lanes)} lanes at 2.4e-4 ends at {100 * lanes.min():.1f} %" in text


def test_when_mxfp4_falls_behind_is_what_the_store_has(page, store):
    [query] = [query for query in queries_of(page) if "AS apart" in query]
    found = store.sql(query).set_index(["preset", "step"])
    found["half"] = half_width(found["deviates"].to_numpy(float), found["pairs"].to_numpy())
    rows = table(page, "| update | `walks-small`: BF16 |")
    assert [int(cells[0]) for cells in rows] == sorted({step for _, step in found.index})
    for cells in rows:
        for preset, [alone, apart, deviates] in zip(WALKS, (cells[1:4], cells[4:7]), strict=True):
            line = found.loc[(preset, int(cells[0]))]
            assert numbers(alone) == [round(line[name], 1) for name in ("bf16", "over_seeds")]
            limits = [line["apart"], line["apart"] - line["half"], line["apart"] + line["half"]]
            assert numbers(apart) == [round(x, 1) for x in limits], (preset, cells[0])
            assert float(deviates) == round(line["deviates"], 1)
    told = found.index[(found["apart"].abs() > found["half"])]
    assert list(told[:2]) == [("walks-medium", 120), ("walks-medium", 160)]
    assert list(told[2:]) == [("walks-small", step) for step in (40, 120, 160)]
    text = section(page, "When does MXFP4 fall behind?")
    first = "behind by {:.1f} points at update 40, on `walks-medium` by {:.1f} at 120"
    assert first.format(-found.loc[("walks-small", 40), "apart"], -found.loc[("walks-medium", 120), "apart"]) in text
    assert "{:.0f} pairs and {:.0f}, with 95 %".format(*(found.loc[(preset, 160), "pairs"] for preset in WALKS)) in text
    std = pd.Series([found.loc[(preset, 40), "deviates"] / 100 for preset in WALKS])
    some = [round(need, -1) for need in seeds_to_decide(std * 0, std, MARGIN)]
    assert "some {:.0f} and {:.0f} pairs".format(*some) in text
    early, late = ([found.loc[(preset, step), "deviates"] for preset in WALKS] for step in (40, 160))
    assert "deviates by {:.1f} and {:.1f} points, for {:.1f} and {:.1f} at the end".format(*early, *late) in text
    early, late = ([-found.loc[(preset, step), "apart"] for preset in WALKS] for step in (40, 160))
    assert "behind by {:.1f} and {:.1f} points there, and by {:.1f} and {:.1f} at the end".format(*early, *late) in text
    at_40 = [found.loc[(preset, 40), "bf16"] for preset in WALKS]
    for title in ("When does MXFP4 fall behind?", "Which preset leaves room?"):
        assert "BF16 is at {:.0f} and {:.0f} %".format(*at_40) in section(page, title)


def test_the_room_that_walks_leave_is_what_the_store_has(page, store):
    [query] = [query for query in queries_of(page) if "least_gain" in query]
    found = store.sql(query).set_index(["preset", "lr"])
    rows = table(page, "| preset | rate | seeds |")
    for cells, (preset, lr) in zip(rows, [(preset, lr) for preset in WALKS for lr in SLOWER + RATES], strict=True):
        line = found.loc[(preset, lr)]
        assert (cells[0].strip("`"), float(cells[1])) == (preset, lr)
        said = [int(cells[2]), int(cells[3]), *(number for cell in cells[4:] for number in numbers(cell))]
        names = ("after", "deviation", "lowest", "highest", "gain", "least_gain")
        assert said == [
            *(line["seeds"], round(line["before"]), *(round(line[name], 1) for name in names), line["within"])
        ], (preset, lr)
    assert {PRESETS[preset].steps for preset in WALKS} == {160}
    assert found.drop(index=SLOWER[0], level="lr")["least_gain"].min() > 20, "the gain that was wanted"
    at = {preset: found.loc[(preset, 2.4e-4)] for preset in WALKS}
    assert all(line["after"] > 90 for line in at.values())
    presets = {cells[0].strip("`"): cells[-1] for cells in table(page, "| preset | problems | decoder |")}
    for preset, line in at.items():
        said = "{:.0f} → {:.0f} % (+{:.0f} to +{:.0f})"
        assert presets[preset] == said.format(*line[["before", "after", "least_gain", "most_gain"]])
    assert "of {:.0f} and {:.0f} for `walks-small`".format(*(line["seeds"] for line in at.values())) in page
    text = section(page, "Which preset leaves room?")
    assert "gain {:.0f} and {:.0f} points".format(*(line["gain"] for line in at.values())) in text
    assert "end at {:.1f} and {:.1f} %:".format(*(line["after"] for line in at.values())) in text
    assert "leave {:.0f} and {:.0f} points of room".format(*(100 - line["after"] for line in at.values())) in text
    wanted = found[found["after"].between(75, 90)]
    assert list(wanted.index) == [*(("walks-medium", lr) for lr in (3e-5, 6e-5, 4.8e-4)), ("walks-small", 6e-5)]
    fast = wanted.loc[("walks-medium", 4.8e-4)]
    assert fast["seeds"] - fast["within"] == 1
    assert fast["lowest"] < 75
    assert "ends at {:.1f} and {:.1f} %".format(*(found.loc[(preset, 6e-5), "after"] for preset in WALKS)) in text
    nearest = (found.loc["walks-medium", "after"].loc[list(SLOWER)] - 82).abs().idxmin()
    assert nearest == 6e-5, "by the rule that was written before"
    solved = store.sql(
        "SELECT seed, 100 * val_metric AS solved FROM runs WHERE recipe_name = 'bf16' AND preset = 'walks-small' AND "
        "steps = 160 AND lr = 2.4e-4"
    ).set_index("seed")["solved"]
    first, rest = solved[solved.index < 3], solved[solved.index >= 16]
    assert f"which end at {first.mean():.1f} % ({first.std():.1f})" in text
    assert f"Seeds 16 to 31 end at {rest.mean():.1f} % ({rest.std():.1f})" in text
    of = {(preset, lr): found.loc[(preset, lr), "after"] for preset in WALKS for lr in RATES}
    assert "{:.1f} and {:.1f} %, higher than".format(*(of[preset, 1.2e-4] for preset in WALKS)) in text


def test_the_room_that_other_presets_leave_is_what_the_store_has(page, store):
    queries = [query for query in queries_of(page) if "AS sd" in query]
    ends, starts = (store.sql(query) for query in queries)
    assert set(ends["seeds"]) == {3}
    ends, starts = ends.set_index(["preset", "steps", "lr"]), starts.set_index("preset")["solved"]
    rows = table(page, "| preset | updates | before |")
    for cells, name in zip(rows, OTHERS, strict=True):
        of = ends.loc[(name, int(cells[1]))]
        assert {round(x) for x in starts.loc[[name]]} == {int(cells[2])}, name
        for cell, rate in zip(cells[3:], RATES, strict=True):
            found = [round(of.loc[rate, of_it], 1) for of_it in ("after", "sd")] if rate in of.index else []
            assert numbers(cell) == found, (name, rate)
    plain = ends.xs(2.4e-4, level="lr")["after"].drop(("walks-small", 160))  # of which there are more seeds
    assert (plain > 90).all()
    assert set(ends.index.droplevel("lr")) == {(n, int(cells[1])) for cells, n in zip(rows, OTHERS, strict=True)}
    text = section(page, "Which preset leaves room?")
    at = [ends.loc[(preset, 160, 2.4e-4), "after"] for preset in WALKS]
    assert "higher than at 2.4e-4 ({:.1f} and {:.1f})".format(*at) in text
    mxfp4 = store.sql(
        "SELECT preset, lr, 100 * avg(val_metric) AS solved FROM runs WHERE preset LIKE 'walks-%' AND seed < 3 "
        f"AND recipe_label = '{IN_ROLLOUTS}' GROUP BY ALL ORDER BY lr"
    ).set_index("preset")["solved"]
    assert "MXFP4 rollouts have {:.1f}, {:.1f} and {:.1f} % there".format(*mxfp4["walks-long-small"]) in text
    assert "{:.1f}, {:.1f} and {:.1f} % on `walks-small`".format(*mxfp4["walks-small"]) in text
    assert "{:.1f}, {:.1f} and {:.1f} on `walks-medium`".format(*mxfp4["walks-medium"]) in text


def test_walks_of_both_lengths_are_one_training_and_no_pairs(store):
    both = store.sql(
        "SELECT lr, seed, steps, step, value FROM recorded JOIN runs USING (run_id) WHERE name = 'accuracy' "
        "AND preset = 'walks-small' AND recipe_name = 'bf16' AND seed < 3 AND lr < 4e-4"
    ).pivot(index=["lr", "seed", "step"], columns="steps", values="value")
    both = both.dropna()
    assert len(both.groupby(["lr", "seed"])) == 6
    assert both.index.get_level_values("step").max() == 160
    assert both[160].equals(both[200].rename(160))
    runs = store.runs()
    runs = runs[runs["preset"].eq("walks-small")]
    digests = runs.groupby("steps")["dataset_digest"].unique()
    assert [len(of) for of in digests] == [1, 1]
    assert digests[160][0] != digests[200][0]
    bf16 = runs[runs["config_id"].eq(Recipe.named("bf16").config_id) & runs["steps"].eq(160) & runs["lr"].eq(2.4e-4)]
    own = bf16.set_index("seed")["val_loss"]
    others = runs[runs["steps"].eq(160) & runs["seed"].isin(own.index)]
    assert np.array_equal(others["baseline_loss"], own[others["seed"]])
    assert not re.findall("bf16", "".join(runs.loc[runs["steps"].eq(200) & ~runs["is_baseline"], "recipe_label"]))
