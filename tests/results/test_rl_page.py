"""What the page of reinforcement learning says of its recipes is what the store beside it has."""

import re
from pathlib import Path

from fp4dse.results import open_store

DOCS = Path(__file__).parents[2] / "docs"
MACRO = "e2m1 1x32 e8m0-rceil macro"
QAT = "bf16, forward mxfp4-rceil"
ROWS = [
    "bf16",
    *("mxfp4-rceil", MACRO, "mxfp4-rceil, hadamard32", "mxfp4-rceil, noise weights"),
    *(f"{MACRO}, noise weights", "mxfp4-rceil, hadamard32, noise weights"),
    *(QAT, f"bf16, forward {MACRO}", f"{QAT}, fprop hadamard32", f"{QAT}, noise weights", f"{QAT}, noise qerl"),
]
"""The recipes of the table, in its order."""
ASKED = """
SELECT recipe_label, avg(runs.val_metric) FILTER (runs.lr = 3e-5) AS lower,
    list(runs.val_metric ORDER BY seed) FILTER (runs.lr = 6e-5) AS seeds,
    any_value(recipes.gap) AS gap, any_value(recipes.gap_low) AS low, any_value(recipes.gap_high) AS high
FROM runs JOIN recipes USING (config_id) GROUP BY recipe_label
"""


def test_the_table_of_fixes_is_what_the_store_has():
    page = (DOCS / "rl.md").read_text(encoding="utf-8").replace("−", "-").replace("**", "")
    table = page.partition("| trainer and rollout |")[2].partition("\n\n")[0].splitlines()[2:]
    said = [[float(number) for number in re.findall(r"[+-]?\d+\.\d", line)] for line in table]
    found = open_store(DOCS / "study" / "rl-store").sql(ASKED).set_index("recipe_label")
    assert len(found) == len(ROWS)
    for numbers, name in zip(said, ROWS, strict=True):
        row = found.loc[name]
        gaps = [] if name == "bf16" else [-100 * row[column] for column in ("gap", "high", "low")]
        shares = [100 * share for share in (row["lower"], *row["seeds"], sum(row["seeds"]) / 3)]
        assert numbers == [float(f"{number:.1f}") for number in [*shares, *gaps]], name


def test_every_query_of_the_page_answers_with_its_views():
    """Of the store beside it, which has records without the gradient's error."""
    page = (DOCS / "rl.md").read_text(encoding="utf-8")
    queries = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    assert len(queries) == 4
    store = open_store(DOCS / "study" / "rl-store")
    sizes = [len(store.sql(query)) for query in queries]
    assert [size > 0 for size in sizes] == [True, False, True, True], "nothing is injected there"
    assert sizes[2] == len(ROWS)


def test_what_noise_does_to_entropy_at_equal_reward_is_what_the_store_says():
    page = (DOCS / "rl.md").read_text(encoding="utf-8").replace("−", "-")
    said = page.partition("* **Exploration.**")[2].partition("* **Entropy**")[0]
    numbers = [float(number) for number in re.findall(r"[+-]\.\d+", said)]
    store = open_store(DOCS / "study" / "rl-store")
    effects = store.sql("FROM rollout_effects WHERE number = 'entropy_at_reward'").set_index(["treatment", "trainer"])
    found = [effects.loc[key] for key in (("noise weights", "fp4"), ("noise weights", "qat"), ("noise qerl", "qat"))]
    own = store.sql("FROM rollout_numbers WHERE number = 'entropy_at_reward'").set_index("label").loc["mxfp4-rceil"]
    expected = [line[name] for line in found for name in ("difference", "low", "high")]
    expected += [own[name] for name in ("difference", "difference_low", "difference_high")]
    assert numbers == [round(number, 5) for number in expected]
