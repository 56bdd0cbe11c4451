"""What the page of reinforcement learning says of accuracies is what the store beside it has."""

import re
from itertools import product

import pytest
from scipy.stats import wilcoxon

from fp4dse.results.stats.estimates.intervals import holm, mean_interval, p_value
from fp4dse.sweeps.arguments import find_space
from tests.results.rl.rl_page import (
    FIXED,
    IN_ROLLOUTS,
    MACRO,
    MANY,
    WEIGHTS,
    interval,
    numbers,
    queries_of,
    section,
    table,
)

pytestmark = pytest.mark.usefixtures("few_views")
RATES = ["bf16", "mxfp4-rceil", IN_ROLLOUTS, FIXED, "bf16, noise weights", "bf16, noise qerl"]
"""The columns of the table of rates."""
AFTER = {
    "none": "",
    "macro blocks": "",
    "fallback": "forward residual",
    "rotation": "hadamard32",
    "noise on the weights": "noise weights",
    "noise `qerl`": "noise qerl",
}
"""A fix in the table of fixes -> what a label has for it behind its quantizer."""
PAPER = ["bf16", "mxfp4-rceil", MACRO, "mxfp4-rceil, forward residual", "mxfp4-rceil, noise weights"]
PAPER += [f"{MACRO}, forward residual", FIXED]
"""The rows of the table beside the seed paper's."""
ROW_SCALED = "bf16, fprop.x e2m1 1x16 e4m3 T256 row, fprop.w e2m1 1x16 e4m3 T256, forward 4over6-mae, "
ROW_SCALED += "backward x+w from forward, precise embedding+head+router, last 0.15"
QAT = "bf16, forward mxfp4-rceil"
FLAT = ["bf16", "mxfp4-rceil", QAT, ROW_SCALED, f"{QAT}, fprop.w lora, trains what is learned", WEIGHTS]
FLAT += [f"bf16, rollout {MACRO} residual", f"{QAT}, rollout mxfp4-rceil, KV fp8-row"]
FLAT += ["bf16, fprop.w mxfp4-rceil, rollout mxfp4-rceil", f"{QAT}, noise weights"]
FLAT += [IN_ROLLOUTS, "bf16, tis 2, rollout mxfp4-rceil", "bf16, rollout mxfp4-rceil residual"]
"""The rows of the table of 500 updates."""
SPREAD = """
SELECT recipe_label, median(-gap) AS middle, count(*) FILTER (gap > 0) AS worse, count(*) FILTER (gap < 0) AS better,
    count(*) FILTER (gap > .05) AS far_worse, count(*) FILTER (gap < -.05) AS far_better, min(val_metric) AS least,
    count(*) FILTER (val_metric < .9) AS below, count(*) FILTER (val_metric > .99) AS above, avg(val_metric) AS mean
FROM runs WHERE preset = 'small' AND lr = 2.4e-4 GROUP BY ALL HAVING count(*) = 32
"""
THREE = """
SELECT recipe_label, lr, 100 * avg(val_metric) AS solved, 100 * min(val_metric) AS least
FROM runs WHERE preset = 'small' AND seed < 3 AND recipe_label NOT LIKE '%inject%' AND recipe_label NOT LIKE '%w4a16%'
GROUP BY ALL
"""


@pytest.fixture(scope="module")
def three(store):
    return store.sql(THREE).set_index(["recipe_label", "lr"])


def test_what_32_seeds_lose_and_how_they_spread_is_what_the_store_has(page, store):
    said = table(page, "| points against BF16 |")
    recipes = store.sql("FROM recipes WHERE preset = 'small' AND seeds = 32").set_index("label")
    spread = store.sql(SPREAD).set_index("recipe_label")
    assert set(recipes.index) == {*MANY, "bf16"}
    for cells, name in zip(said, MANY, strict=True):
        of, own = recipes.loc[name], spread.loc[name]
        expected = [-100 * of[column] for column in ("gap", "gap_high", "gap_low")]
        assert numbers(cells[1]) == [round(number, 2) for number in expected], name
        expected = [-100 * of[column] for column in ("gap_bf16", "gap_bf16_high", "gap_bf16_low")]
        assert numbers(cells[4]) == [round(number, 2) for number in expected], name
        assert numbers(cells[5]) == [round(100 * own["middle"], 2)], name
        counts = [own[column] for column in ("worse", "better", "far_worse", "far_better", "below")]
        assert [number for cell in cells[6:] for number in numbers(cell)] == counts, name
    bf16 = spread.loc["bf16"]
    assert bf16["below"] == 0
    said = section(page, "What MXFP4 rollouts cost")
    assert f"It ends at {100 * bf16['mean']:.1f} %: its lowest seed has {100 * bf16['least']:.1f} %" in said
    assert f"and {bf16['above']:.0f} of the 32 are above 99 %" in said


