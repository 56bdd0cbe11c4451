"""Averis (2603.10444): the mean over tokens is taken off x and g and multiplied apart, what is left is quantized."""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Hadamard, Quantizer, Recipe
from fp4dse.dse.outliers import Clamp, Mean
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.scale import FP32
from fp4dse.dse.stages import STAGES
from fp4dse.kernels import LaneNumerics, quantize
from fp4dse.kernels.ops.rotation import rotate, rotate_back

from .stage_products import GEMM_DIMS, exact, product, same_bits_alone, same_bits_on_both_paths, uniform_with

replace = msgspec.structs.replace
NV, BF16 = QUANTIZERS["nvfp4"], QUANTIZERS["bf16"]
AVERIS = Recipe.named("averis")


def with_means(q: Quantizer, w: Quantizer, rotation: Hadamard | None = None) -> Recipe:
    """x and g centred, w not, in all three products."""
    centred, recipe = replace(q, outliers=Mean()), Recipe.uniform(w)
    return uniform_with(recipe, rotation, x=centred, g=centred, w=w)


def tensors(tokens: int = 24, inputs: int = 40, outputs: int = 7, mean: float = 8.0) -> dict[str, torch.Tensor]:
    """Of two lanes; x and g with a mean that all tokens share, in the unit of what varies."""
    g = torch.Generator().manual_seed(5)
    shapes = {"x": (2, tokens, inputs), "w": (2, outputs, inputs), "g": (2, tokens, outputs)}
    made = {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}
    for name in "xg":
        made[name] += mean * torch.randn(2, 1, made[name].shape[2], generator=g)
    return made


