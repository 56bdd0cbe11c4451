"""What the page of reinforcement learning says each part of the error does is what the store beside it has."""

import re

import numpy as np
import pytest
from scipy.stats import t

from fp4dse.results.stats.estimates.intervals import adjusted
from tests.results.rl.rl_page import IN_ROLLOUTS, WEIGHTS, interval, numbers, queries_of, section, table

pytestmark = pytest.mark.usefixtures("few_views")
PARTS = [*("dead", "grid", "scale", "dead+grid", "scale+dead", "scale+grid", "scale+dead+grid"), "w4a4"]
"""The rows of the table of parts of the error."""
STEPS = [("scale+dead", "dead"), ("scale+grid", "grid"), ("scale+dead+grid", "dead+grid"), ("scale+dead", "scale")]
STEPS += [("dead+grid", "grid"), ("scale+dead+grid", "scale+grid"), ("scale+grid", "scale"), ("dead+grid", "dead")]
STEPS += [("scale+dead+grid", "scale+dead"), ("w4a4", "scale+dead+grid")]
"""The ten pairs that differ in one part, or in activations."""


def _recipe(part):
    return {"w4a4": IN_ROLLOUTS}.get(part, f"bf16, inject {part}")


@pytest.mark.heavy
def test_what_each_part_of_the_error_does_is_what_the_store_says(page, store, effects):
    gaps = store.sql("SELECT recipe_label, gap_bf16 FROM runs WHERE preset = 'small' AND lr = 2.4e-4 AND seed < 8")
    gaps = gaps.set_index("recipe_label")
    lanes = store.sql(
        "SELECT recipe_label, seed, ln(avg(value)) AS kl FROM recorded JOIN runs USING (run_id) "
        "SEMI JOIN (SELECT run_id, step FROM recorded WHERE name = 'accuracy') USING (run_id, step) "
        "WHERE preset = 'small' AND lr = 2.4e-4 AND name = 'mismatch_kl' GROUP BY ALL HAVING avg(value) > 1e-9"
    ).pivot(index="recipe_label", columns="seed", values="kl")
    by = store.sql("FROM rollout_numbers WHERE preset = 'small'").set_index(["label", "number"])
    columns = ["difference", "difference_low", "difference_high"]
    rows = table(page, "| in the weights that sample |")
    for cells, name in zip(rows, map(_recipe, PARTS), strict=True):
        assert by.loc[(name, "accuracy"), "pairs"] == 8
        assert numbers(cells[1]) == [round(100 * x, 2) for x in by.loc[(name, "accuracy"), columns]], name
        found = interval(-100 * gaps.loc[name, "gap_bf16"])
        assert numbers(cells[2]) == [round(x, 2) for x in found[:3]], name
        assert float(cells[3]) == round(1e4 * np.exp(lanes.loc[name].mean()), 2), name
        for cell, number in zip(cells[4:], ("entropy", "entropy_at_reward"), strict=True):
            assert numbers(cell) == [round(1e4 * x, 1) for x in by.loc[(name, number), columns]], (name, number)
    assert lanes.loc[WEIGHTS].equals(lanes.loc[_recipe("scale+dead+grid")].rename(WEIGHTS)), "the same to the bit"
    names = [_recipe(part) for part in PARTS]
    q = {
        number: adjusted(by.loc[[(name, number) for name in names], "p"])
        for number in ("accuracy", "entropy", "reward")
    }
    assert q["accuracy"].min() > 0.5
    solved = effects.query("number == 'accuracy'").set_index("treatment")
    moved = [solved.loc[f"inject {part}", ["difference", "low", "high"]] for part in ("scale", "dead", "grid")]
    said = section(page, "Which part of the error does what?").partition("scale moves accuracy by")[2]
    assert numbers(said.partition("* **KL**")[0]) == [round(100 * x, 2) for effect in moved for x in effect]
    assert [bool(x) for x in q["entropy"] < 0.05] == [False] * 7 + [True]
    assert [bool(x) for x in q["reward"] < 0.05] == [False] * 7 + [True]


def test_the_ratios_of_divergences_are_what_the_store_says(page, store):
    [query] = [q for q in queries_of(page) if "AS ratio" in q]
    found = store.sql(query).set_index(["recipe", "beside"])
    lines = found.loc[[(_recipe(a), _recipe(b)) for a, b in STEPS]]
    q = dict(zip(STEPS, adjusted(2 * t.sf(lines["t"].abs(), 7)), strict=True))
    told = {pair for pair in STEPS if q[pair] < 0.05}
    assert told == {STEPS[i] for i in (0, 7, 8, 9)}
    assert min(q[pair] for pair in STEPS if pair not in told) > 0.1
    said = (
        section(page, "Which part of the error does what?").partition("`q` for ten")[2].partition("scale bias and")[0]
    )
    ratios = re.findall(r"×([\d.]+) \(([\d.]+) to ([\d.]+), (?:`q` )?(\.\d+)\)", said)
    order = [STEPS[i] for i in (9, 0, 7, 8)]
    for written, (a, b) in zip(ratios, order, strict=True):
        line = found.loc[(_recipe(a), _recipe(b))]
        for text, value in zip(written, [line["ratio"], line["low"], line["high"], q[(a, b)]], strict=True):
            assert float(text) == pytest.approx(value, abs=0.51 * 10 ** -len(text.partition(".")[2])), (a, b)
    activations = "they multiply KL [by {}](#which-part-of-the-error-does-what) ({} to {}; 8 seeds), significant after "
    assert (activations + "correction (`q` {})").format(*ratios[0]) in section(page, "What was found")
