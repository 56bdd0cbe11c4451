"""One kernel for each norm of image models has the bits of the plain functions, forward and backward."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_map

from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics, dispatch
from fp4dse.kernels.ops.group_norm import batch_norm, group_norm, smooth_group_norm
from fp4dse.kernels.ops.layer_norm import added_layer_norm, layer_norm
from fp4dse.tasks.diffusion.dit import dit
from fp4dse.tasks.diffusion.unet import unet
from fp4dse.tasks.vision.resnet import resnet
from fp4dse.tasks.vision.vit import vit
from tests.kernels.comparing import comparer, randn, same, take_kernels

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 2, 3, 40, 128, 300]
IMAGES = [(1, 1, 1), (1, 8, 4), (9, 10, 5), (16, 24, 1), (25, 16, 8), (32, 24, 8), (6, 7, 7)]
"""Pixels, channels, groups."""


@pytest.fixture
def check(place, monkeypatch):
    return comparer(place, monkeypatch, "layer_norm", "group_norm")


@pytest.fixture
def held(place, monkeypatch):
    """Sets how many numbers, as a power of two, a program may hold of an image and of its parts."""

    def limit(most, part):
        monkeypatch.setattr(place.group_norm, "_HELD", most)
        monkeypatch.setattr(place.group_norm, "_PART", part)
        monkeypatch.setattr(place.group_norm, "_SMALL", min(most, 11))

    return limit


def per_image(x, dtype=None):
    """Gain and shift of each image of x [L, B, …, C], as cut out of one tensor."""
    return randn(*x.shape[:2], 2 * x.shape[-1], seed=5, dtype=dtype or x.dtype)


def halves(both):
    gain, shift = both.chunk(2, dim=-1)
    return 1.0 + gain, shift


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(check, width, dtype):
    for shape in ([1, 1], [3, 2, 5], [2, 8]):
        check(layer_norm, 3 * randn(*shape, width, dtype=dtype) + 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 40, 128])
@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_layer_norm_with_gain_and_shift(check, width, tokens, dtype):
    x = randn(2, 3, tokens, width, dtype=dtype)
    check(lambda x, both: layer_norm(x, *halves(both)), x, per_image(x))


def test_rows_of_an_image_that_a_program_cannot_hold(check):
    x = randn(1, 2, 19, 500)
    check(lambda x, both: layer_norm(x, *halves(both)), x, per_image(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [False, True])
def test_layer_norm_of_a_sum(check, scales, dtype):
    h, branch = (randn(3, 2, 9, 24, seed=seed, dtype=dtype) for seed in (1, 2))

    def norm(h, branch, both):
        return added_layer_norm(h, branch, *(halves(both) if scales else ()))

    both = per_image(h)
    if scales:
        check(norm, h, branch, both)
        check(lambda *inputs: norm(*inputs)[1], h, branch, both)  # only the norm is used
    else:
        check(lambda h, branch: norm(h, branch, None), h, branch)


def test_layer_norm_of_what_does_not_lie_in_one_piece(check):
    check(lambda x: layer_norm(x.mT), randn(3, 40, 9))


def test_rows_that_are_too_long_take_single_operations(check, place, monkeypatch):
    monkeypatch.setattr(place.layer_norm, "_LONGEST", 30)
    monkeypatch.setattr(place.layer_norm, "layer_norm", None)
    x = randn(2, 3, 31)
    assert "rows of 1 to 30" in place.layer_norm.why_not(x)
    if place.device == "cpu":
        expected = layer_norm(x)
        take_kernels(monkeypatch, "layer_norm")
        assert same(expected, layer_norm(x))
        assert "layer_norm: computed by torch (x: found (2, 3, 31)" in " ".join(dispatch.refusals())
        assert not dispatch.refusals()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("pixels", "channels", "groups"), IMAGES)
@pytest.mark.parametrize("limits", [(14, 13), (5, 8)], ids=["whole", "in parts"])
def test_group_norm(check, held, limits, pixels, channels, groups, dtype):
    held(*limits)
    x = 3 * randn(2, 1, 1, pixels, channels, dtype=dtype) + 1
    if dtype == torch.float32:
        check(lambda x: group_norm(x, groups), x)
    check(lambda x, both: group_norm(x, groups, *halves(both)), x, per_image(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("limits", [(14, 13), (5, 8)], ids=["whole", "in parts"])
def test_silu_of_group_norm(check, held, limits, scales, dtype):
    held(*limits)
    for pixels, channels, groups in IMAGES[2:4]:
        x = randn(1, 2, 1, pixels, channels, dtype=dtype)
        if scales:
            check(lambda x, b, n=groups: smooth_group_norm(x, n, *halves(b)), x, per_image(x))
        else:
            check(lambda x, n=groups: smooth_group_norm(x, n), x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("limits", [(14, 13), (5, 8), (4, 6)], ids=["whole", "in parts", "in many parts"])
def test_batch_norm(check, held, limits, dtype):
    held(*limits)
    for pixels, channels in ((1, 3), (41, 6), (130, 5)):
        x, gain, shift = 3 * randn(2, pixels, channels, dtype=dtype) + 1, randn(2, channels), randn(2, channels, seed=1)
        check(lambda *tensors: batch_norm(*tensors), x, gain, shift)


def test_numbers_that_are_large_small_and_strange_stay_in_their_lane(check):
    x = randn(2, 3, 1, 16, 16) * torch.exp2(torch.arange(-48, 48).view(1, 3, 1, 16, 2).repeat_interleave(8, 4))
    x[1, 0, 0, 0, 0], x[1, 1, 0, 3, 0], x[1, 2] = torch.nan, torch.inf, 0.0
    for function in (lambda x: group_norm(x, 4), layer_norm, lambda x: smooth_group_norm(x, 8)):
        (y,), (dx,) = check(function, x)
        assert all(found[0].isfinite().all() for found in (y, dx))


MODELS = {
    "vit": vit(4, 8, 2, 2),
    "resnet": resnet((4, 8), (1, 1)),
    "dit": dit(4, 8, 2, 2),
    "unet": unet(8, (1, 2), 1, (1,), 8, groups=4),
}


@pytest.mark.parametrize(("name", "dtype"), list(zip(MODELS, DTYPES * 2, strict=True)))
def test_a_model(place, monkeypatch, name, dtype):
    model, seeds = MODELS[name], [0, 1]
    images, times = randn(2, 2, 8, 8, 1), torch.tensor([[3, 700], [0, 999]])
    inputs = (images, times) if name in ("dit", "unet") else images

    def trained():
        numerics = LaneNumerics([Recipe.named("bf16")] * 2, seeds, place.device, dtype=dtype)
        numerics.training = True
        parameters = model.init(SimpleNamespace(shape=(8, 8, 1), classes=3), seeds)
        built = model.build({key: x.to(place.device) for key, x in parameters.items()}, numerics)
        out = built(tree_map(lambda t: t.to(place.device), inputs))
        (out * randn(*out.shape, seed=1).to(out)).to(torch.float32).sum().backward()
        return [out.detach().cpu(), *(p.grad.cpu() for p in built.parameters())]

    take_kernels(monkeypatch, "layer_norm", "group_norm", taken=False)
    expected = trained()
    take_kernels(monkeypatch, "layer_norm", "group_norm")
    for here, there in zip(expected, trained(), strict=True):
        assert same(here, there)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_images_as_large_as_those_that_are_trained_on(check, dtype):
    for side, channels in ((32, 64), (32, 256), (32, 384), (16, 256), (128, 64), (24, 96)):
        x = randn(1, 3, side, side, channels, dtype=dtype)
        check(lambda x, both: group_norm(x, 8, *halves(both)), x, per_image(x))
    x, gain, shift = randn(2, 50_000, 64, dtype=dtype), randn(2, 64), randn(2, 64, seed=1)
    check(lambda *tensors: batch_norm(*tensors), x, gain, shift)
    x = randn(1, 4, 64, 256, dtype=dtype)
    check(lambda x, both: layer_norm(x, *halves(both)), x, per_image(x))