def padded(x: torch.Tensor, size: int) -> torch.Tensor:
    """[R, C] with zeros up to a multiple of size."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % size))


def decoded(x: torch.Tensor, q: Quantizer, rotation: Hadamard | None, tokens_are_rows: bool | None) -> torch.Tensor:
    """An operand [R, C] as float64, dense, by its definition: its mean and the quantized rest, rotated back. What
    quantizing makes of the padding is part of it."""
    size, mean = max(16, rotation.size if rotation else 1), torch.zeros(1, 1)
    if tokens_are_rows is not None:
        mean = x.double().mean(0 if tokens_are_rows else 1, keepdim=True).float()
    rest = padded(x - mean, size)[None]
    if rotation:
        rest = rotate(rest, rotation.size, 2, None, rotation.order)
    values = quantize(rest[0], q).values
    if rotation:
        values = rotate_back(values[None], rotation.size, 2, None, rotation.order)[0]
    return (values + padded(mean.expand_as(x), size)).double()


@pytest.mark.parametrize("rotation", [None, Hadamard(size=32, signs="none")], ids=["plain", "rotated"])
@pytest.mark.parametrize("stage", STAGES)
def test_every_product_is_that_of_the_means_plus_the_quantized_rests(path, stage, rotation):
    """The whole product written densely: x̂ = μ + Q(x - μ), ĝ likewise, ŵ = Q(w). Sizes that no block divides."""
    of = tensors()
    got = product(LaneNumerics([with_means(NV, NV, rotation)] * 2, [0, 1]), stage, of)
    for lane in range(2):
        operands = []
        for name, dim in zip(STAGES[stage], GEMM_DIMS[stage], strict=True):
            x = of[name][lane] if dim == 2 else of[name][lane].T
            operands.append(decoded(x, NV, rotation, None if name == "w" else stage != "wgrad"))
        assert torch.allclose(got[lane].double(), operands[0] @ operands[1].T, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_with_rests_that_are_held_exactly_the_product_is_exact(path, stage):
    """Rests of 0 and ±1 about whole means: E4M3 with FP32 scales holds them, so nothing is lost."""
    fine = Quantizer(element="e4m3", block=16, scale=FP32())
    g = torch.Generator().manual_seed(1)
    rest = torch.randint(-1, 2, (2, 16, 32), generator=g).float()
    rest = torch.cat([rest, -rest], 1)  # their mean over tokens is zero
    of = {"x": rest + torch.arange(32.0), "g": rest[:, :, :7] - 3.0 * torch.arange(7.0), "w": torch.ones(2, 7, 32)}
    got = product(LaneNumerics([with_means(fine, BF16)] * 2, [0, 1]), stage, of)
    assert torch.equal(got.double(), exact(stage, of))


@pytest.mark.parametrize("stage", STAGES)
def test_a_shared_mean_costs_no_accuracy(path, stage):
    of = tensors(tokens=128, inputs=64, outputs=48)
    errors = {}
    for name, recipe in (("mean", with_means(NV, NV)), ("none", Recipe.uniform(NV))):
        got = product(LaneNumerics([recipe] * 2, [0, 1]), stage, of).double()
        errors[name] = float((got - exact(stage, of)).square().sum() / exact(stage, of).square().sum())
    assert errors["mean"] < 0.5 * errors["none"]
    without = tensors(tokens=128, inputs=64, outputs=48, mean=0.0)
    plain, centred = (LaneNumerics([r] * 2, [0, 1]) for r in (Recipe.uniform(NV), with_means(NV, NV)))
    squares = [(product(n, stage, without).double() - exact(stage, without)).square().sum() for n in (plain, centred)]
    assert squares[1] < 1.1 * squares[0]


def test_rests_alone_decide_the_scales(path):
    """What is quantized does not see the mean: so fine a rest would be lost beside it."""
    x = 1000 * torch.rand(2, 1, 32, generator=torch.Generator().manual_seed(1))
    x = x + 0.01 * torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(2))
    w = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(3))
    errors = []
    for q in (replace(NV, outliers=Mean()), NV):
        recipe = Recipe.uniform(NV)
        numerics = LaneNumerics([replace(recipe, fprop=replace(recipe.fprop, x=q, w=BF16))] * 2, [0, 1])
        exact_w = w.bfloat16().double()
        errors.append((numerics.gemm("fprop", 0, x, 2, w, 2).double() - x.double() @ exact_w.mT).abs().max())
    assert errors[0] < 0.1
    assert errors[1] > 10


def test_a_mean_meets_what_clamping_cuts_off(path):
    """Of both operands of the weight gradient one is clamped and one centred: nothing is missing from their product."""
    fine = Quantizer(element="e4m3", block=16, scale=FP32())
    of = tensors(tokens=64)
    of["g"][:, 3, 2] = 1000.0
    recipe = with_means(fine, fine)
    recipe = replace(recipe, wgrad=replace(recipe.wgrad, g=replace(fine, outliers=Clamp())))
    got = product(LaneNumerics([recipe] * 2, [0, 1]), "wgrad", of).double()
    assert (got - exact("wgrad", of)).abs().max() < 0.01 * exact("wgrad", of).abs().max()


@pytest.mark.parametrize("rotation", [None, Hadamard(size=16)])
def test_the_forwards_copy_has_the_mean(path, rotation):
    of, recipe = tensors(), with_means(NV, NV, rotation)
    recipe = replace(
        recipe, dgrad=replace(recipe.dgrad, source="forward"), wgrad=replace(recipe.wgrad, source="forward")
    )
    forward = LaneNumerics([recipe] * 2, [0, 1]).forward(0, of["x"], of["w"])
    assert forward.x.shape == of["x"].shape
    assert torch.allclose(forward.y, forward.x @ forward.w.mT, rtol=1e-5, atol=1e-3)
    rest = of["x"] - of["x"].mean(1, keepdim=True)
    assert (forward.x - of["x"]).square().mean() < 0.02 * rest.square().mean()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lane_has_the_same_bits_alone(path, stage, dtype):
    of = {name: x.to(dtype) for name, x in tensors(tokens=40, inputs=48, outputs=32).items()}
    recipes = [with_means(q, NV, Hadamard(size=16)) for q in (NV, replace(NV, rounding=Stochastic()))]
    assert same_bits_alone(recipes, stage, of)


def test_both_paths_have_the_same_bits(monkeypatch):
    assert same_bits_on_both_paths(monkeypatch, AVERIS, tensors(inputs=48, outputs=32))


def test_one_token_is_its_own_mean(path):
    of = tensors(tokens=1)
    got = product(LaneNumerics([with_means(NV, BF16)] * 2, [0, 1]), "fprop", of)
    assert torch.allclose(got, of["x"] @ of["w"].bfloat16().float().mT, rtol=1e-5, atol=1e-5)
