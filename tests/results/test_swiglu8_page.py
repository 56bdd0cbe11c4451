"""What docs/tasks.md says of SwiGLU's input in MXFP8 is what its rows say."""

import re
from pathlib import Path

import numpy as np
import pytest

from fp4dse.results import open_store
from fp4dse.results.stats.estimates.intervals import mean_interval

DOCS = Path(__file__).parents[2] / "docs"
PLAIN, OPTION = "1M+bf16", "1M+bf16+swiglu8"
RECIPES = ("bf16", "mxfp4", "hopper-moe-fp4")
LINES = {
    "loss with `+swiglu8` over that without": lambda recipe: ((OPTION, recipe), (PLAIN, recipe)),
    "gap without": lambda recipe: ((PLAIN, recipe), (PLAIN, "bf16")),
    "gap with, against BF16 with": lambda recipe: ((OPTION, recipe), (OPTION, "bf16")),
    "with, against BF16 without": lambda recipe: ((OPTION, recipe), (PLAIN, "bf16")),
}
"""Line of the table -> of a recipe the columns whose losses are divided."""


@pytest.mark.parametrize("line", LINES)
def test_the_page_has_the_numbers_of_the_rows(line):
    """Percent of geometric means over eight seeds, with as many digits as the page has."""
    runs = open_store(DOCS / "study" / "swiglu8-store").runs()
    runs["of"] = runs["recipe_label"].where(runs["recipe_label"].isin(RECIPES), "hopper-moe-fp4")
    logs = np.log(runs.pivot_table(index="seed", columns=["preset", "of"], values="val_loss"))
    assert len(logs) == 8
    [row] = re.findall(rf"^\| {re.escape(line)} \|(.*)\|$", (DOCS / "tasks.md").read_text(), flags=re.MULTILINE)
    for recipe, cell in zip(RECIPES, row.split("|"), strict=True):
        above, below = LINES[line](recipe)
        if recipe == "bf16" and "over that" not in line:
            assert not cell.strip()
            continue
        found = mean_interval((logs[above] - logs[below]).to_numpy()[None]).iloc[0]
        digits = len(cell.split(" (")[0].partition(".")[2])
        mean, low, high = (f"{100 * np.expm1(found[name]):+.{digits}f}" for name in ("mean", "low", "high"))
        assert cell.strip().replace("−", "-") == f"{mean} ({low} to {high} %)"
