"""A clip that is learned (PACT, 1805.06085), in layers: against plain torch with autograd, and what it refuses."""

import re

import msgspec
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4dse.dse import QUANTIZERS, ConfigError, Hadamard, Quantizer, Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.dse.layers.precision import Finish
from fp4dse.dse.outliers import LearnedClip
from fp4dse.dse.rollout import Rollout
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.scale import FP32, One, TensorScale
from fp4dse.dse.training import Training
from fp4dse.kernels import LaneNumerics, QuantLinear, convert
from fp4dse.kernels.conv import QuantConv2d

replace = msgspec.structs.replace
INT4 = Quantizer(element="int4", block="tensor", scale=One(), tensor_scale=TensorScale())
"""PACT's grid, with a sign: one scale for the tensor, largest element 7."""
HUGE = 1e30
"""A bound that nothing reaches."""


def learned(q: Quantizer = INT4, operands: str = "x", backward: str = "none", **clip: float) -> Recipe:
    """Forward operands in q, those named with a clip; backward operands are the forward's copies in another quantizer,
    with which gradients are what autograd makes of the forward product."""
    recipe = Recipe.uniform(Quantizer.named(backward))
    with_clip = replace(q, outliers=LearnedClip(**clip))
    fprop = replace(recipe.fprop, **{of: with_clip if of in operands else q for of in "xw"})
    dgrad, wgrad = replace(recipe.dgrad, source="forward"), replace(recipe.wgrad, source="forward")
    return replace(recipe, fprop=fprop, dgrad=dgrad, wgrad=wgrad)


def with_x(recipe: Recipe, q: Quantizer, **clip: object) -> Recipe:
    """The recipe with another forward x, whose clip this is."""
    return replace(recipe, fprop=replace(recipe.fprop, x=replace(q, outliers=LearnedClip(**clip))))


def rounded(x: torch.Tensor, alpha: torch.Tensor | None = None) -> torch.Tensor:
    """PACT in plain torch, on both sides of zero: clamped, and rounded straight through to α/7 · (-7 … 7). Without α,
    to multiples of a seventh of the largest."""
    kept = x if alpha is None else torch.where(x.abs() < alpha, x, alpha * x.sign())
    unit = (x.abs().max() if alpha is None else alpha).detach() / 7
    return kept + (torch.round(kept.detach() / unit) * unit - kept.detach())


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, *shape, dtype=torch.float64).float().requires_grad_() for shape in shapes]


@pytest.mark.parametrize("operands", ["x", "xw"])
def test_gradients_are_those_of_autograd_through_the_plain_definition(path, operands):
    x, w, g = tensors((6, 5, 32), (8, 32), (6, 5, 8))
    recipes = [learned(operands=operands, start=start) for start in (1.5, 0.75)]
    layer = QuantLinear(w.detach(), None, LaneNumerics(recipes, [0, 1]), 0)
    y = layer(x)
    y.backward(g.detach())
    for lane, start in enumerate((1.5, 0.75)):
        own, weight = (of.detach()[lane].double().requires_grad_() for of in (x, w))
        bounds = [torch.tensor([start], dtype=torch.float64, requires_grad=True) for _ in "xw"]
        expected = rounded(own, bounds[0]) @ rounded(weight, bounds[1] if "w" in operands else None).T
        expected.backward(g.detach()[lane].double())
        assert torch.allclose(y[lane].double(), expected, atol=1e-4)
        assert torch.allclose(x.grad[lane].double(), own.grad, atol=1e-4)
        assert torch.allclose(layer.weight.grad[lane].double(), weight.grad, atol=1e-4)
        for operand, bound in zip(operands, bounds, strict=False):
            assert torch.allclose(getattr(layer, f"clip_{operand}").grad[lane].double(), bound.grad, atol=1e-3)
            assert bound.grad.abs() > 0.1


