import pandas as pd
import pytest

from fp4dse.dse import Space
from fp4dse.results.bench.generated import KNOBS, generated
from fp4dse.results.stats.factors import AXES, _carriers, _determined, factors, varied_by
from fp4dse.results.stats.paired import SETTING
from fp4dse.results.store.schema import ROW, recipe_columns


def found(**axes) -> dict:
    data = {"base": "nvfp4", "axes": {name.replace("__", "*").replace("_of_", "."): v for name, v in axes.items()}}
    return by_name(data)


def by_name(data: dict) -> dict:
    recipes = pd.DataFrame(
        [recipe_columns(recipe) for recipe in Space.from_dict({"summary": "a test", **data}).recipes()]
    )
    return {factor.name: factor for factor in factors(recipes)}


def test_every_axis_is_a_column_of_a_row():
    assert set(AXES) <= set(ROW.names)


def test_the_knobs_of_a_sweep_are_found_under_the_names_of_its_axes():
    axes = {"*.g.rounding": ["nearest", "stochastic"], "wgrad.rotation": ["none", "rht16", "rht32"]}
    knobs = by_name({"base": "nvfp4", "axes": axes})
    assert {name: factor.levels for name, factor in knobs.items()} == {
        "*.g.rounding": ("nearest", "stochastic"),
        "wgrad.rotation": ("none", "rht16", "rht32"),
    }
    assert [factor.levels[factor.reference] for factor in knobs.values()] == ["nearest", "none"]


def test_a_factor_of_many_slots_is_named_by_groups_of_them():
    knobs = by_name({"base": "nvfp4", "axes": {"*": ["nvfp4", "ue5m3-t448"], "wgrad.x": ["nvfp4"]}})
    assert set(knobs) == {"forward+dgrad+wgrad.g.scale"}


def test_columns_that_change_together_are_one_factor_and_what_follows_is_carried():
    knobs = by_name(
        {"base": "nvfp4", "axes": {"*": ["mxfp4", "mxfp4-rceil", "ue5m3"], "dgrad.rotation": ["none", "rht16"]}}
    )
    assert set(knobs) == {"*.scale", "dgrad.rotation"}
    assert {"fprop_x_block", "wgrad_g_block"} <= set(knobs["*.scale"].carries)
    assert len(knobs["*.scale"].columns) == 6


def test_a_column_that_follows_from_two_factors_is_carried_by_one():
    """The range of stochastic rounding, which formats without a tensor scale do not have."""
    axes = {
        "*": ["mxfp4", "nvfp4", "ue5m3"],
        "*.g": [{"rounding": "nearest"}, {"rounding": "stochastic", "range": "16/17"}],
    }
    knobs = by_name({"base": "nvfp4", "axes": axes})
    assert "*.g.range" not in knobs
    assert any("dgrad_g_range" in factor.columns + factor.carries for factor in knobs.values())


def test_a_fractional_design_keeps_its_factors():
    knobs = ("*.g.rounding", "forward.rounding", "dgrad.rotation")
    runs = generated(knobs, seeds=1)
    levels = {name: runs[KNOBS[name][0][0]].eq(KNOBS[name][1][1]) for name in knobs}
    half = runs[(levels[knobs[0]] ^ levels[knobs[1]] ^ levels[knobs[2]]) & ~runs["is_baseline"]]
    assert len(half) == 4
    assert {factor.name for factor in factors(half)} == set(knobs)


@pytest.mark.parametrize("count", [1, 40])
def test_every_knob_of_generated_runs_is_recovered(count):
    runs = generated(seeds=1, recipes=4000 if count > 1 else 1)
    runs = runs[~runs["is_baseline"]]
    assert {f.name for f in factors(runs)} == (set(KNOBS) if count > 1 else set())


def test_codes_point_at_levels():
    runs = generated(("*.scale", "*.tensor_scale"), seeds=1)
    for factor in factors(runs[~runs["is_baseline"]]):
        values = runs[~runs["is_baseline"]][factor.columns[0]]
        for code, value in zip(factor.codes, values, strict=True):
            assert factor.levels[code] == (
                "none" if pd.isna(value) else f"{value:g}" if factor.name == "*.tensor_scale" else value
            )


def test_the_factors_of_many_settings_are_found_once():
    parts = [generated(seeds=1, recipes=20 + i).assign(rev_engine=i) for i in range(5)]
    runs = pd.concat(parts, ignore_index=True)
    varied_by(runs)
    before = [of.cache_info().misses for of in (_carriers, _determined)]
    varied_by(runs)
    assert [of.cache_info().misses for of in (_carriers, _determined)] == before


def test_no_factor_tells_how_old_a_row_is():
    """Rows from before a column was added are null there: they were trained without what it says."""
    axes = {"training.noise": ["none", "qerl"], "fprop.rotation": ["none", "rht16"]}
    recipes = Space.from_dict({"summary": "a test", "base": "nvfp4", "axes": axes}).recipes()
    setting = dict.fromkeys(SETTING, "one")
    rows = pd.DataFrame([{**setting, **recipe_columns(recipe)} for recipe in recipes])
    (whole,) = varied_by(rows).values()
    older = rows["noise"].eq("none") & rows["fprop_rotation"].eq("none")
    for lacking in (["noise"], ["distill", "trains"], ["noise", "distill", "trains"]):
        (found,) = varied_by(rows.assign(**{name: rows[name].mask(older) for name in lacking})).values()
        assert [factor.name for factor in found.factors] == [factor.name for factor in whole.factors]
        assert all((a.codes == b.codes).all() for a, b in zip(found.factors, whole.factors, strict=True))
        (found,) = varied_by(rows.drop(columns=lacking).assign(**dict.fromkeys(lacking))).values()
        left = [factor.name for factor in whole.factors if not {*factor.columns} & {*lacking}]
        assert [factor.name for factor in found.factors] == left
