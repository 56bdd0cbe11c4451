"""Estimators as data: what has no effect, what shares a population, and which combinations make no sense."""

import msgspec
import pytest

from fp4dse.dse import ConfigError, Quantizer, Recipe, points
from fp4dse.dse.estimator import (
    DGE,
    RELAXATION_NAMES,
    SCALE_RELAXATION_NAMES,
    STE,
    Clipped,
    Estimator,
    PowerLaw,
    Sigmoid,
    Through,
)
from fp4dse.dse.outliers import OUTLIER_NAMES
from fp4dse.dse.reading.library import recipe_from_dict
from fp4dse.dse.record import plain
from fp4dse.dse.scale import E4M3, FP32
from tests.each import each

replace = msgspec.structs.replace
SOFT = Quantizer(scaling="softmax")


def estimating(q: Quantizer | str, **operands: Through) -> Recipe:
    """All six slots with the same quantizer; STE is the default of both operands."""
    q = Quantizer.named(q) if isinstance(q, str) else q
    return replace(Recipe.uniform(q), estimator=Estimator(**operands))


def broken(recipe: Recipe) -> set[str]:
    """Names of the rules that the recipe breaks and the straight-through one does not."""
    straight = replace(recipe, estimator=Estimator())
    return {rule for rule, _ in recipe.validate()} - {rule for rule, _ in straight.validate()}


@pytest.mark.parametrize("relaxation", [STE(), Clipped()])
def test_masking_what_is_one_inside_of_the_grid_changes_nothing(relaxation):
    masked, unmasked = (estimating("nvfp4", w=Through(relaxation, masked)) for masked in (True, False))
    assert masked.config_id == unmasked.config_id
    assert estimating("nvfp4", w=Through(DGE(), True)).config_id != estimating("nvfp4", w=Through(DGE())).config_id


ROUNDED = Through(scale="exact", scale_rounding=DGE())


def merged(q: Quantizer | str, one: Through, other: Through) -> bool:
    """Whether both are the same recipe, as estimators of w."""
    return estimating(q, w=one).config_id == estimating(q, w=other).config_id


@pytest.mark.parametrize("relaxation", SCALE_RELAXATION_NAMES.values())
def test_without_a_gradient_through_the_scale_its_rounding_does_not_count(relaxation):
    assert merged("nvfp4", Through(DGE(), scale_rounding=relaxation), Through(DGE()))
    assert merged("nvfp4", Through(scale="exact", scale_rounding=relaxation), Through(scale="exact")) == (
        relaxation == STE()
    )


def test_a_scale_that_is_not_rounded_has_no_derivative_of_rounding():
    assert merged(Quantizer(scale=FP32()), ROUNDED, Through(scale="exact"))


def test_a_power_of_two_is_never_beyond_its_format():
    straight, masked = Through(scale="exact"), replace(ROUNDED, masked=True)
    for name, same in {"mxfp4": True, "nvfp4": False}.items():
        assert merged(name, replace(ROUNDED, scale_rounding=Clipped()), straight) == same
        assert merged(name, masked, straight) == same
    assert not merged("mxfp4", ROUNDED, straight)


def test_masking_counts_for_what_is_not_one_inside_of_either_grid():
    for element in (STE(), DGE()):
        for rounding in (STE(), Clipped(), DGE()):
            through = Through(element, False, "exact", rounding)
            assert merged("nvfp4", through, replace(through, masked=True)) == (DGE() not in (element, rounding))


def test_the_label_tells_what_passes_through_the_scale():
    assert ROUNDED.label() == "ste exact scale gradient with dge rounding"
    assert Through(Sigmoid(), True, "diagonal", PowerLaw()).label() == (
        "sigmoid masked diagonal scale gradient with power-law rounding"
    )


def test_what_both_operands_have_is_told_once_for_the_forward_product():
    both, one = Through(Clipped()), Through()
    assert estimating("nvfp4", x=both, w=both).label() == "nvfp4, forward clipped"
    assert estimating("nvfp4", x=both, w=one).label() == "nvfp4, x clipped"
    assert estimating("nvfp4", x=both, w=ROUNDED).label() == "nvfp4, x clipped, w ste (scale exact dge)"


def test_a_trust_mask_is_about_elements():
    with pytest.raises(ConfigError, match="scale_rounding: found 'trust'; accepted: ste, clipped, dge, power-law"):
        recipe_from_dict(plain(estimating("nvfp4")) | {"estimator": {"w": {"scale_rounding": "trust"}}})


@pytest.mark.parametrize("other", ["ue5m3", Quantizer(scale=E4M3(convention="encode")), "mxfp4"])
def test_lanes_share_a_population_only_with_the_same_scales_if_an_estimator_depends_on_them(other):
    straight, rounded = Through(scale="exact"), ROUNDED
    e4m3 = Quantizer(scale=E4M3(), block=32 if other == "mxfp4" else 16)
    if other == "ue5m3":  # mxfp4's products have no factor
        assert estimating(e4m3, w=straight).signature() == estimating(other, w=straight).signature()
    assert estimating(e4m3, w=rounded).signature() != estimating(other, w=rounded).signature()


