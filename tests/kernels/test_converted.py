"""A weight's gradient that takes the forward pass's MXFP4 codes: FP8 along the tokens, by exponents alone."""

import pytest
import torch
from msgspec.structs import replace

from fp4dse.dse import QUANTIZERS, ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.rounding import Stochastic
from fp4dse.kernels import LaneNumerics, QuantConv2d, QuantLinear
from fp4dse.kernels.ops.products import in_segments, multiply
from fp4dse.kernels.quant.operand.kinds import laid_out
from fp4dse.kernels.quant.operand.records import Stored
from fp4dse.kernels.quant.operand.stored import restored

HOPPER = Recipe.named("hopper-moe-fp4")
RECIPE = replace(HOPPER, wgrad=replace(HOPPER.wgrad, source="converted"))
MXFP4 = [QUANTIZERS["mxfp4"].canonical()]


def with_fields(**more):
    return recipe_from_dict({**recipe_to_dict(RECIPE), **more})


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def codes_of(x, recipe=RECIPE, device="cpu"):
    """Numerics, and the codes that a forward product keeps of x [L, M, K]."""
    numerics = LaneNumerics([recipe] * len(x), range(len(x)), device)
    of = numerics.forward(0, x.to(device), randn(len(x), 16, x.shape[2]).to(device))
    assert isinstance(of.x, Stored)
    return numerics, of.x


@pytest.mark.parametrize("rounding", [None, Stochastic()], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("tokens", [128, 150])
def test_the_product_is_that_of_the_forward_passs_own_numbers(rounding, tokens):
    """Powers of two commute with sums: bit for bit the product of g, quantized, and what the codes stand for."""
    fprop = RECIPE.fprop if rounding is None else replace(RECIPE.fprop, x=replace(RECIPE.fprop.x, rounding=rounding))
    numerics, codes = codes_of(randn(2, tokens, 64), replace(RECIPE, fprop=fprop))
    g = randn(2, tokens, 48, seed=1)
    got = numerics.gemm("wgrad", 0, g, 1, codes, 1)
    stage, use = numerics.quantized["wgrad"], replace(numerics.use(0), dim=1)
    [of_g] = stage.operand("g", g, use, None).terms
    x = restored(codes, MXFP4 * 2).values
    x = laid_out(torch.nn.functional.pad(x, (0, 0, 0, -tokens % 128)).mT, 1)
    assert torch.equal(got, in_segments(of_g.values, x, of_g.factor, None, multiply))
    assert got.shape == (2, 48, 128)
    assert not got[:, :, 64:].any()  # of what pads rows of x to the stage's blocks


def test_it_is_what_recipes_from_the_forwards_copy_round_to():
    """The difference is one rounding to FP8 of factors of 128, 2^-4 of an element at most."""
    x, g = randn(2, 256, 96), randn(2, 256, 32, seed=1)
    numerics, codes = codes_of(x)
    converted = numerics.gemm("wgrad", 0, g, 1, codes, 1)
    again = LaneNumerics([HOPPER] * 2, range(2)).gemm("wgrad", 0, g, 1, restored(codes, MXFP4 * 2).values, 1)
    assert 0 < (converted - again).norm() < 0.03 * again.norm()


def test_tiles_beyond_the_window_lose_what_is_small_and_nothing_else():
    x = randn(1, 128, 64).repeat(2, 1, 1)
    x[:, 5, :32] *= 2.0**-30
    x[:, 7, 32:] = 0.0
    numerics, codes = codes_of(x)
    one = torch.eye(128).repeat(2, 1, 1)
    operand = numerics.quantized["wgrad"].operand("x", codes, replace(numerics.use(0), dim=1), None).decoded()
    exact = restored(codes, MXFP4 * 2).values.mT
    assert (operand[:, :32, 5] == 0).all()
    assert torch.equal(operand[:, :, one[0, 5] == 0], exact[:, :, one[0, 5] == 0])
    assert torch.equal(operand[:, 32:], exact[:, 32:])


def test_what_tiles_beyond_the_window_lose_is_counted():
    x = randn(2, 150, 64)
    x[0, 5, :32] *= 2.0**-30
    numerics, codes = codes_of(x)
    with numerics.temporarily(counting=True):
        numerics.gemm("wgrad", 0, randn(2, 150, 16, seed=1), 1, codes, 1)
    lost = numerics.lost()["wgrad.x"]
    assert lost["clipped"].tolist() == [0, 0]
    flushed = int((restored(codes, MXFP4 * 2).values[0, 5, :32] != 0).sum())
    assert lost["flushed"].tolist() == [flushed / (150 * 128), 0]  # of rows padded to whole blocks


def gradient(of, x):
    of(x).square().sum().backward()
    return of.weight.grad


def of_lanes(seeds, packed=False, device="cpu"):
    """y, and the gradients of x [L, 70, 40] and of the weight, in lanes of these seeds with numbers of their own."""
    numerics = LaneNumerics([RECIPE] * len(seeds), seeds, device)
    numerics.packed = packed
    sizes = torch.exp2(torch.tensor([*seeds]) % 11.0)[:, None, None]
    x, w = (torch.stack([randn(n, 40, seed=20 + seed + n) for seed in seeds]) * sizes for n in (70, 24))
    x, w = x.to(device), w.to(device)
    layer = QuantLinear(w, None, numerics, 3)
    y = layer(x.requires_grad_())
    return [y.detach(), *torch.autograd.grad(y.square().sum(), (x, layer.weight))]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_lane_has_the_same_bits_in_any_company_and_keeps_codes_in_any_case(device):
    """Of 64 lanes, of seven, in another order, alone."""
    together = of_lanes(range(64), device=device)
    assert all(x.isfinite().all() for x in together)
    for seeds, packed in (([63], False), ([4, 1], False), ([*range(7)], False), ([*range(7)], True)):
        few = of_lanes(seeds, packed, device)
        assert all(torch.equal(a[seeds], b) for a, b in zip(together, few, strict=True))


def test_convolutions_make_their_codes_again():
    """Of images that are kept in place of columns: the same gradient as a linear layer of the columns."""
    numerics = LaneNumerics([RECIPE] * 2, range(2))
    w, images = randn(2, 8, 3, 3, 4), randn(2, 3, 6, 6, 4, seed=1)
    conv = QuantConv2d(w, None, numerics, 0, padding=1)
    y = conv(images)
    y.square().sum().backward()
    padded = torch.nn.functional.pad(images, (0, 0, 1, 1, 1, 1))
    columns = padded.unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 1, 2, 3, 5, 6, 4).flatten(4).flatten(1, 3)
    linear = QuantLinear(w.flatten(2), None, numerics, 0)
    z = linear(columns)
    z.square().sum().backward()
    assert torch.equal(y.flatten(1, 3), z)
    assert torch.equal(conv.weight.grad, linear.weight.grad)


