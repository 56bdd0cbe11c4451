"""Stored bits of operands, and of what the backward pass needs."""

import msgspec
import pytest

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.cost import activation_bits, bits_per_element
from fp4dse.dse.estimator import RELAXATION_NAMES, Estimator, Through


def with_estimator(name: str, **through) -> Recipe:
    return msgspec.structs.replace(Recipe.named(name), estimator=Estimator(x=Through(**through)))


def test_bits_are_the_mean_over_the_six_slots():
    assert bits_per_element(Recipe.named("mxfp4")) == 4.25
    assert bits_per_element(Recipe.named("bf16")) == 16
    assert bits_per_element(Recipe.named("tseng-mxfp4")) == (2 * 16 + 4 * 4.25) / 6


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("bf16", 16),
        ("nvfp4", 4.5),
        ("nvidia-nvfp4", 4.5),
        ("mxfp4-tiles", 4 + 8 / 1024),
        ("tetrajet", 4.25),  # the forward's copy, which the backward pass re-quantizes
        ("tseng-mxfp4", 4.25),  # made in the forward pass, although that multiplies BF16
        ("zhou-mixed", 8),
        ("quartet", 4.25 + 1),  # and a bit of the mask
    ],
)
def test_kept_is_the_operand_of_the_weight_gradient(name, bits):
    assert activation_bits(Recipe.named(name)) == bits


@pytest.mark.parametrize("name", RELAXATION_NAMES)
def test_a_relaxation_keeps_nothing_a_bit_or_x(name):
    more = {"ste": 0, "clipped": 1, "trust": 1}.get(name, 16)
    assert activation_bits(with_estimator("mxfp4", element=RELAXATION_NAMES[name])) == 4.25 + more


@pytest.mark.parametrize(("scale", "more"), [("diagonal", 5 / 32), ("exact", 16), ("softmax", 16)])
def test_a_scale_gradient_keeps_the_place_of_the_maximum_or_x(scale, more):
    assert activation_bits(with_estimator("mxfp4", scale=scale)) == 4.25 + more


def test_the_rounding_of_a_scale_keeps_16_bits_a_block_where_it_counts():
    rounding = RELAXATION_NAMES["dge"]
    assert activation_bits(with_estimator("mxfp4", scale="exact", scale_rounding=rounding)) == 4.25 + 16 + 16 / 32
    assert activation_bits(with_estimator("mxfp4", scale_rounding=rounding)) == 4.25


def test_what_is_kept_in_bf16_anyway_is_not_kept_twice():
    recipe = with_estimator("mxfp4", element=RELAXATION_NAMES["dge"])
    wgrad = msgspec.structs.replace(recipe.wgrad, x=Quantizer(element="bf16"))
    assert activation_bits(msgspec.structs.replace(recipe, wgrad=wgrad)) == 16


def test_compensated_elements_keep_value_and_place():
    occ = msgspec.structs.replace(Quantizer.named("fp4-row"), outliers=Recipe.named("wang-dge-occ").fprop.x.outliers)
    assert activation_bits(Recipe.uniform(occ)) == pytest.approx(4 + 0.02 * 32)
