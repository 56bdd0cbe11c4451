"""A layer or a step that a recipe keeps precise has the bits of the BF16 baseline, and the others do not notice."""

import msgspec
import pytest
import torch

from fp4dse.dse import STAGES, Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import Finish, Precise
from fp4dse.kernels import LaneNumerics, QuantLinear, quantize

replace = msgspec.structs.replace
BF16 = Recipe.named("bf16")
ANYWHERE = Place()


def passes(recipe: Recipe, place: Place = ANYWHERE, step: int = 0, steps: int = 10):
    """y, dx, dw of a layer at a place in a step of a training."""
    torch.manual_seed(0)
    x, w, g = torch.randn(2, 24, 32, requires_grad=True), torch.randn(2, 16, 32), torch.randn(2, 24, 16)
    numerics = LaneNumerics([recipe] * 2, [0, 1], steps=steps)
    numerics.step.fill_(step)
    numerics.phase(step)
    layer = QuantLinear(w, None, numerics, 3, place)
    y = layer(x)
    y.backward(g)
    return dict(zip(STAGES, (y.detach(), x.grad, layer.weight.grad), strict=True))


def same(a, b) -> list[str]:
    return [stage for stage in STAGES if torch.equal(a[stage], b[stage])]


@pytest.mark.parametrize("name", ["nvfp4-sr-rht", "quartet", "tetrajet", "wang-dge-occ"])
def test_a_precise_layer_has_the_bits_of_the_baseline(name):
    recipe = Recipe.named(name)
    for place in (Place("head"), Place("embedding"), Place("router")):
        assert same(passes(recipe, place), passes(BF16)) == list(STAGES)
    assert same(passes(recipe, Place("mlp", 0, 2)), passes(BF16)) == []
    assert same(passes(recipe, Place("attention", 0, 2)), passes(recipe)) == list(STAGES)


def test_blocks_at_the_ends_are_precise_where_the_recipe_says_so():
    recipe = replace(Recipe.named("nvfp4"), precise=Precise(first=1, last=2))
    kept = [i for i in range(6) if same(passes(recipe, Place("mlp", i, 6)), passes(BF16)) == list(STAGES)]
    assert kept == [0, 4, 5]


@pytest.mark.parametrize("what", ["forward", "backward", "all"])
def test_the_finish_has_the_bits_of_the_baseline_in_its_stages(what):
    finish = Finish(share=0.2, what=what)
    recipe = replace(Recipe.named("nvfp4-sr-rht"), finish=finish)
    for step in (0, 7):
        assert same(passes(recipe, step=step), passes(Recipe.named("nvfp4-sr-rht"), step=step)) == list(STAGES)
    for step in (8, 9, 10):
        assert same(passes(recipe, step=step), passes(BF16, step=step)) == list(finish.stages)


@pytest.mark.parametrize("name", ["luq-fnt", "nvfp4", "quartet", "wang-dge-occ"])
def test_in_fine_tuning_the_weight_alone_is_quantized(name):
    """By plain products of BF16 operands with the weight as `quantize` decodes it, rotated where its product is."""
    recipe = replace(Recipe.named(name), finish=Finish(share=0.2, what="all-but-weights"))
    assert same(passes(recipe, step=7), passes(replace(recipe, finish=None), step=7)) == list(STAGES)
    got, bf16 = passes(recipe, step=9), passes(BF16, step=9)
    own = {"quartet": "x is the forward's copy", "wang-dge-occ": "DGE's gradient of the weight"}
    assert same(got, bf16) == ([] if name in own else ["wgrad"])
    torch.manual_seed(0)
    x, w, g = torch.randn(2, 24, 32), torch.randn(2, 16, 32), torch.randn(2, 24, 16)
    if recipe.fprop.rotation is None:
        decoded = torch.stack([quantize(one, recipe.fprop.w).values for one in w])
        assert torch.allclose(got["fprop"], torch.bmm(x.bfloat16().float(), decoded.mT), rtol=1e-5, atol=1e-5)
    if recipe.dgrad.rotation is None and recipe.dgrad.source == "master" and name != "nvfp4":
        decoded = torch.stack([quantize(one.T.contiguous(), recipe.dgrad.w).values.T for one in w])
        assert torch.allclose(got["dgrad"], torch.bmm(g.bfloat16().float(), decoded), rtol=1e-5, atol=1e-5)