def test_gradients_of_a_learned_scale_are_those_of_lsq(path):
    """Written as its authors have it: a scale s, ⌊clip(v/s)⌉ s, and gradients by autograd straight through the
    rounding, scaled by 1/sqrt(n · 7) (1902.08153, appendix). Beside a lane with PACT's gradient, which keeps it."""
    x, w, g = tensors((6, 5, 32), (8, 32), (6, 5, 8))
    x, g = x.detach(), g.detach()
    lanes = [learned(operands="w", start=1.5, gradient="lsq"), learned(operands="w", start=1.5)]
    layer = QuantLinear(w.detach(), None, LaneNumerics(lanes, [0, 1]), 0)
    layer(x).backward(g)
    values = w.detach()[0].double().requires_grad_()
    factor = (values.numel() * 7) ** -0.5
    scale = torch.tensor(1.5 / 7, dtype=torch.float64, requires_grad=True)
    scaled = scale * factor + (scale - scale * factor).detach()
    ratio = torch.clamp(values / scaled, -7, 7)
    (rounded(x[0].double()) @ ((ratio + (torch.round(ratio) - ratio).detach()) * scaled).T).backward(g[0].double())
    assert layer.clip_w.grad[0].item() == pytest.approx(scale.grad.item() / 7, rel=1e-4)
    assert torch.allclose(layer.weight.grad[0].double(), values.grad, atol=1e-4)
    alone = QuantLinear(w.detach()[1:], None, LaneNumerics(lanes[1:], [1]), 0)
    alone(x[1:]).backward(g[1:])
    assert torch.equal(alone.clip_w.grad, layer.clip_w.grad[1:])


def test_a_start_at_the_largest_weight_is_the_recipe_without_a_clip():
    w = torch.stack([torch.linspace(-2, 1, 64).view(2, 32), torch.linspace(-1, 7, 64).view(2, 32)])
    x = torch.linspace(-1, 1, 3 * 32).view(1, 3, 32).expand(2, -1, -1)
    lsq = learned(operands="w", start="max", decay=0.0, gradient="lsq")
    plain = replace(lsq, fprop=replace(lsq.fprop, w=INT4))
    layer, without = (QuantLinear(w, None, LaneNumerics([of] * 2, [0, 1]), 0) for of in (lsq, plain))
    assert layer.clip_w.tolist() == [[2.0], [7.0]]
    assert torch.equal(layer(x), without(x))


def test_of_a_convolution_images_are_clamped():
    x, w, g = tensors((3, 6, 6, 8), (5, 3, 3, 8), (3, 6, 6, 5))
    layer = QuantConv2d(w.detach(), None, LaneNumerics([learned(start=1.25)] * 2, [0, 1]), 0, padding=1)
    y = layer(x)
    y.backward(g.detach())
    own, bound = x.detach()[1].double().requires_grad_(), torch.tensor([1.25], dtype=torch.float64, requires_grad=True)
    weight = rounded(w.detach()[1].double())
    expected = F.conv2d(rounded(own, bound).permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), padding=1)
    expected.permute(0, 2, 3, 1).backward(g.detach()[1].double())
    assert torch.allclose(y[1].double(), expected.permute(0, 2, 3, 1), atol=1e-4)
    assert torch.allclose(x.grad[1].double(), own.grad, atol=1e-4)
    assert torch.allclose(layer.clip_x.grad[1].double(), bound.grad, atol=1e-3)


@pytest.mark.parametrize("q", [QUANTIZERS["mxfp4"], QUANTIZERS["nvfp4"], INT4], ids=["mxfp4", "nvfp4", "int4"])
def test_where_nothing_is_clamped_it_is_the_recipe_without(path, q):
    """Beyond all elements where no tensor scale follows it; at the largest where one does."""
    x, w, g = tensors((24, 32), (16, 32), (24, 16))
    x = (x.detach() / x.detach().abs().amax((1, 2), keepdim=True) * 4).requires_grad_()
    with_clip = learned(q, backward="nvfp4", start=HUGE if q.tensor_scale is None else 4.0)
    without = replace(with_clip, fprop=replace(with_clip.fprop, x=q))
    found = []
    for recipe in (with_clip, without):
        layer = QuantLinear(w.detach().clone(), None, LaneNumerics([recipe] * 2, [0, 1]), 0)
        y = layer(x)
        [dx, dw] = torch.autograd.grad(y, [x, layer.weight], g.detach())
        found.append((y, torch.where(x.abs() == 4, 0.0, dx), dw))
    assert all(map(torch.equal, *found))


