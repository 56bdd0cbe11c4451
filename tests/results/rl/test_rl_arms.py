"""What the page of reinforcement learning says of BF16 and MXFP4, in trainer and rollouts, is what the store has."""

import pytest
from scipy.stats import ttest_1samp

from fp4dse.results import open_store
from fp4dse.results.stats.estimates.intervals import holm
from tests.results.rl.rl_page import DOCS, EQUAL, FRESH, IN_ROLLOUTS, section, short, table, told

ARMS = {("BF16", "BF16"): "bf16", ("BF16", "MXFP4"): IN_ROLLOUTS}
ARMS |= {("MXFP4", "BF16"): "mxfp4-rceil, rollout bf16", ("MXFP4", "MXFP4"): "mxfp4-rceil"}
"""Trainer and rollouts -> the recipe."""


@pytest.fixture(scope="module")
def arms():
    """The store of the four arms."""
    return open_store(DOCS / "study" / "rl-arms-store")


@pytest.fixture(scope="module")
def points(arms):
    """A function of a column of losses: 100 times their negative, by seed and (trainer, rollouts)."""
    runs = arms.runs()
    assert set(runs["lr"]) == {EQUAL}
    assert len(runs) == 4 * len(FRESH)

    def of(column):
        found = -100 * runs.pivot(index="seed", columns="recipe_label", values=column)
        assert list(found.index) == list(FRESH)
        return found[list(ARMS.values())].set_axis(list(ARMS), axis=1)

    return of


def parts(found):
    """The effect of MXFP4 in the trainer, in rollouts, and how far the second hangs on the first, by seed."""
    under = {trainer: found[trainer, "MXFP4"] - found[trainer, "BF16"] for trainer in ("BF16", "MXFP4")}
    trainer = sum(found["MXFP4", rollouts] - found["BF16", rollouts] for rollouts in ("BF16", "MXFP4")) / 2
    return trainer, (under["BF16"] + under["MXFP4"]) / 2, under["MXFP4"] - under["BF16"], under["MXFP4"]


def limits(mean, low, high):
    return f"{mean:.2f} ({low:.2f} to {high:.2f})"


def test_the_table_of_the_four_arms_is_what_the_store_has(page, arms, points):
    found, in_bf16 = points("val_loss"), points("val_loss_bf16")
    numbers = arms.sql("FROM rollout_numbers WHERE number = 'mismatch_kl'").set_index("label")
    rows = table(page, "| trainer | rollouts | points against BF16")
    assert len(rows) == 3
    p = {"bootstrap": [], "t-test": []}
    for cells in rows:
        arm = tuple(cells[:2])
        apart, evaluated = (of[arm] - of["BF16", "BF16"] for of in (found, in_bf16))
        mean, low, high, chance = told(apart)
        p["bootstrap"].append(chance)
        p["t-test"].append(ttest_1samp(apart, 0).pvalue)
        assert cells[2].replace("*", "").replace("−", "-") == limits(mean, low, high)
        assert cells[3] == ("<.001" if chance < 0.0005 else f"{chance:.3f}".lstrip("0"))
        assert cells[4].replace("−", "-") == limits(*told(evaluated)[:3])
        assert cells[5] == f"{(apart < 0).sum()}, {(apart > 0).sum()}"
        kl = 1e4 * numbers.loc[ARMS[arm], ["value", "low", "high"]]
        assert cells[6] == (f"{kl.iloc[0]:.1f} ({kl.iloc[1]:.1f} to {kl.iloc[2]:.1f})" if kl["value"] > 0.01 else "0")
    assert max(holm(values).max() for values in p.values()) < 0.0025
    at_the_top = section(page, "What was found")
    rollouts, trainer = (told(found["BF16", "BF16"] - found[arm]) for arm in list(ARMS)[1:3])
    adjusted = holm(p["bootstrap"])
    both = told(found["BF16", "MXFP4"] - found["MXFP4", "MXFP4"])
    said = "{:.2f} points ({:.2f} to {:.2f}; 32 seeds), significant after correction (p = {}), which is {:.2f} less "
    said += "than in both ({:.2f} to {:.2f}; not significant)."
    assert said.format(*rollouts[:3], short(adjusted[0]), *both[:3]) in at_the_top.replace("−", "-")
    said = "{:.2f} on `walks-small`](#rollouts-or-trainer) ({:.2f} to {:.2f}), significant after correction (p = {})."
    assert said.format(*trainer[:3], short(adjusted[1])) in at_the_top


def test_what_trainer_and_rollouts_cost_is_what_the_store_has(page, points):
    text = section(page, "Rollouts or trainer?")
    found = points("val_loss")
    trainer, rollouts, hangs, under_fp4 = parts(found)
    apart = found["BF16", "MXFP4"] - found["MXFP4", "BF16"]
    mean, low, high, p = told(apart)
    t, without = ttest_1samp(apart, 0).pvalue, told(apart.drop(49))[0]
    said = (
        f"costs {mean:.2f} points more than in rollouts alone ({low:.2f} to {high:.2f}, p = .{1000 * p:03.0f}; t-test "
    )
    assert f"{said}.{1000 * t:03.0f}; without seed 49, of which below, {without:.2f})" in text
    mean, low, high, p = told(-trainer)
    assert p < 0.001
    assert f"In the trainer {mean:.2f} points ({low:.2f} to {high:.2f}, p < .001)" in text
    mean, low, high, p = told(-rollouts)
    assert f"in rollouts {mean:.2f} ({low:.2f} to {high:.2f}, p = {p:.2f})".replace("0.77", ".77") in text
    in_bf16 = [-told(part)[0] for part in parts(points("val_loss_bf16"))[:2]]
    assert "evaluated in BF16 {:.2f} and {:.2f}.".format(*in_bf16) in text
    mean, low, high, p = told(under_fp4)
    assert f"{mean:.2f} points *better* than BF16's ({low:.2f} to {high:.2f}, p = .{100 * p:.0f})" in text
    mean, low, high, p = told(hangs)
    t = ttest_1samp(hangs, 0).pvalue
    said = f"{mean:.2f} ({low:.2f} to {high:.2f}, p = .{1000 * p:03.0f}; t-test .{1000 * t:03.0f})"
    assert said in text
    loses = found["MXFP4", "BF16"] - found["BF16", "BF16"]
    assert loses.idxmin() == 49
    assert f"loses {-loses.min():.1f} points" in text
    assert f"without it it is {limits(*told(hangs.drop(49))[:3])}" in text
    mean, low, high, _ = told(-trainer.drop(49))
    assert f"{mean:.2f} without it ({low:.2f} to {high:.2f})" in text
    mean, low, high, p = told(found["BF16", "MXFP4"] - found["MXFP4", "MXFP4"])
    assert f"By {mean:.2f} points ({low:.2f} to {high:.2f}, p = .{1000 * p:03.0f})" in text


def test_lanes_of_another_card_are_the_same_to_the_bit(page, arms, store):
    own, other = (of.runs(["config_id", "lr", "seed", "preset", "val_loss", "val_loss_bf16"]) for of in (arms, store))
    both = own.merge(other[other["preset"].eq("walks-small")], on=["config_id", "lr", "seed"], suffixes=("", "_other"))
    assert len(both) == 64
    assert both["val_loss"].eq(both["val_loss_other"]).all()
    assert both["val_loss_bf16"].eq(both["val_loss_bf16_other"]).all()
    assert f"on an H200, lanes that an H100 had trained: {len(both)} of the four arms" in section(
        page, "What was found"
    )
