"""What stands between the products has the bits of the functions that it stands for."""

import math

import pytest
import torch

from fp4dse.dse.training import AdamW
from fp4dse.kernels.arithmetic import activations, philox
from fp4dse.kernels.gemm import scaled
from fp4dse.tasks.optimizers import LaneOptimizer, Numbers, lanes


def same(here: torch.Tensor, there: torch.Tensor) -> bool:
    """The same bits, but for the kind of NaN and the sign of zero."""
    here, there = here.cpu(), there.cpu()
    both_nan = here.isnan() & there.isnan()
    return here.shape == there.shape and bool((both_nan | (here == there)).all())


def numbers(*shape: int) -> torch.Tensor:
    """Of every size, with zeros, subnormal numbers, infinities and a NaN."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-30, 8, shape, generator=g).float())
    flat = x.view(-1)
    flat[:9] = torch.tensor([0.0, -0.0, 1e-41, -1e-41, 88.0, -88.0, torch.inf, -torch.inf, torch.nan])
    return x


def test_silu_and_its_gradient(place):
    x, g = numbers(3, 700), torch.randn(3, 700)
    wanted = x.clone().requires_grad_()
    y = activations.silu(wanted)
    y.backward(g)
    assert same(place.pointwise.silu(x.to(place.device)), y.detach())
    assert same(place.pointwise.silu_gradient(x.to(place.device), g.to(place.device)), wanted.grad)


@pytest.mark.parametrize("stream", philox.STREAMS.values(), ids=philox.STREAMS)
def test_random_words(place, stream):
    seeds, step, site = torch.tensor([3, -5, 2**40 + 7]), torch.tensor(2**33 + 5), torch.tensor((1 << 28) + 77)
    there = [t.to(place.device) for t in (seeds, step, site)]
    for count in (1, 2, 200):
        expected = philox.words(seeds, stream, step, site, count)
        assert torch.equal(place.pointwise.words(there[0], stream, *there[1:], count).cpu(), expected)
        first = torch.tensor(41)
        expected = philox.words(seeds, stream, step, site, count, first)
        got = place.pointwise.words(there[0], stream, *there[1:], count, first.to(place.device))
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("size", [16, 128])
def test_signs(place, size):
    seeds, step, site = torch.tensor([3, -5, 2**40 + 7]), torch.tensor(2**33 + 5), torch.tensor(77)
    on_device, *keys = (t.to(place.device) for t in (seeds, step, site))
    got = place.pointwise.signs(on_device, philox.STREAMS["signs"], *keys, size)
    assert torch.equal(got.cpu(), philox.signs(seeds, step, site, size))


@pytest.mark.parametrize("both", [True, False])
def test_factors_of_a_product(place, both):
    x, a, b = numbers(3, 40, 9), torch.rand(3), torch.rand(3) if both else None
    got = place.pointwise.scale(x.clone().to(place.device), a.to(place.device), b if b is None else b.to(place.device))
    assert same(got, scaled(x, a, b))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(place, weight_decay, monkeypatch):
    model = torch.nn.Linear(1, 1)
    model.place = None  # its weight decays, its bias does not
    model.weight = torch.nn.Parameter(torch.randn(3, 40, 30))
    model.bias = torch.nn.Parameter(torch.randn(3, 7))
    numbers = [Numbers(AdamW(), decay, 0.9, 0.95, 1e-8, math.inf, 1.0) for decay in (weight_decay, 0.0, weight_decay)]
    eager = LaneOptimizer(model, torch.tensor([1e-3, 2e-3, 3e-2]), numbers, [1.0, 1.0, 0.5])
    alive = torch.tensor([True, False, True])
    before = eager.flat.clone()
    tensors = [t.to(place.device).clone() for t in (eager.flat, eager.kept["mean"], eager.kept["square"])]

    def fused(flat, mean, square, gradient, alive, numbers, decaying):
        rest = [None if t is None else t.to(place.device) for t in (gradient, alive, numbers, decaying)]
        adamw(*tensors, *rest)

    adamw = place.pointwise.adamw
    monkeypatch.setattr(place.pointwise, "adamw", fused)
    for step in range(3):
        g = torch.randn_like(eager.flat)
        for has_kernels in (True, False):  # the kernel with what it would be given, then the plain operations
            monkeypatch.setattr(lanes, "has_kernels", lambda _, has_kernels=has_kernels: has_kernels)
            eager.step(g, alive, torch.tensor([step]))
        for got, expected in zip(tensors, (eager.flat, eager.kept["mean"], eager.kept["square"]), strict=True):
            assert same(got, expected)
    assert torch.equal(eager.flat[1], before[1])
    assert not torch.equal(eager.flat[0], before[0])