def test_an_element_at_the_clip_counts_as_clamped():
    """As in the paper: the gradient of alpha has it, that of x does not."""
    numerics = LaneNumerics([learned(start=2.0)] * 2, [0, 1])
    layer = QuantLinear(torch.eye(4).expand(2, 4, 4).clone(), None, numerics, 0)
    x = torch.tensor([2.0, -2.0, 1.0, -3.0]).expand(2, 1, 4).clone().requires_grad_()
    layer(x).backward(torch.tensor([1.0, 10.0, 100.0, 1000.0]).expand(2, 1, 4))
    assert x.grad[0, 0].tolist() == [0.0, 0.0, 100.0, 0.0]
    assert layer.clip_x.grad.tolist() == [[1.0 - 10 - 1000]] * 2


def test_it_is_off_with_its_quantizer():
    """In precise layers there is none, and in a finish and under evaluation in BF16 nothing is clamped."""
    recipe = replace(learned(start=0.5), finish=Finish(share=0.5, what="forward"))
    numerics = LaneNumerics([recipe] * 2, [0, 1], steps=4)
    x, w = (of.detach() for of in tensors((4, 16), (8, 16)))
    layer, head = QuantLinear(w, None, numerics, 0), QuantLinear(w, None, numerics, 1, Place("head"))
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    exact = x.bfloat16().float() @ w.bfloat16().float().mT
    assert not torch.allclose(layer(x), exact, atol=1e-5)
    numerics.evaluation = "bf16"
    assert torch.allclose(layer(x), exact, atol=1e-5)
    numerics.evaluation = ""
    numerics.phase(3)
    assert torch.allclose(layer(x), exact, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (lambda r: replace(r, wgrad=replace(r.wgrad, x=r.fprop.x)), r"wgrad.x.outliers: .*a clip is learned for fprop"),
        (lambda r: replace(r, fprop=replace(r.fprop, rotation=Hadamard(size=32))), r"fprop.rotation: .*rht32.*clamped"),
        (
            lambda r: replace(
                r, fprop=replace(r.fprop, x=replace(r.fprop.x, tensor_scale=TensorScale(amax="previous")))
            ),
            r"fprop.x.tensor_scale: found 'previous'; accepted: none, amax \(with outliers pact, which it follows\)",
        ),
        (
            lambda r: replace(r, training=Training(rollout=Rollout(x=learned(start=1.0).fprop.x, w=r.fprop.w))),
            r"training.rollout.x: .*learned clips",
        ),
        (
            lambda r: with_x(r, QUANTIZERS["nvfp4"], gradient="lsq"),
            r"fprop.x.block: .*: tensor \(with the grad",
        ),
        (lambda r: with_x(r, replace(INT4, scale=FP32()), gradient="lsq"), r"fprop.x.scale: .*accepted: one"),
        (lambda r: with_x(r, replace(INT4, rounding=Stochastic()), gradient="lsq"), r"fprop.x.rounding: .*: nearest"),
        (lambda r: with_x(r, replace(INT4, tensor_scale=None), gradient="lsq"), r"fprop.x.tensor_scale: .*: amax"),
        (lambda r: with_x(r, INT4, start="max"), r"fprop.x.outliers.start: found 'max'; accepted: a number"),
    ],
    ids=["backward", "rotated", "another maximum", "rollout", "blocks", "scale", "rounding", "no maximum", "start"],
)
def test_what_makes_no_sense_is_refused(recipe, message):
    [(_, error), *_] = recipe(learned()).validate()
    assert re.search(message, error)


def test_a_model_of_another_makers_has_no_place_for_it():
    with pytest.raises(ConfigError, match=r"fprop.x.outliers: found 'pact'; .*your model has no such parameter"):
        convert(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 8)), learned())


def test_identity_and_words():
    recipe = learned()
    assert "pact" in recipe.label()
    assert recipe.columns()["fprop_x_outliers"] == "pact"
    assert learned(start=4).columns()["fprop_x_outliers"] == "learned-clip start=4 decay=0.0002 rate=1"
    assert learned(start=4).config_id != recipe.config_id
    assert learned(start=4).signature() == recipe.signature()