def test_the_headline_has_its_adjusted_p(page, store):
    rows = store.sql("SELECT recipe_label, gap FROM runs WHERE preset = 'small' AND lr = 2.4e-4 ORDER BY seed")
    p = [interval(rows.loc[rows["recipe_label"].eq(name), "gap"])[3] for name in MANY]
    by_rule = [p_value(-100 * rows.loc[rows["recipe_label"].eq(name), "gap"].to_numpy()[None])[0] for name in MANY]
    for column, of in ((2, by_rule), (3, p)):
        said = [cells[column] for cells in table(page, "| points against BF16 |")]
        assert [float(cell) for cell in said] == [round(x, 3 if x < 0.1 else 2) for x in of]
    text = section(page, "What MXFP4 rollouts cost")
    at_the_top = section(page, "What was found")
    said = f"Significant alone (p = {by_rule[0]:.3f}), not after correction for five recipes ({holm(by_rule)[0]:.3f})."
    assert said.replace("0.", ".") in at_the_top
    first, second, *_ = holm(by_rule)
    assert f"after Holm's adjustment p is {first:.3f} for each".replace("0.", ".") in text
    assert first == second
    first, second, *_ = holm(p)
    assert f"after Holm's adjustment {first:.2f} and {second:.2f}".replace("0.", ".") in text
    wilcoxons = [wilcoxon(rows.loc[rows["recipe_label"].eq(name), "gap"]).pvalue for name in MANY[:2]]
    assert f"Wilcoxon's test has {wilcoxons[0]:.3f} and {wilcoxons[1]:.3f}".replace("0.", ".") in text


def test_what_the_verdict_hangs_on(page, store):
    rows = store.sql(
        "SELECT seed, gap FROM runs WHERE recipe_label = 'mxfp4-rceil' AND preset = 'small' AND lr = 2.4e-4 "
        "ORDER BY seed"
    )
    kept = -100 * rows.loc[~rows["seed"].isin([13, 17]), "gap"].to_numpy()
    found = mean_interval(kept[None]).iloc[0]
    said = section(page, "What MXFP4 rollouts cost").partition("without these two it is")[2].partition("). That")[0]
    assert numbers(said) == [*(round(found[name], 2) for name in ("mean", "low", "high")), round(found["p"], 3)]
    without = "{:.1f} ({:.1f} to {:.1f}).".format(*(-found[name] for name in ("mean", "high", "low")))
    whole = mean_interval(-100 * rows["gap"].to_numpy()[None]).iloc[0]
    costs = "costs {:.1f} points** ({:.1f} to {:.1f};".format(*(-whole[name] for name in ("mean", "high", "low")))
    at_the_top = section(page, "What was found")
    assert costs in at_the_top
    assert f"(#what-mxfp4-rollouts-cost) it is {without}" in at_the_top


@pytest.mark.parametrize(
    ("first", "second", "before"),
    [(FIXED, "mxfp4-rceil", "All three against none:"), (IN_ROLLOUTS, "mxfp4-rceil", "better than in all operands")],
)
def test_recipes_beside_one_another_of_32_seeds(page, store, first, second, before):
    rows = store.sql("SELECT recipe_label, gap FROM runs WHERE preset = 'small' AND lr = 2.4e-4 ORDER BY seed")
    one, other = (-100 * rows.loc[rows["recipe_label"].eq(name), "gap"].to_numpy() for name in (first, second))
    found = mean_interval((one - other)[None]).iloc[0]
    said = section(page, "What MXFP4 rollouts cost").partition(before)[2].partition(")")[0].partition("; t-test")[0]
    expected = [round(found[name], 2) for name in ("low", "high")]
    assert numbers(said)[-3:] in ([round(found["mean"], 2), *expected], [*expected, round(found["p"], 3)])


