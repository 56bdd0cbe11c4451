"""What may be said of a technique: matched pairs decide, and only where both levels were tried with the same."""

import pandas as pd
import pytest

from fp4dse.dse import Space
from fp4dse.results import marginal
from fp4dse.results.report import read_findings
from fp4dse.results.report.technique_findings import everywhere, helps, standing

PAIRS = {"difference": -0.1, "low": -0.2, "high": -0.05, "q": 0.01, "helps": 1.0, "untried": ""}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, "helps"),
        ({"difference": 0.1, "low": 0.05, "high": 0.2, "helps": 0.0}, "harms"),
        ({"q": 0.06}, ""),
        ({"q": float("nan")}, ""),
        ({"helps": 0.7}, "depends"),
        ({"untried": "*.tensor_scale = 448"}, "partly"),
    ],
)
def test_a_technique_helps_where_chance_and_company_are_ruled_out(changed, expected):
    assert standing(pd.DataFrame([PAIRS | changed])).tolist() == [expected]


FORMATS = {"base": "nvfp4", "axes": {"*": ["mxfp4", "e4m3-b16", "nvfp4"], "wgrad.rotation": ["none", "rht16"]}}
"""E4M3 with and without a tensor scale, E8M0 without one alone."""


@pytest.fixture
def flagship(store, row):
    """E4M3 is bad without a tensor scale and good with one: NVFP4 beats MXFP4."""
    effects = {"mxfp4": 0.3, "e4m3-b16": 1.2, "nvfp4": 0.2}
    recipes = list(Space.from_dict(FORMATS).recipes())
    assert len(recipes) == 6
    for task, turn in (("regression", -0.02), ("vision", 0.02)):
        rows = [row("bf16", seed, 0.5, task=task) for seed in range(3)]
        for number, recipe in enumerate(recipes):
            scaled = recipe.fprop.x.tensor_scale is not None
            name = "nvfp4" if scaled else "mxfp4" if "E8M0" in str(recipe.fprop.x.scale) else "e4m3-b16"
            gap = 1 + effects[name] + turn * bool(recipe.wgrad.rotation)
            luck = [0.001 * seed + 1e-5 * ((number * number + 2 * number * seed + seed) % 5) for seed in range(3)]
            rows += [row(recipe, seed, 0.5 * gap * (1 + of), task=task) for seed, of in enumerate(luck)]
        store.add(rows, task)
    return store


def test_an_effect_across_empty_cells_is_no_headline(flagship):
    lines = marginal(flagship.runs()).query("task == 'vision'").set_index(["factor", "level"])
    assert lines.loc[("*.scale", "e4m3"), "untried"] == "*.tensor_scale = 448"
    assert lines.loc[("*.tensor_scale", "448"), "untried"].startswith("*.scale = e8m0")
    assert lines.loc[("wgrad.rotation", "rht16"), "untried"] == ""
    found = read_findings(flagship)
    items = helps(found.settings[1])
    headlines = [item for item in items if "What helps" in item or "What harms" in item]
    assert headlines
    assert not any("scale" in item for item in headlines)
    assert any(item.startswith("<b>Tried in part only") and "*.scale = e4m3" in item for item in items)
    assert "scale" not in everywhere(found)


def test_what_helps_one_task_and_harms_the_other_is_no_headline(flagship):
    text = everywhere(read_findings(flagship))
    assert "No technique helps in every task" in text
    assert "<b>Helps in one task and harms in another</b>: <code>wgrad.rotation = rht16</code>" in text


def test_what_holds_in_every_task_stands_with_its_size_in_each(swept):
    text = everywhere(read_findings(swept))
    assert "<code>wgrad.rotation = rht16</code> instead of none helps</b> in every task" in text
    assert "<code>forward.rounding = stochastic</code> instead of nearest harms</b> in every task" in text
