"""What is fixed holds in every recipe, and an axis that another one writes over is named."""

import pytest

from fp4dse.dse import SLOTS, ConfigError, Space

WHOLE, SLOT = ["mxfp4", "nvfp4"], ["nvfp4", "mxfp4"]


def says(axes: dict, **more) -> list[str]:
    return Space.from_dict({"axes": axes, **more}).overridden()


def test_an_axis_of_a_slot_below_one_of_all_slots_makes_hybrids_and_is_named():
    [said] = says({"*": WHOLE, "wgrad.x": SLOT})
    assert said.startswith('axis "*" varies nothing in wgrad.x: "wgrad.x" below it sets that anew')
    assert 'vary its fields: "wgrad.x.block"' in said


@pytest.mark.parametrize(
    ("upper", "lower"),
    [
        ({"wgrad.x": SLOT}, {"*": WHOLE}),
        ({"*.g.rounding": ["nearest", "stochastic"]}, {"*": WHOLE}),
        ({"wgrad.rotation": ["none", "rht16"]}, {"recipe": ["nvfp4", "mxfp4"]}),
        ({"*.scale.zero": ["min", "one"]}, {"*.scale": ["e4m3", "ue5m3"]}),
        ({"*.g.rounding": ["nearest", "stochastic"]}, {"*.g": [{"rounding": "nearest", "range": "16/17"}]}),
    ],
)
def test_an_axis_that_does_nothing_is_told_to_stand_below(upper, lower):
    [said] = says({**upper, **lower})
    assert "has no effect" in said
    assert not any("has no effect" in text for text in says({**lower, **upper}))


@pytest.mark.parametrize(
    "axes",
    [
        {"*": WHOLE, "*.g.rounding": ["nearest", "stochastic"], "wgrad.x.block": [16, 32], "wgrad.rotation": ["none"]},
        {"*.scale": ["e4m3"], "*.block": [16, 32], "*.g": [{"rounding": "nearest"}]},
        {"*": WHOLE, "wgrad.x": {"values": SLOT, "when": {"*.block": 16}}},
    ],
)
def test_refinements_other_places_and_conditions_are_what_order_is_for(axes):
    assert says(axes) == []


def test_joined_spaces_are_looked_at_too():
    assert len(says({"*": WHOLE}, join=[{"axes": {"*": WHOLE, "wgrad.x": SLOT}}])) == 1


def test_an_axis_cannot_vary_what_is_fixed():
    for axis in ("*.rounding", "*.g.rounding", "wgrad.g.rounding"):
        with pytest.raises(ConfigError, match=r'not fixed \(fixed."\*.rounding" is\)') as caught:
            Space.from_dict({"fixed": {"*.rounding": "nearest"}, "axes": {axis: ["nearest", "stochastic"]}}, "t.toml")
        assert caught.value.where == f"t.toml: axes.{axis}"
    with pytest.raises(ConfigError, match="not fixed"):
        Space.from_dict({"fixed": {"*.g": {"rounding": "nearest"}}, "axes": {"*.g.rounding": ["stochastic"]}})


@pytest.mark.parametrize("axes", [{"*": WHOLE}, {"recipe": ["nvfp4-sr", "mxfp4"]}, {"fprop.x": SLOT, "*.g": SLOT}])
def test_what_is_fixed_holds_under_whole_quantizers_and_recipes(axes):
    space = Space.from_dict({"fixed": {"*.block": 64}, "axes": axes})
    recipes = list(space.recipes())
    assert recipes
    assert all(recipe.slot(slot).block == 64 for recipe in recipes for slot in SLOTS)


def test_a_field_of_what_is_fixed_may_be_refined():
    space = Space.from_dict({"fixed": {"*": "mxfp4"}, "axes": {"*.g.rounding": ["nearest", "stochastic"]}})
    assert len(list(space.recipes())) == 2