def test_three_seeds_at_three_rates_are_what_the_store_has(page, three):
    rows = {cells[0].strip("*"): cells[1:] for cells in table(page, "| learning rate | BF16 |")}
    for rate in ("1.2e-4", "2.4e-4", "4.8e-4"):
        found = [round(three.loc[(name, float(rate)), "solved"], 1) for name in RATES]
        assert [float(cell) for cell in rows[rate]] == found, rate
    of_bf16 = {rate: three.loc[("bf16", rate), "solved"] for rate in (1.2e-4, 2.4e-4, 4.8e-4)}
    assert max(of_bf16, key=lambda rate: of_bf16[rate]) == 2.4e-4, "the rate of the preset, not at the edge"
    least = three.xs(4.8e-4, level="lr")["least"].loc[[IN_ROLLOUTS, "bf16, noise qerl", "bf16", "mxfp4-rceil"]]
    said = section(page, "Which rate?")
    found = re.search(r"ends at (\d+) % with MXFP4 rollouts, at (\d+) with .{6}, at (\d+) with BF16, at (\d+)", said)
    assert [int(number) for number in found.groups()] == [round(number) for number in least]


def test_the_table_of_fixes_is_what_the_store_has(page, store, three):
    means = three["solved"].xs(2.4e-4, level="lr")
    written = {}
    for [fixes, *cells] in table(page, "| fixes | MXFP4 in all operands |"):
        for trainer, cell in zip(("fp4", "rollout", "qat"), cells, strict=True):
            written[_label(fixes, trainer)] = cell
    trained = {name: float(cell) for name, cell in written.items() if cell != "–"}
    assert len(trained) == 38
    assert trained == {name: round(means[name], 1) for name in trained}
    assert set(means.index) == {*trained, "bf16", "bf16, noise weights", "bf16, noise qerl", ROW_SCALED}
    assert f"`rl-row-scaled`, beside it, has {means[ROW_SCALED]:.1f}." in page
    ids = set(store.sql("SELECT DISTINCT config_id FROM runs WHERE preset = 'small'")["config_id"])
    of_space = list(find_space("rl-fixes").recipes())
    assert f"One of {len(of_space)} has to be the best." in page
    assert ids >= {recipe.config_id for recipe in of_space}


def _label(fixes, trainer):
    """The label of a recipe with these fixes."""
    named = {"all four": "macro blocks, fallback, rotation, noise on the weights"}.get(fixes, fixes)
    of = [{"fallback for outliers": "fallback", "Hadamard rotation": "rotation"}.get(x, x) for x in named.split(", ")]
    quantizer = MACRO if "macro blocks" in of else "mxfp4-rceil"
    if trainer == "rollout":
        quantizer = f"bf16, rollout {quantizer}" + " residual" * ("fallback" in of)
        of = [fix for fix in of if fix != "fallback"]
    before = {"fp4": "", "rollout": "", "qat": "bf16, forward "}[trainer]
    after = [AFTER[fix] for fix in of if AFTER[fix]]
    if trainer == "qat":
        after = [{"hadamard32": "fprop hadamard32"}.get(x, x) for x in after]
    return ", ".join([before + quantizer, *after])


def test_the_rows_of_the_seed_papers_table_are_ours(page, store):
    eight = store.sql(
        "SELECT recipe_label, 100 * avg(val_metric) AS solved FROM runs "
        "WHERE preset = 'small' AND lr = 2.4e-4 AND seed < 8 GROUP BY ALL HAVING count(*) = 8"
    ).set_index("recipe_label")["solved"]
    spread = store.sql(SPREAD).set_index("recipe_label")["mean"]
    for cells, name in zip(table(page, "| fixes | their experts |"), PAPER, strict=True):
        assert float(cells[3]) == round(eight[name], 1), name
        assert numbers(cells[4]) == ([round(100 * spread[name], 1)] if name in spread else []), name


