"""What the page of reinforcement learning says of its recipes is what the store beside it has."""

import re
from pathlib import Path

import pytest

from fp4dse.results import open_store

DOCS = Path(__file__).parents[2] / "docs"
MACRO = "e2m1 1x32 e8m0-rceil macro"
FIXED = f"{MACRO}, forward residual, noise weights"
IN_ROLLOUTS = "bf16, rollout mxfp4-rceil"
MANY = ["mxfp4-rceil", FIXED, IN_ROLLOUTS, "bf16, noise weights", "bf16, noise qerl"]
"""The recipes of 32 seeds, in the order of their table."""
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
SPREAD = """
SELECT recipe_label, median(-gap) AS middle, count(*) FILTER (gap > 0) AS worse, count(*) FILTER (gap < 0) AS better,
    count(*) FILTER (gap > .05) AS far_worse, count(*) FILTER (gap < -.05) AS far_better,
    count(*) FILTER (val_metric < .9) AS below
FROM runs WHERE lr = 2.4e-4 GROUP BY ALL HAVING count(*) = 32
"""
THREE = "SELECT recipe_label, lr, 100 * avg(val_metric) AS solved FROM runs WHERE seed < 3 GROUP BY ALL"


@pytest.fixture(scope="module")
def store():
    return open_store(DOCS / "study" / "rl-store")


@pytest.fixture(scope="module")
def page():
    return (DOCS / "rl.md").read_text(encoding="utf-8")


def table(page, first):
    """The cells of the rows of the table whose header begins so."""
    rows = page.partition(first)[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def numbers(text):
    text = text.replace("−", "-").replace("**", "")
    return [float(number) for number in re.findall(r"[+-]?\d*\.?\d+", text)]


def test_what_32_seeds_lose_and_how_they_spread_is_what_the_store_has(page, store):
    said = table(page, "| points against BF16 |")
    recipes = store.sql("FROM recipes WHERE seeds = 32").set_index("label")
    spread = store.sql(SPREAD).set_index("recipe_label")
    assert set(recipes.index) == {*MANY, "bf16"}
    for cells, name in zip(said, MANY, strict=True):
        of, own = recipes.loc[name], spread.loc[name]
        expected = [-100 * of[column] for column in ("gap", "gap_high", "gap_low")]
        assert numbers(cells[1]) == [round(number, 2) for number in expected], name
        expected = [-100 * of[column] for column in ("gap_bf16", "gap_bf16_high", "gap_bf16_low")]
        assert numbers(cells[3]) == [round(number, 2) for number in expected], name
        assert numbers(cells[4]) == [round(100 * own["middle"], 2)], name
        counts = [own[column] for column in ("worse", "better", "far_worse", "far_better", "below")]
        assert [number for cell in cells[5:] for number in numbers(cell)] == counts, name
    assert spread.loc["bf16", "below"] == 0


def test_three_seeds_at_two_rates_are_what_the_store_has(page, store):
    means = store.sql(THREE).set_index(["recipe_label", "lr"])["solved"]
    rows = {cells[0].strip("*"): cells[1:] for cells in table(page, "| learning rate | BF16 |")}
    for rate in ("1.2e-4", "2.4e-4"):
        found = [round(means[name, float(rate)], 1) for name in RATES]
        assert [float(cell) for cell in rows[rate]] == found, rate


def test_the_table_of_fixes_is_what_the_store_has_and_lacks(page, store):
    means = store.sql(THREE).set_index(["recipe_label", "lr"])["solved"].xs(2.4e-4, level="lr")
    written = {}
    for [fixes, *cells] in table(page, "| fixes | MXFP4 in all operands |"):
        for trainer, cell in zip(("fp4", "rollout", "qat"), cells, strict=True):
            written[_label(fixes, trainer)] = cell
    trained = {name: float(cell) for name, cell in written.items() if cell not in {"?", "–"}}
    assert len(trained) == 27
    assert sum(cell == "?" for cell in written.values()) == 11
    assert trained == {name: round(means[name], 1) for name in trained}
    assert set(means.index) == {*trained, "bf16", "bf16, noise weights", "bf16, noise qerl"}
    assert not {name for name, cell in written.items() if cell == "?"} & set(means.index)


def _label(fixes, trainer):
    """The label of a recipe with these fixes."""
    named = {"all four": "macro blocks, fallback, rotation, noise on the weights"}.get(fixes, fixes)
    of = [{"fallback for outliers": "fallback", "Hadamard rotation": "rotation"}.get(x, x) for x in named.split(", ")]
    quantizer = MACRO if "macro blocks" in of else "mxfp4-rceil"
    if trainer == "rollout":
        quantizer = f"bf16, rollout {quantizer}" + " residual" * ("fallback" in of)
        of = [fix for fix in of if fix != "fallback"]
    before = {"fp4": "", "rollout": "", "qat": "bf16, forward "}[trainer]
    return ", ".join([before + quantizer, *(AFTER[fix] for fix in of if AFTER[fix])])


def test_every_query_of_the_page_answers_with_its_views(page, store):
    """Of the store beside it, which has records without the gradient's error."""
    queries = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    assert len(queries) == 4
    sizes = [len(store.sql(query)) for query in queries]
    assert [size > 0 for size in sizes] == [True, False, True, True], "nothing is injected there"
    assert sizes[2] == 24, "the recipes with records"


def test_what_noise_does_to_entropy_at_equal_reward_is_what_the_store_says(page, store):
    said = page.partition("* **Exploration.**")[2].partition("* **Entropy**")[0].replace("−", "-")
    found = store.sql("FROM rollout_effects WHERE number = 'entropy_at_reward'").set_index(["treatment", "trainer"])
    order = [("noise weights", "fp4"), ("noise weights", "bf16"), ("noise weights", "qat"), ("noise qerl", "qat")]
    expected = [round(found.loc[key][name], 5) for key in order for name in ("difference", "low", "high")]
    assert [float(number) for number in re.findall(r"[+-]\.\d+", said)] == expected


def test_the_seeds_that_lose_most_make_up_what_the_page_says(page, store):
    rows = store.sql("SELECT -100 * gap AS points FROM runs WHERE recipe_label = 'mxfp4-rceil' AND lr = 2.4e-4")
    points = sorted(rows["points"])
    assert points[7] < -5 < points[8]
    said = " ".join(page.partition("**Much in a few.**")[2].partition("\n\n")[0].split())
    assert f"add up to −{-sum(points[:8]) / 32:.2f} points of the mean of −{-sum(points) / 32:.2f};" in said
    assert f"the other 24 are {sum(points[8:]) / 24:.1f} points ahead" in said
    assert (
        f"{100 * sum(points[:2]) / sum(points):.0f} % of all; without them the mean is −{-sum(points[2:]) / 30:.1f}"
        in said
    )
