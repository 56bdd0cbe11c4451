"""What the findings say of HiFloat4 beside MXFP4, with rotated and stochastic gradients, is what the rows have."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_1samp

STUDY = Path(__file__).parents[2] / "docs" / "study"
PAGE = " ".join((STUDY / "findings.md").read_text(encoding="utf-8").split()).replace("−", "-")
SR, BOTH, ROTATED = ", gradients SR", ", gradients SR, backward rht64", ", backward rht64"
T = 4.303
"""Of two degrees of freedom, at 95 %."""


def losses(preset, column="val_loss"):
    """Logarithms of losses by seed and recipe; of one recipe's lanes on two kinds of card the mean, which is either."""
    columns = ["recipe_label", "seed", "rev_engine", "config_id", column]
    read = [("task", "==", "language"), ("preset", "==", preset), ("seed", "in", [0, 1, 2])]
    rows = pd.read_parquet(STUDY / "store" / "parts", columns=columns, filters=read)
    rows = rows[rows["rev_engine"].eq(7 if preset == "0.4M" else 8)]
    assert rows.groupby(["config_id", "seed"], observed=True)[column].nunique().eq(1).all()
    return np.log(rows.pivot_table(index="seed", columns="recipe_label", values=column, observed=True))


def change(loss, after, before):
    """Mean, ends of the t interval, each in percent, and p."""
    of_seeds = (loss[after] - loss[before]).to_numpy()
    assert len(of_seeds) == 3
    assert np.isfinite(of_seeds).all()
    half = T * of_seeds.std(ddof=1) / np.sqrt(3)
    mean, *ends = (float(100 * np.expm1(of_seeds.mean() + side)) for side in (0, -half, half))
    return mean, *ends, float(ttest_1samp(of_seeds, 0).pvalue)


def size(loss, after, before):
    """As the page writes what is gained: `0.26 % (0.13 to 0.39`, `p = .013`."""
    mean, low, high, p = change(loss, after, before)
    return f"{-mean:.2f} % ({-high:.2f} to {-low:.2f}", f"p = {p:.3f}".replace("0.", ".")


def test_as_the_question_asks_hifloat4_is_ahead_of_both():
    at_1m, in_bf16, at_04m = losses("1M"), losses("1M", "val_loss_bf16"), losses("0.4M")
    (ceil, p_ceil), (floor, p_floor) = (size(at_1m, f"hif4{BOTH}", f"{of}{BOTH}") for of in ("mxfp4-rceil", "mxfp4"))
    assert f"by {ceil}, {p_ceil}) where MXFP4's scales do not truncate, by {floor}, {p_floor}) where" in PAGE
    small = [size(at_04m, f"hif4{BOTH}", f"{of}{BOTH}") for of in ("mxfp4-rceil", "mxfp4")]
    values = [text.split(" ")[0] for text, _ in small]
    assert f"at 0.4M by {values[0]} and {values[1]} %." in PAGE
    assert f"0.4M says so, too ({values[0]} %, {small[0][1]}; {values[1]} %, {small[1][1]})" in PAGE
    evaluated = [-change(in_bf16, f"hif4{BOTH}", f"{of}{BOTH}")[0] for of in ("mxfp4-rceil", "mxfp4")]
    assert f"evaluated in BF16 by {evaluated[0]:.2f} and {evaluated[1]:.2f} %" in PAGE
    assert max(change(in_bf16, f"hif4{BOTH}", f"{of}{BOTH}")[2] for of in ("mxfp4-rceil", "mxfp4")) < 0
    gaps = [f"{change(at_1m, f'{of}{BOTH}', 'bf16')[0]:.2f}" for of in ("hif4", "mxfp4-rceil", "mxfp4")]
    assert "The three lose {}, {} and {} % of BF16's loss".format(*gaps) in PAGE


def test_the_table_of_pairs_has_them():
    table = (STUDY / "findings.md").read_text().partition("<!-- pairs -->")[2].partition("<!-- end -->")[0]
    for of, end in (("mxfp4", "floor"), ("mxfp4-rceil", "ceil")):
        cells = [
            "{:+.2f} % ({:+.2f} to {:+.2f} %)".format(*change(losses("1M", column), f"hif4{BOTH}", f"{of}{BOTH}"))
            for column in ("val_loss", "val_loss_bf16")
        ]
        assert f"| HiFloat4 for MXFP4 ({end}) | {of}{BOTH} | {cells[0]} | {cells[1]} |" in table


def test_what_a_rotation_adds_to_stochastic_gradients():
    at_1m = losses("1M")
    floor, ours = (size(at_1m, f"{of}{BOTH}", f"{of}{SR}")[0] for of in ("mxfp4", "hif4"))
    ceil = "{:+.2f} %, {:+.2f} to {:+.2f}".format(*change(at_1m, f"mxfp4-rceil{BOTH}", f"mxfp4-rceil{SR}"))
    assert f"where MXFP4's scales are floored 1M sees {floor.split(' (')[0]}." in PAGE
    assert f"is {floor}) where MXFP4's scales are floored, {ours}) in HiFloat4, and nothing significant" in PAGE
    assert f"and nothing significant where they do not truncate ({ceil})" in PAGE
    lead = {of: at_1m[f"{of}{BOTH}"] - at_1m[f"{of}{SR}"] for of in ("hif4", "mxfp4", "mxfp4-rceil")}
    less, more = (size(pd.DataFrame(lead), *pair)[0] for pair in (("mxfp4", "hif4"), ("hif4", "mxfp4-rceil")))
    assert f"floored scales shrinks by {less}), and that on the others grows by {more}: not significant)" in PAGE
    cost = "{:.2f} % ({:.2f} to {:.2f})".format(*change(at_1m, f"hif4{BOTH}", f"hif4{ROTATED}"))
    assert f"stochastic gradients on top of the rotation cost {cost}" in PAGE


@pytest.mark.parametrize(("recipe", "text"), [(f"hif4{ROTATED}", "0.20"), (f"mxfp4-rceil{BOTH}", "0.51")])
def test_as_the_source_has_it_each_loses_what_the_page_says(recipe, text):
    assert f"{change(losses('1M'), recipe, 'bf16')[0]:.2f}" == text
    assert f"loses {text} % at 1M and" in PAGE or f"MXFP4 {text} %, a difference" in PAGE


def test_as_the_source_has_it_hifloat4_is_ahead():
    mean, low, high, p = change(losses("1M"), f"hif4{ROTATED}", f"mxfp4-rceil{BOTH}")
    said = f"a difference of {mean:+.2f} % ({low:+.2f} to {high:+.2f}, p = {p:.3f}".replace("p = 0.", "p = .")
    assert said in PAGE
