"""Norms and their gradients are single IEEE operations: numpy, which rounds each of its own once, has their bits."""

import numpy as np
import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.ops.group_norm import group_norm
from fp4dse.kernels.ops.layer_norm import layer_norm
from fp4dse.kernels.ops.rms_norm import rms_norm
from fp4dse.tasks.vision.resnet import BatchNorm

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
EPS = np.float32(1e-5)


def tree(x, axis):
    """The sum along an axis, which stays: first half + second half, until one is left. Odd middles carry over."""
    while (n := x.shape[axis]) > 1:
        head, middle, second = np.split(x, [n // 2, n - n // 2], axis)
        x = np.concatenate([head + second, middle], axis)
    return x


def root(x):
    """Rounded once: a root in float64 is farther from any midpoint of float32 than its own error."""
    assert x.dtype == np.float32
    return np.sqrt(x.astype(np.float64)).astype(np.float32)


def mean(x, axis):
    return tree(x, axis) / np.float32(x.shape[axis])


def standard(x, axis):
    centred = x - mean(x, axis)
    variance = mean(centred * centred, axis)
    inverse = np.float32(1) / root(variance + EPS)
    return centred * inverse, inverse, variance


def through(g, out, inverse, axis):
    return (g - mean(g, axis) - out * mean(g * out, axis)) * inverse


def of_group(sums, groups, pixels):
    """Sums over pixels [N, C] -> what each channel [N, 1, C] has for the mean of its group."""
    total = tree(sums.reshape(len(sums), groups, -1), 2)
    share = sums.shape[1] // groups
    return (total / np.float32(pixels * share)).repeat(share, 2).reshape(len(sums), 1, -1)


def standard_images(x, groups):
    """Of x [N, P, C]: out, inverse, variance, with sums over pixels first."""
    centred = x - of_group(tree(x, 1)[:, 0], groups, x.shape[1])
    variance = of_group(tree(centred * centred, 1)[:, 0], groups, x.shape[1])
    inverse = np.float32(1) / root(variance + EPS)
    return centred * inverse, inverse, variance


def through_images(g, out, inverse, groups, gain):
    """Gradients of x, gain [N, C] and shift."""
    d_gain, d_shift = tree(g * out, 1)[:, 0], tree(g, 1)[:, 0]
    along, level = (of_group(d * gain, groups, g.shape[1]) for d in (d_gain, d_shift))
    return (g * gain[:, None] - level - out * along) * inverse, d_gain, d_shift


def run(function, device, *inputs):
    """g, and of a device: the output, and the gradients of the inputs where that of the output is g."""
    leaves = [t.to(device, copy=True).requires_grad_() for t in inputs]
    out = function(*leaves)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    out.backward(g.to(device))
    return g.numpy(), [out.detach(), *(leaf.grad for leaf in leaves)]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def assert_same_bits(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert b.dtype == np.float32
        assert torch.equal(a.cpu(), torch.from_numpy(np.ascontiguousarray(b)))


@DEVICES
@pytest.mark.parametrize("width", [1, 7, 24, 64])
def test_layer_norms(device, width):
    x = randn(5, 6, 7, width)
    g, ours = run(layer_norm, device, x)
    out, inverse, _ = standard(x.numpy(), 3)
    assert_same_bits(ours, [out, through(g, out, inverse, 3)])


@DEVICES
@pytest.mark.parametrize("tokens", [1, 9])
def test_layer_norms_with_gain_and_shift_of_each_image(device, tokens):
    x, gain, shift = randn(2, 3, tokens, 20), randn(2, 3, 20, seed=1), randn(2, 3, 20, seed=2)
    g, ours = run(layer_norm, device, x, gain, shift)
    a, b = (t.numpy()[:, :, None] for t in (gain, shift))
    out, inverse, _ = standard(x.numpy(), 3)
    sums = tree(g * out, 2)[:, :, 0], tree(g, 2)[:, :, 0]
    assert_same_bits(ours, [out * a + b, through(g * a, out, inverse, 3), *sums])


@DEVICES
@pytest.mark.parametrize("size", [3, 4])
def test_group_norms(device, size):
    x = randn(3, 5, size, size, 12)
    g, ours = run(lambda t: group_norm(t, 4), device, x)
    rows, g = x.numpy().reshape(15, size * size, 12), g.reshape(15, size * size, 12)
    out, inverse, _ = standard_images(rows, 4)
    dx, *_ = through_images(g, out, inverse, 4, np.ones((15, 12), np.float32))
    assert_same_bits(ours, [t.reshape(x.shape) for t in (out, dx)])


@DEVICES
def test_group_norms_with_gain_and_shift_of_each_image(device):
    x, gain, shift = randn(2, 3, 5, 4, 12), randn(2, 3, 12, seed=1), randn(2, 3, 12, seed=2)
    g, ours = run(lambda x, gain, shift: group_norm(x, 4, gain, shift), device, x, gain, shift)
    rows, g, a, b = (
        t.reshape(6, *shape, 12) for t, shape in ((x.numpy(), [20]), (g, [20]), (gain.numpy(), []), (shift.numpy(), []))
    )
    out, inverse, _ = standard_images(rows, 4)
    dx, *sums = through_images(g, out, inverse, 4, a)
    wanted = out * a[:, None] + b[:, None], dx, *sums
    assert_same_bits(ours, [t.reshape(like.shape) for t, like in zip(wanted, ours, strict=True)])


@DEVICES
def test_batch_norms_while_they_train_and_after(device):
    x, gain, shift = randn(3, 41, 6), randn(3, 6, seed=1), randn(3, 6, seed=2)
    lanes = LaneNumerics([Recipe.named("bf16")] * 3, range(3), device)
    norm = BatchNorm(gain.clone(), shift.clone(), lanes).to(device)
    lanes.training = True
    g, (y, dx) = run(norm, device, x)
    a, b = gain.numpy()[:, None], shift.numpy()[:, None]
    out, inverse, variance = standard_images(x.numpy(), 6)
    ours = y, dx, norm.gain.grad, norm.shift.grad
    assert_same_bits(ours, [out * a + b, *through_images(g, out, inverse, 6, gain.numpy())])

    kept, new = np.float32(0.9), np.float32(0.1)
    running = np.zeros_like(a) * kept + mean(x.numpy(), 1) * new
    spread = np.ones_like(a) * kept + variance * np.float32(41 / 40) * new
    assert_same_bits([norm.mean, norm.variance], [running[:, 0], spread[:, 0]])
    lanes.training = False
    inverse = np.float32(1) / root(spread + EPS)
    assert_same_bits([norm(x.to(device)).detach()], [(x.numpy() - running) * inverse * a + b])


@DEVICES
@pytest.mark.parametrize("width", [1, 7, 96])
def test_rms_norms(device, width):
    x, gain = randn(3, 2, 50, width), randn(3, width, seed=1)
    g, ours = run(rms_norm, device, x, gain)
    wide, scale = x.numpy(), gain.numpy()[:, None, None]
    share = np.float32(1 / width)
    inverse = np.float32(1) / root(tree(wide * wide, 3) * share + EPS)
    out = wide * inverse
    inner = g * scale
    dx = (inner - out * (tree(inner * out, 3) * share)) * inverse
    assert_same_bits(ours, [out * scale, dx, tree((g * out).reshape(3, 100, width), 1)[:, 0]])