@pytest.mark.heavy
def test_every_query_of_the_page_answers_with_its_views(page, store):
    queries = queries_of(page) + re.findall(r'fp4dse query --store docs/study/rl-store "(.*)"', page)
    assert len(queries) >= 12
    for query in queries:
        assert len(store.sql(query)), query


def test_500_updates_are_what_the_store_has(page, store):
    [query] = [q for q in queries_of(page) if "each_100" in q]
    found = store.sql(query).set_index("recipe")
    said = table(page, "| trainer and rollout | accuracy |")
    assert set(found.index) == set(FLAT)
    for cells, name in zip(said, FLAT, strict=True):
        line = found.loc[name]
        assert float(cells[1]) == round(line["solved"], 1), name
        if not cells[4]:
            assert (cells[2], cells[3]) == ("0", "0"), name
            assert line["largest"] < 0.01, name
            continue
        assert (float(cells[2]), float(cells[3])) == (round(line["kl"], 1), round(line["largest"])), name
        limits = [line[column] for column in ("each_100", "low", "high")]
        assert numbers(cells[4].replace("to", "")) == [round(number, 2) for number in limits], name
    ids = set(store.sql("SELECT DISTINCT config_id FROM runs WHERE preset = 'small-500'")["config_id"])
    lacking = [recipe.label() for recipe in find_space("rl-kl").recipes() if recipe.config_id not in ids]
    assert not lacking
    moving = found[found["largest"] > 0.01]
    assert (len(moving), (moving["last"] < moving["first"]).sum()) == (8, 6)


def test_replay_of_routes_is_what_the_store_has(page, store):
    rows = store.sql("SELECT recipe_label, lr, seed, 100 * val_metric AS solved FROM runs WHERE preset = 'moe-small'")
    lines = table(page, "| rollout and trainer | rate |")
    arms = [IN_ROLLOUTS, IN_ROLLOUTS.replace("bf16,", "bf16, tis 2,"), QAT]
    for cells, (rate, name) in zip(lines, product((1.2e-4, 2.4e-4), arms), strict=True):
        lanes = rows[rows["lr"].eq(rate)].pivot(index="seed", columns="recipe_label", values="solved")
        plain, replayed = lanes[name], lanes[f"{name}, router replay"]
        assert [float(cell) for cell in cells[1:4]] == [rate, round(plain.mean(), 1), round(replayed.mean(), 1)]
        assert numbers(cells[4].replace("to", "")) == [round(number, 1) for number in interval(replayed - plain)[:3]]


@pytest.mark.heavy
def test_both_pairs_of_replay_together_are_what_the_view_has(page, store):
    said = section(page, "Does replaying routes help?").replace("−", "-")
    effects = store.sql("FROM rollout_effects WHERE treatment = 'router replay' AND trainer = 'bf16'")
    line, kl = (effects[effects["number"].eq(name)].iloc[0] for name in ("accuracy", "mismatch_kl"))
    assert (line["pairs"], line["lr"]) == (2, 2.4e-4)
    points = [f"{100 * line[name]:+.1f}" for name in ("difference", "low", "high")]
    assert f"{points[0]} points ({points[1]} to {points[2]}, `q` {line['q']:.2f})".replace("0.34", ".34") in said
    shown = [f"{kl[name]:+.4f}".replace("0.", ".") for name in ("difference", "low", "high")]
    assert f"the mean KL {shown[0].removeprefix('+')} ({shown[1].removeprefix('+')} to {shown[2]})" in said


def test_the_seeds_that_lose_most_make_up_what_the_page_says(page, store):
    rows = store.sql(
        "SELECT -100 * gap AS points FROM runs WHERE recipe_label = 'mxfp4-rceil' AND preset = 'small' AND lr = 2.4e-4"
    )
    points = sorted(rows["points"])
    assert points[7] < -5 < points[8]
    said = " ".join(page.partition("**Much in a few.**")[2].partition("\n\n")[0].split())
    assert f"add up to −{-sum(points[:8]) / 32:.2f} points of the mean of −{-sum(points) / 32:.2f};" in said
    assert f"the other 24 are {sum(points[8:]) / 24:.1f} points ahead" in said
    assert f"{100 * sum(points[:2]) / sum(points):.0f} % of all." in said
