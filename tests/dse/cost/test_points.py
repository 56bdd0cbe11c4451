"""The paper's technique count, and stored bits."""

import pytest

from fp4dse.dse import Quantizer, Recipe, points
from fp4dse.dse.cost import bits_per_element

POINTS = {
    "bf16": 0,
    "mxfp4": 1,  # the floor
    "nvfp4": 2,  # tensor scaling
    "nvfp4-sr": 3,  # + stochastic rounding
    "nvfp4-sr-rht": 4,  # + rotation
    "ue5m3-sr": 3,
    "mxfp4-sr-rht": 3,
    "quartet2": 5,  # tensor scaling, rotation, four-over-six, corrected scales
    "wang-dge-occ": 3,  # a relaxation, outliers
    "tetrajet-qema": 3,  # stochastic rounding, an average
    "hif4-ascend": 3,  # rotation, exponents of parts of a block
}


@pytest.mark.parametrize(("name", "count"), POINTS.items())
def test_points_count_the_techniques_of_a_recipe_on_a_floor_of_one(name, count):
    assert points(Recipe.named(name)) == count


def test_untouched_operands_cost_no_points():
    assert points(Recipe.uniform(Quantizer.named("none"))) == 0


def test_bits_are_the_mean_over_the_six_slots():
    assert bits_per_element(Recipe.named("mxfp4")) == 4.25
    assert bits_per_element(Recipe.named("bf16")) == 16
