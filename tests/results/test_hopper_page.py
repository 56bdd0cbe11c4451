"""What the page of the language task says of FP4 storage with FP8 products is what the rows beside it have."""

import re
from pathlib import Path

import pytest

from fp4dse.results import open_store

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "language.md").read_text(encoding="utf-8").replace("\n", " ")


@pytest.fixture(scope="module")
def recipes():
    return open_store(DOCS / "study" / "hopper-store").sql("FROM recipes").query("not is_baseline")


def percents(line, column):
    """As the page writes a gap: `+0.32 % (+0.27 to +0.37)`."""
    mean, low, high = (100 * line[f"{column}{limit}"] for limit in ("", "_low", "_high"))
    return f"{mean:+.2f} % ({low:+.2f} to {high:+.2f})"


def test_a_dense_decoder_loses_what_the_page_says(recipes):
    dense = recipes[recipes["preset"].eq("1M")]
    assert len(dense) == 3
    assert dense["pairs"].eq(8).all()
    assert (dense[["gap_low", "gap_high"]].abs() < 0.0061).all(axis=None)
    wanted = {(percents(line, "gap"), percents(line, "gap_bf16")) for _, line in dense.iterrows()}
    rows = re.findall(r"\| (?:MXFP4|FP8)[^|]*\|[^|]*\| ([^|]*) \| ([^|]*) \|", PAGE)
    assert set(rows) == wanted


def test_experts_lose_what_the_page_says(recipes):
    (line,) = (line for _, line in recipes[recipes["preset"].eq("moe8-1M")].iterrows())
    assert "converted" in line["label"]
    assert "mxfp4" in line["label"]
    assert line["pairs"] == 8
    text = PAGE.replace("**", "")
    assert f"the second recipe costs {percents(line, 'gap')}, evaluated in BF16 {percents(line, 'gap_bf16')}" in text
