"""Columns of images, and images from their columns: by their definition, and with the same bits where a kernel makes
them."""

import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics, QuantConv2d, lanes
from fp4dse.kernels.ops.columns import Window, col2im, im2col
from fp4dse.kernels.quant.backend import PLAIN
from tests.kernels.comparing import take_kernels

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [  # lanes, batch, height, width, channels, window
    ((1, 1, 1, 1, 1), Window((1, 1))),
    ((1, 1, 1, 1, 1), Window((3, 3), 1, 1)),
    ((2, 1, 5, 5, 1), Window((5, 5))),
    ((2, 3, 9, 7, 1), Window((3, 3), 1, 1)),
    ((3, 2, 7, 9, 3), Window((3, 3), 2, 1)),
    ((2, 2, 6, 5, 8), Window((1, 1), 2)),
    ((2, 1, 5, 8, 2), Window((2, 3))),
    ((2, 2, 14, 11, 3), Window((7, 7), 2, 3)),
    ((1, 2, 8, 8, 40), Window((5, 5), 1, 2)),
    ((2, 2, 4, 4, 16), Window((3, 3), 3, 2)),
    ((2, 3, 8, 8, 64), Window((3, 3), 1, 1)),
    ((2, 1, 4, 4, 320), Window((3, 3), 2, 1)),
]
LARGE = [  # ResNets on CIFAR-10 and on photographs, UNets
    ((2, 512, 32, 32, 3), Window((3, 3), 1, 1)),
    ((2, 512, 32, 32, 64), Window((3, 3), 1, 1)),
    ((2, 512, 32, 32, 64), Window((1, 1), 2)),
    ((2, 512, 8, 8, 512), Window((3, 3), 2, 1)),
    ((1, 64, 224, 224, 3), Window((7, 7), 2, 3)),
    ((2, 128, 16, 16, 192), Window((3, 3), 1, 1)),
    ((1, 512, 32, 32, 384), Window((3, 3), 1, 1)),  # columns of 1.8e9 numbers
    ((1, 640, 32, 32, 384), Window((3, 3), 1, 1)),  # and of more than 2^31
]


def randn(*shape, seed=0, dtype=torch.float32, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def identical(here: torch.Tensor, there: torch.Tensor) -> bool:
    """The same bits, but for the kind of NaN."""
    there = there.to(here.device)
    if here.dtype != there.dtype or here.shape != there.shape:
        return False
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[here.dtype]
    return bool(((here.isnan() & there.isnan()) | (here.view(bits) == there.view(bits))).all())


def by_definition(x, window):
    """Number by number, of one lane."""
    batch, height, width, channels = x.shape
    (kh, kw), stride, padding = window
    down, across = window.positions(height, width)
    out = torch.zeros(batch, down, across, kh, kw, channels)
    for u, v, i, j in torch.cartesian_prod(*map(torch.arange, (down, across, kh, kw))).tolist():
        y, z = stride * u + i - padding, stride * v + j - padding
        if 0 <= y < height and 0 <= z < width:
            out[:, u, v, i, j] = x[:, y, z]
    return out.view(batch * down * across, -1)


@pytest.fixture
def with_kernels(place, monkeypatch):
    """Calls a function of `columns` where the kernels run."""

    def call(function, x, *arguments):
        with monkeypatch.context() as patch:
            take_kernels(patch, "columns")
            return function(x.to(place.device), *arguments)

    return call


@pytest.mark.parametrize(("shape", "window"), [s for s in SHAPES if s[0][4] < 16])
def test_columns_are_what_their_definition_says(shape, window):
    x = randn(*shape)
    found = im2col(x, window)
    for lane, of in zip(found, x, strict=True):
        assert torch.equal(lane, by_definition(of, window))


@pytest.mark.parametrize(("shape", "window"), [s for s in SHAPES if s[0][4] < 16])
def test_the_gradient_of_images_is_the_transpose(shape, window):
    """⟨columns(x), g⟩ = ⟨x, images(g)⟩ of integers, which is exact."""
    x = (4 * randn(*shape)).round()
    made = im2col(x, window)
    g = (4 * randn(*made.shape, seed=1)).round()
    assert (made * g).sum() == (x * col2im(g, window, x.shape, x.dtype)).sum()


def test_a_gradient_of_images_is_summed_in_fp32_and_rounded_once():
    shape, window = torch.Size((2, 3, 6, 6, 8)), Window((3, 3), 1, 1)
    g = randn(2, 108, 72, dtype=torch.bfloat16)
    exact = col2im(g.to(torch.float32), window, shape, torch.float32)
    assert torch.equal(col2im(g, window, shape, torch.bfloat16), exact.to(torch.bfloat16))
    wide = randn(2, 108, 72)
    rounded = col2im(wide.to(torch.bfloat16), window, shape, torch.bfloat16)
    assert torch.equal(col2im(wide, window, shape, torch.bfloat16), rounded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "window"), SHAPES)