def test_what_was_fine_tuned_is_evaluated_as_it_is_deployed():
    """With quantized activations, too; other finishes are evaluated as they were trained last."""
    x, w = torch.randn(2, 24, 32), torch.randn(2, 16, 32)

    def y(recipe: Recipe, step: int) -> torch.Tensor:
        numerics = LaneNumerics([recipe] * 2, [0, 1], steps=10)
        numerics.phase(step)
        numerics.training, numerics.evaluation = False, "quantized"
        return numerics.forward(0, x, w).y

    luq, all_but_weights = Recipe.named("luq"), Finish(share=0.2, what="all-but-weights")
    assert torch.equal(y(replace(luq, finish=all_but_weights), 9), y(luq, 9))
    assert not torch.equal(y(replace(luq, finish=Finish(share=0.2)), 9), y(luq, 9))


def test_fine_tuning_without_quantized_weights_is_a_finish_of_everything():
    plain = Recipe.named("bf16").fprop.w
    luq = Recipe.named("luq")
    recipe = replace(luq, fprop=replace(luq.fprop, w=plain), dgrad=replace(luq.dgrad, w=plain))
    finishes = [replace(recipe, finish=Finish(share=0.2, what=what)) for what in ("all-but-weights", "all")]
    assert len({of.config_id for of in finishes}) == 1
    assert replace(BF16, finish=Finish(share=0.2, what="all-but-weights")).config_id == BF16.config_id


def test_the_finish_is_the_last_share_of_the_steps():
    recipe = replace(Recipe.named("nvfp4"), finish=Finish(share=0.2))
    numerics = LaneNumerics([recipe] * 2, [0, 1], steps=10)
    assert [step for step in range(10) if numerics.phase(step)] == [8, 9]
    assert not any(LaneNumerics([recipe] * 2, [0, 1]).phase(step) for step in range(10))  # no end, no finish


def test_a_finish_backward_takes_the_quantized_copies_of_the_forward_pass_where_the_recipe_does():
    recipe = replace(Recipe.named("tetrajet"), finish=Finish(share=0.2, what="backward"))
    got, plain = passes(recipe, step=9), passes(BF16, step=9)
    assert same(got, passes(Recipe.named("tetrajet"), step=9)) == ["fprop"]
    assert same(got, plain) == []
    assert torch.allclose(got["dgrad"], plain["dgrad"], atol=2.0)  # weights that differ by their rounding alone


def test_what_a_slot_keeps_stays_while_it_is_not_used():
    recipe = replace(Recipe.named("ue5m3-graphcore"), finish=Finish(share=0.5))
    numerics = LaneNumerics([recipe] * 2, [0, 1], steps=10)
    for step in range(10):
        numerics.step.fill_(step)
        numerics.phase(step)
        numerics.forward(0, torch.full((2, 16, 16), float(step + 1)), torch.ones(2, 16, 16))
        if step == 4:
            held = {key: value.clone() for key, value in numerics.slots["fprop.x"].state.items()}
    assert all(torch.equal(value, held[key]) for key, value in numerics.slots["fprop.x"].state.items())


def test_operands_decoded_whole_are_rounded_to_bf16_with_their_factors():
    recipe = Recipe.named("nvfp4")
    rounded = replace(recipe, gemm="bf16-rounded")
    numerics = LaneNumerics([rounded] * 2, [0, 1])
    assert numerics.gemms == dict.fromkeys(STAGES, "bf16-rounded")
    torch.manual_seed(0)
    x, w = torch.randn(2, 24, 32), torch.randn(2, 16, 32)
    operands = (numerics.slots[f"fprop.{o}"].quantize(t, numerics.use(0)) for o, t in {"x": x, "w": w}.items())
    a, b = (operand.decoded().bfloat16().float() for operand in operands)
    expected = torch.bmm(a, b.mT)
    assert torch.equal(numerics.forward(0, x, w).y, expected)
    assert not torch.equal(LaneNumerics([recipe] * 2, [0, 1]).forward(0, x, w).y, expected)


def test_products_that_a_device_does_not_have_are_replaced_with_a_reason():
    recipe = replace(Recipe.named("mxfp4"), gemm="fp8-exact")
    numerics = LaneNumerics([recipe] * 2, [0, 1])
    assert numerics.gemms == dict.fromkeys(STAGES, "fp32")
    assert numerics.gemm_why_not == tuple(f"{s}: fp8-exact not taken on cpu: it needs a CUDA device" for s in STAGES)
    assert torch.equal(passes(recipe)["dgrad"], passes(Recipe.named("mxfp4"))["dgrad"])