def test_nothing_passes_through_a_plain_operand():
    assert estimating("bf16", x=Through(DGE())).config_id == estimating("bf16").config_id


@pytest.mark.parametrize("other", [Through(DGE(k=5.000001)), Through(DGE(), True), Through(DGE(), scale="exact")])
def test_lanes_share_a_population_only_with_the_same_estimator_to_the_last_digit(other):
    assert estimating("nvfp4", w=Through(DGE())).signature() != estimating("nvfp4", w=other).signature()
    assert estimating("nvfp4", w=Through(DGE())).signature() == estimating("ue5m3", w=Through(DGE())).signature()


def test_lanes_share_a_population_only_with_the_same_grid_if_an_estimator_depends_on_it():
    e2m1, e1m2 = Quantizer(scale=E4M3()), Quantizer(element="e1m2", scale=E4M3())
    assert estimating(e2m1).signature() == estimating(e1m2).signature()
    through = Through(Sigmoid())
    assert estimating(e2m1, x=through).signature() != estimating(e1m2, x=through).signature()


@each("name", ["hif4", "if4", "mixfp4", "razer", "blockdialect"])
@each("relaxation", RELAXATION_NAMES.values())
def test_elements_of_several_grids_have_no_surrogate(name, relaxation):
    expected = set() if relaxation == STE() else {"estimator-needs-one-grid"}
    assert broken(estimating(name, x=Through(relaxation))) == expected


@each("name", ["nvfp4", "mxfp4-2d", "quest-mxfp4", "amxfp4", "mbs-mxfp4", "int4-sawb", "fp8"])
@each("relaxation", RELAXATION_NAMES.values())
def test_every_relaxation_goes_with_every_quantizer_of_one_grid(name, relaxation):
    assert broken(estimating(name, x=Through(relaxation), w=Through(relaxation, masked=True))) == set()


@pytest.mark.parametrize("scale", ["diagonal", "exact", "softmax-diagonal", "softmax"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("nvfp4", None),
        ("mxfp4-34", None),
        ("fp8", None),
        ("nvfp4-4over6-mse", "scale-gradient-needs-block-maximum"),
        ("quest-mxfp4", "scale-gradient-needs-block-maximum"),
        ("amxfp4", "scale-gradient-needs-block-maximum"),
    ],
)
def test_a_scale_gradient_needs_a_scale_that_follows_from_the_block_maximum(scale, name, rule):
    assert broken(estimating(name, w=Through(scale=scale))) == ({rule} if rule else set())


def test_a_soft_maximum_in_the_forward_pass_has_the_softmax_for_its_gradient():
    rules = {kind: broken(estimating(SOFT, w=Through(scale=kind))) for kind in ("exact", "diagonal", "softmax")}
    wrong = {"scale-gradient-needs-block-maximum"}
    assert rules == {"exact": wrong, "diagonal": wrong, "softmax": set()}
    assert broken(estimating(SOFT, w=Through(DGE(), scale="softmax-diagonal"))) == set()


@pytest.mark.parametrize("name", [name for name, outliers in OUTLIER_NAMES.items() if outliers])
def test_outliers_of_an_operand_exclude_its_estimator_alone(name):
    recipe = Recipe.named("nvfp4")
    x = replace(recipe.fprop.x, outliers=OUTLIER_NAMES[name])
    recipe = replace(recipe, fprop=replace(recipe.fprop, x=x))
    assert broken(replace(recipe, estimator=Estimator(x=Through(DGE())))) == {"estimator-with-outliers"}
    assert broken(replace(recipe, estimator=Estimator(w=Through(DGE())))) == set()


def test_a_hybrid_scale_has_no_one_position_on_the_grid():
    assert broken(estimating(Quantizer(scale=E4M3(hybrid=True)), w=Through(DGE()))) == {"estimator-needs-one-grid"}


def test_a_combination_that_makes_no_sense_is_one_line_with_field_value_and_what_is_accepted():
    data = {s: dict.fromkeys(ops, "hif4") for s, ops in {"fprop": "xw", "dgrad": "gw", "wgrad": "gx"}.items()}
    with pytest.raises(ConfigError) as caught:
        recipe_from_dict(data | {"estimator": {"w": {"element": "dge"}}})
    assert str(caught.value) == "recipe: estimator.w: found 'dge'; accepted: ste, none (fprop.w is hif4)"


def test_a_relaxation_and_a_scale_gradient_cost_a_point_each():
    assert points(estimating("nvfp4")) == 2
    assert points(estimating("nvfp4", w=Through(DGE()))) == 3
    assert points(estimating("nvfp4", x=Through(DGE()), w=Through(DGE(), scale="exact"))) == 4


def test_a_relaxation_of_the_scales_rounding_costs_another_where_it_counts():
    assert points(estimating("nvfp4", x=ROUNDED)) == points(estimating("nvfp4", x=Through(scale="exact"))) + 1
    assert points(estimating("nvfp4", x=replace(ROUNDED, scale="none"))) == points(estimating("nvfp4"))
