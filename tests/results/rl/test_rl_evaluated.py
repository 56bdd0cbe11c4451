"""What the page of reinforcement learning says of policies that are trained in one format and answer in another is what
the stores have."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp, ttest_ind

from fp4dse.results import open_store
from fp4dse.results.stats.estimates.intervals import holm
from tests.results.rl.rl_page import DOCS, EQUAL, FRESH, section, short, signed, table, told

TITLE = "What does a policy that BF16 trained lose in MXFP4?"


@pytest.fixture(scope="module")
def of_bf16():
    """The policies that BF16 trained, not trained further: a row each."""
    runs = open_store(DOCS / "study" / "rl-evaluated-store").runs()
    assert set(zip(runs["preset"], runs["lr"], runs["seed"], strict=True)) == {("walks-small", EQUAL, 0)}
    own = runs[runs["trains"].eq("none")]
    assert len(own) == own["start_digest"].nunique() == len(FRESH)
    return own


@pytest.fixture(scope="module")
def lanes():
    """A function of a recipe's label: its rows of the store of the four arms, by seed."""
    runs = open_store(DOCS / "study" / "rl-arms-store").runs()
    return lambda label: runs[runs["recipe_label"].eq(label)].set_index("seed").loc[list(FRESH)]


def lost(rows):
    """Points by which each policy is better in MXFP4 than in BF16."""
    return 100 * (rows["val_loss_bf16"] - rows["val_loss"]).to_numpy()


def welch(first, second):
    """Of the means of two groups: difference, both limits and p."""
    found = ttest_ind(first, second, equal_var=False)
    return first.mean() - second.mean(), *found.confidence_interval(0.95), found.pvalue


def test_trained_in_by_evaluated_in_is_what_the_stores_have(page, of_bf16, lanes):
    bf16, mxfp4 = lanes("bf16"), lanes("mxfp4-rceil")
    rounded, other = lost(of_bf16), lost(mxfp4)
    learned = told(100 * (bf16["val_loss"] - mxfp4["val_loss_bf16"]))
    in_mxfp4 = welch(100 * (bf16["val_loss"] - mxfp4["val_loss"]), rounded)
    four = [told(rounded), told(other), learned, in_mxfp4]
    alone = [of[3] for of in four]
    p = [f"{short(own)}, {short(of_four)}" for own, of_four in zip(alone, holm(alone), strict=True)]
    means = [100 * (1 - of.mean()) for of in (bf16["val_loss"], of_bf16["val_loss"])]
    means += [100 * (1 - mxfp4[name].mean()) for name in ("val_loss_bf16", "val_loss")]
    hangs = welch(other, rounded)
    rows = [
        [f"{means[0]:.1f}", f"{means[1]:.1f}", signed(*four[0]), p[0]],
        [f"{means[2]:.1f}", f"{means[3]:.1f}", signed(*four[1]), p[1]],
        [signed(*learned), signed(*in_mxfp4), signed(*hangs), ""],
        [p[2], p[3], short(hangs[3]), ""],
    ]
    assert [cells[1:] for cells in table(page, "| trained in | evaluated in BF16 |")] == rows
    assert max(abs(x) for x in hangs[1:3]) < 0.5
    text = section(page, TITLE)
    assert text.startswith(f"**{-four[0][0]:.2f} points; one that MXFP4 trained loses {-four[1][0]:.2f}.")
    said = "So {:.2f} is of each policy on the same problems in both formats, and {:.2f} and {:.2f} are not of pairs"
    assert said.format(four[0][0], in_mxfp4[0], hangs[0]) in text
    assert f"the two losses differ by less than half a point (the {hangs[0]:.2f})" in text
    paired = 100 * (bf16["val_loss"] - mxfp4["val_loss"]).mean()
    direct = welch(100 * (1 - mxfp4["val_loss"]), 100 * (1 - of_bf16["val_loss"]).to_numpy())
    assert f"paired by seed ({paired:.2f}), less that {four[0][0]:.2f}" in text
    assert f"are {direct[0]:.2f} apart ({direct[1]:.2f} to {direct[2]:+.2f})" in text


def test_whether_rounding_at_the_end_is_told(page, of_bf16, lanes):
    text, both = section(page, TITLE), [lost(of_bf16), lost(lanes("mxfp4-rceil"))]
    assert "(t-tests {} and {})".format(*(short(ttest_1samp(of, 0).pvalue) for of in both)) in text
    pooled = np.concatenate(both)
    mean, low, high, p = told(pooled)
    assert f"over all {len(pooled)} policies, taken as independent, it is {mean:.2f}" in text
    assert f"is {mean:.2f} ({low:.2f} to {high:.2f}, p = {short(p)})" in text
    first, second = (-of.mean() for of in both)
    at_the_top, [low, high] = section(page, "What was found"), sorted(-told(both[1])[1:3])
    assert f"takes {second:.2f} of the 1.37 points ({low:.2f} to {high:.2f}), and [{first:.2f} from" in at_the_top
    alone = "significant alone (p = {} and {}), not after correction".format(*(short(told(of)[3]) for of in both[::-1]))
    assert alone in at_the_top
    worse, better = ([int((sign * of > 0).sum()) for of in both] for sign in (-1, 1))
    assert "{} and {} policies of 32 are worse for it, {} and {} better".format(*worse, *better) in text


def test_policies_were_asked_the_problems_of_seed_0(page, of_bf16, lanes):
    """So they do not solve what the lanes of their seeds solve, and which is which is not known."""
    here, there = (100 * (1 - of) for of in (of_bf16["val_loss_bf16"], lanes("bf16")["val_loss"]))
    said = f"they solve {here.mean():.2f} % of these, where the lanes of their seeds solve {there.mean():.2f} %"
    assert said in section(page, TITLE)
    assert sorted(here) != sorted(there)
