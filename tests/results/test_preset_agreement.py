"""How far two presets have recipes in the same order, from rows of known losses."""

from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest

from fp4dse.dse import Recipe, Space
from fp4dse.dse.agreement import agreements
from fp4dse.results import open_store, recipe_columns
from fp4dse.results.preset_agreement import preset_agreement
from fp4dse.results.stats.paired import add_gap

LADDER = ("language:0.4M", "language:1M")
RECIPES = list(
    Space.from_dict(
        {
            "base": "nvfp4",
            "axes": {"*": ["mxfp4", "nvfp4", "ue5m3"], "forward.rounding": ["nearest", "stochastic"]}
            | {"*.g.rounding": ["nearest", "stochastic"]},
        }
    ).recipes()
)


@pytest.fixture
def trained(row):
    """trained({TASK:PRESET: losses of RECIPES, None for a diverged one}) -> rows of two seeds."""

    def build(presets: dict[str, list[float | None]]) -> pd.DataFrame:
        rows = []
        for name, losses in presets.items():
            task, preset = name.split(":")
            where = {"task": task, "preset": preset, "dataset_digest": f"of {task}"}
            pairs = zip(["bf16", *RECIPES], [1.0, *losses], strict=True)
            rows += [row(r, s, loss, **where) for (r, loss), s in product(list(pairs), (0, 1))]
        return add_gap(pd.DataFrame(rows))

    return build


RISING = list(1 + 0.01 * np.arange(1, 13))
PLAIN_UE5M3 = [i for i, r in enumerate(RECIPES) if r.wgrad.g.label().startswith("ue5m3")]


def test_orders_are_counted_over_pairs_that_the_larger_one_tells_apart(trained):
    swapped = [RISING[1], RISING[0], *RISING[2:]]
    found = preset_agreement(trained({"language:1M": RISING, "language:0.4M": swapped}), LADDER)
    [one] = found.lines
    assert (one.preset, one.against, one.recipes, one.pairs) == ("language:0.4M", "language:1M", 12, 66)
    assert one.agree == pytest.approx(65 / 66, abs=1e-4)
    assert one.spearman == pytest.approx(1 - 6 * 2 / (12 * 143), abs=1e-4)
    assert (one.dataset_digest, one.measured, one.unseen) == ("of language", "2026-01-02", None)
    assert -1 < one.spearman_low < one.spearman < one.spearman_high <= 1
    close = [1.0101, 1.0102, *RISING[2:]]
    [one] = preset_agreement(trained({"language:1M": close, "language:0.4M": swapped}), LADDER).lines
    assert (one.pairs, one.agree) == (65, 1.0)


def test_scales_that_one_task_alone_finds_bad_are_named(trained):
    [*plain, last, other] = PLAIN_UE5M3
    good = RISING[::-1]
    bad = [loss + 0.5 * (i in plain) for i, loss in enumerate(good)]
    frame = trained({"language:0.4M": bad, "vision:small": good})
    left_out = [RECIPES[i].config_id for i in (last, other)]
    [one] = preset_agreement(frame[~frame["config_id"].isin(left_out)], LADDER).lines
    assert one.preset == "vision:small"
    assert (one.unseen.scales, one.unseen.agree) == ("ue5m3 scales without a tensor scale", 1.0)
    assert one.unseen.gap > 0.4 > 0.2 > one.unseen.gap_of_others
    [whole] = preset_agreement(frame, LADDER).lines  # four of twelve are too many to set apart
    assert whole.agree < 1
    assert whole.unseen is None


def test_rows_of_a_preset_before_its_newest_revision_do_not_count(trained):
    now, before = ({"language:0.4M": RISING, "vision:small": of} for of in (RISING, RISING[::-1]))
    rows = [trained(of).assign(rev_task=rev) for rev, of in ((2, now), (1, before))]
    found = preset_agreement(pd.concat([rows[0], rows[1].query("task == 'vision'")], ignore_index=True), LADDER)
    assert found == preset_agreement(rows[0], LADDER)
    assert [line.agree for line in found.lines] == [1.0]


def test_recipes_are_compared_within_one_setting_of_either_preset(trained):
    """Gaps of two devices, or of two revisions of the engine, are not put into one order."""
    rows = trained({"language:1M": RISING, "language:0.4M": RISING})
    small, last = rows["preset"].eq("0.4M"), rows["config_id"].eq(RECIPES[-1].config_id)
    other = rows[small & (last | rows["is_baseline"])].assign(rev_engine=2)
    other.loc[~other["is_baseline"], "gap"] = 0.0
    found = preset_agreement(pd.concat([rows[~(small & last)], other], ignore_index=True), LADDER)
    assert [(one.recipes, one.pairs, one.agree) for one in found.lines] == [(11, 55, 1.0)]
    assert preset_agreement(pd.concat([rows, other], ignore_index=True), LADDER) == preset_agreement(rows, LADDER)


def test_recipes_that_quantize_one_pass_alone_are_not_held_against_whole_ones(trained):
    """They rank before all others in any task, so that their pairs with these say nothing of the task."""
    rows = trained({"language:1M": RISING, "language:0.4M": RISING[::-1]})
    expected = preset_agreement(rows, LADDER)
    bf16 = Recipe.named("bf16")
    half = [msgspec.structs.replace(r.canonical(), fprop=bf16.fprop) for r in RECIPES[::3]]
    half += [msgspec.structs.replace(r.canonical(), dgrad=bf16.dgrad, wgrad=bf16.wgrad) for r in RECIPES[::3]]
    more = []
    for part in (rows[rows["preset"].eq(preset)] for preset in ("1M", "0.4M")):
        for i, recipe in enumerate(half):
            facts = part[part["config_id"].eq(RECIPES[0].config_id)].assign(**recipe_columns(recipe))
            more.append(facts.assign(gap=0.001 * i))
    assert preset_agreement(pd.concat([rows, *more], ignore_index=True), LADDER) == expected


def test_a_recipe_that_diverged_and_too_few_recipes_are_left_out(trained):
    lost = [None, *RISING[1:]]
    [one] = preset_agreement(trained({"language:0.4M": lost, "vision:small": RISING}), LADDER).lines
    assert one.recipes == 11
    few = [None, None, None, *RISING[3:]]
    assert preset_agreement(trained({"language:0.4M": few, "vision:small": RISING}), LADDER).lines == []


def test_presets_without_a_pair_that_the_larger_one_tells_apart_have_no_line(trained):
    """Nothing could be said of their order, and a share of no pairs could not be read again."""
    alike = [1.01 + 1e-6 * i for i in range(12)]
    frame = trained({"language:1M": alike, "language:0.4M": RISING, "vision:small": RISING})
    [one] = preset_agreement(frame, LADDER).lines
    assert (one.preset, one.against) == ("vision:small", "language:0.4M")


@pytest.mark.heavy
def test_the_shipped_file_is_what_the_store_of_the_study_says():
    store = Path(__file__).parents[2] / "docs" / "study" / "store"
    shipped = [line for line in agreements().lines if not line.preset.endswith(":quickstart")]
    written = "python -m fp4dse.results.preset_agreement docs/study/store runs/quickstart/store"
    assert preset_agreement(open_store(store).runs()).lines == shipped, written