def test_where_the_forward_pass_has_no_codes_x_is_quantized():
    finish = {"share": 0.5, "what": "forward"}
    numerics = LaneNumerics([with_fields(finish=finish)] * 2, range(2), steps=2)
    numerics.phase(1)
    of = QuantLinear(randn(2, 24, 40), None, numerics, 3)
    assert torch.isfinite(gradient(of, randn(2, 70, 40))).all()
    assert not numerics.converts(3)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fprop": {"x": "mxfp4-rceil", "w": "fp8-128x128"}}, "fprop.x: found 'mxfp4-rceil'"),
        ({"fprop": {"x": "nvfp4", "w": "fp8-128x128"}}, "fprop.x: found 'nvfp4'"),
        ({"fprop": {"x": "mxfp4", "w": "mxfp4", "rotation": "rht32"}}, "fprop.rotation: found 'rht32'"),
        ({"wgrad": {"g": "fp8-1x128", "x": "mxfp8", "source": "converted"}}, "wgrad.x: found 'mxfp8'"),
        ({"dgrad": {"g": "fp8-1x128", "w": "fp8-128x128", "source": "converted"}}, "converted"),
    ],
    ids=str,
)
def test_what_codes_cannot_be_converted_for_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        with_fields(**changes)


def test_the_words_for_it():
    assert "wgrad.x converted from forward" in RECIPE.label()
    assert RECIPE.columns()["wgrad_source"] == "converted"
    assert RECIPE.config_id != HOPPER.config_id
    plain = replace(RECIPE, fprop=replace(RECIPE.fprop, x=QUANTIZERS["none"]))
    assert plain.canonical().wgrad.source == "master"  # the forward's copy is the operand itself


@pytest.mark.gpu
def test_a_gpu_has_the_same_codes_and_the_same_operand():
    x = randn(3, 150, 96) * torch.exp2(torch.randint(-20, 3, (3, 150, 1), generator=torch.Generator().manual_seed(1)))
    terms = []
    for device in ("cpu", "cuda"):
        numerics, codes = codes_of(x, device=device)
        use = replace(numerics.use(0), dim=1)
        terms.append(numerics.quantized["wgrad"].operand("x", codes, use, None).terms[0])
    assert torch.equal(terms[0].decoded(), terms[1].decoded().cpu())