def test_a_kernel_makes_the_same_columns(with_kernels, shape, window, dtype):
    x = randn(*shape, dtype=dtype)
    x.view(-1)[::7] = -0.0
    x[0, 0, 0, 0, 0], x[-1, -1, -1, -1, -1] = torch.nan, torch.inf
    assert identical(im2col(x, window), with_kernels(im2col, x, window))
    apart = x.permute(0, 1, 4, 2, 3).contiguous().permute(0, 1, 3, 4, 2)  # as a model of the user's has them
    assert identical(im2col(x, window), with_kernels(im2col, apart, window))


@pytest.mark.parametrize(("given", "dtype"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(("shape", "window"), SHAPES)
def test_a_kernel_makes_the_same_gradient_of_images(with_kernels, shape, window, given, dtype):
    down, across = window.positions(*shape[2:4])
    size = shape[0], shape[1] * down * across, window.kernel[0] * window.kernel[1] * shape[4]
    g = randn(*size, dtype=given) * 2.0 ** torch.randint(-20, 20, size, generator=torch.Generator().manual_seed(3))
    g = g.to(given)
    g.view(-1)[::5] = -0.0
    g[0, 0, 0], g[-1, -1, -1] = torch.nan, torch.inf
    arguments = window, torch.Size(shape), dtype
    assert identical(col2im(g, *arguments), with_kernels(col2im, g, *arguments))


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "window"), LARGE)
def test_kernels_have_the_same_bits_at_the_sizes_of_training(monkeypatch, shape, window):
    x = randn(*shape, dtype=torch.bfloat16, device="cuda")
    made = im2col(x, window)
    g = randn(*made.shape, seed=1, device="cuda")
    images = col2im(g, window, x.shape, x.dtype)
    take_kernels(monkeypatch, "columns", taken=False)
    assert identical(made, im2col(x, window))
    del made
    for one, of, found in zip(
        g.view(*shape[:2], -1, g.shape[2]).unbind(1), x.split(1, 1), images.split(1, 1), strict=True
    ):
        assert identical(found, col2im(one, window, of.shape, x.dtype))


@pytest.mark.parametrize(
    "recipe", ["bf16", "nvfp4-sr-rht", "tetrajet", "wang-dge-occ", "averis", "metis", "tetrajet2-outcontrol"]
)
def test_a_convolution_has_the_same_bits(place, monkeypatch, recipe):
    if place.device == "cpu":  # nothing to compile
        monkeypatch.setattr(lanes, "backend", lambda device: PLAIN)
    x, w, b = randn(2, 2, 6, 5, 16), randn(2, 8, 3, 3, 16, seed=1), randn(2, 8, seed=2)

    def trained():
        numerics = LaneNumerics([Recipe.named(recipe)] * 2, [0, 1], place.device, dtype=torch.bfloat16)
        layer = QuantConv2d(w.to(place.device), b.to(place.device), numerics, 3, stride=2, padding=1)
        leaf = x.to(place.device, torch.bfloat16).requires_grad_()
        y = layer(leaf)
        y.backward(randn(*y.shape, seed=4, dtype=y.dtype).to(y.device))
        return [t.cpu() for t in (y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad)]

    take_kernels(monkeypatch, "columns", taken=False)
    expected = trained()
    take_kernels(monkeypatch, "columns")
    for here, there in zip(expected, trained(), strict=True):
        assert identical(here, there)
