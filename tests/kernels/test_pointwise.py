"""What stands between the products has the bits of the functions that it stands for."""

import math

import pytest
import torch

from fp4dse.dse.optimizer import AdamW
from fp4dse.kernels.ops import philox
from fp4dse.kernels.ops.max_abs import max_abs
from fp4dse.kernels.ops.products import scaled
from fp4dse.kernels.ops.rounded import keep_copy, refresh, rounded
from fp4dse.kernels.ops.rounded.copies import Copies
from fp4dse.kernels.ops.silu import silu
from fp4dse.kernels.ops.squared_error import mean_squared_error, squared_error
from fp4dse.kernels.ops.sums import lane_mean
from fp4dse.tasks.optimizers import LaneOptimizer, Numbers
from tests.kernels.comparing import take_kernels


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_silu_and_its_gradient(place, dtype):
    x, g = numbers(3, 700), torch.randn(3, 700).to(dtype)
    x[2] = torch.arange(-350, 350) * 2.0**-25  # where reciprocals of numbers just below 2 are hard to round
    x = x.to(dtype)
    wanted = x.clone().requires_grad_()
    y = silu(wanted)
    y.backward(g)
    assert same(place.silu.silu(x.to(place.device)), y.detach())
    assert same(place.silu.silu_gradient(x.to(place.device), g.to(place.device)), wanted.grad)


@pytest.mark.parametrize("of_lane", [True, False])
def test_squared_error_and_its_gradient(place, of_lane):
    out, y = numbers(3, 7, 50), torch.randn(3, 7, 50)
    g = torch.tensor([0.5, 0.0, 3.0])[:, None, None].expand_as(out) if of_lane else torch.randn(3, 7, 50)
    wanted, of_y = out.clone().requires_grad_(), y.clone().requires_grad_()
    error = wanted - of_y
    (error * error).backward(g)
    mine, mine_of_y = out.clone().requires_grad_(), y.clone().requires_grad_()
    found = squared_error(mine, mine_of_y)
    found.backward(g)
    assert same(found.detach(), (error * error).detach())
    assert same(mine.grad, wanted.grad)
    assert same(mine_of_y.grad, of_y.grad)
    there = out.to(place.device), y.to(place.device)
    expanded = g[:, :1, :1].to(place.device).expand_as(out) if of_lane else g.to(place.device)
    assert same(place.squared_error.squared_error(*there), found.detach())
    assert same(place.squared_error.squared_error_gradient(*there, expanded, torch.float32), wanted.grad)


def test_squared_error_of_one_target_for_all_is_left_to_the_definition(place):
    assert "shapes" in place.squared_error.why_not(torch.zeros(3, 4), torch.zeros(1, 4))
    assert "dtype" in place.squared_error.why_not(torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.float64))
    out, y = torch.randn(3, 4, requires_grad=True), torch.randn(1, 4)
    squared_error(out, y).sum().backward()
    assert torch.equal(out.grad, 2 * (out - y).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 9), (64, 128), (3, 67, 23)], ids=str)
def test_mean_squared_error_is_the_mean_of_squared_errors(place, monkeypatch, dtype, shape):
    """The order of its sum and what is rounded to BF16 are those of separate steps."""
    out, y, weight = torch.randn(3, *shape).to(dtype), torch.randn(3, *shape), torch.tensor([1.0, -3.0, 1e-30])
    out[2].view(-1)[-1] = torch.inf
    wanted = out.clone().requires_grad_()
    error = wanted.to(torch.float32) - y
    mean = lane_mean(error * error)
    (mean * weight).sum().backward()
    for device, taken in (("cpu", False), (place.device, True)):
        take_kernels(monkeypatch, "squared_error", "sums", taken=taken)
        found = out.to(device, copy=True).requires_grad_()
        loss = mean_squared_error(found, y.to(device))
        assert same(loss.detach(), mean.detach())
        (loss * weight.to(device)).sum().backward()
        assert found.grad.dtype == dtype
        assert same(found.grad, wanted.grad)


@pytest.mark.parametrize("size", [5, 4096, 9001])
def test_numbers_of_lanes_that_lie_apart_are_rounded_as_any_others(place, size):
    x = numbers(3, size + 700)[:, 300 : 300 + size]
    out = torch.empty(3, size, dtype=torch.bfloat16, device=place.device)
    assert same(place.rounded.rounded(x.to(place.device), out), x.to(torch.bfloat16))
    assert rounded(x, torch.float32) is x
    assert same(rounded(x, torch.bfloat16), x.to(torch.bfloat16))


@pytest.mark.parametrize("size", [1, 700, 8192, 20_000])
def test_the_largest_magnitude_of_a_lane(place, size):
    x = torch.randn(4, size)
    x[1, -1], x[2, size // 2], x[3, 0] = -9.0, torch.inf, -torch.nan
    expected = x.double().abs().amax(1).float()
    assert same(max_abs(x), expected)
    got = place.max_abs.max_abs(x.to(place.device))
    assert same(got, expected)
    assert same(place.max_abs.max_abs(x[1:2].to(place.device)), got[1:2])


@pytest.mark.parametrize("stream", philox.STREAMS.values(), ids=philox.STREAMS)
def test_random_words(place, stream):
    seeds, step, site = torch.tensor([3, -5, 2**40 + 7]), torch.tensor(2**33 + 5), torch.tensor((1 << 28) + 77)
    there = [t.to(place.device) for t in (seeds, step, site)]
    for count in (1, 2, 200):
        expected = philox.words(seeds, stream, step, site, count)
        assert torch.equal(place.philox.words(there[0], stream, *there[1:], count).cpu(), expected)
        first = torch.tensor(41)
        expected = philox.words(seeds, stream, step, site, count, first)
        got = place.philox.words(there[0], stream, *there[1:], count, first.to(place.device))
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("size", [16, 128])
def test_signs(place, size):
    seeds, step, site = torch.tensor([3, -5, 2**40 + 7]), torch.tensor(2**33 + 5), torch.tensor(77)
    on_device, *keys = (t.to(place.device) for t in (seeds, step, site))
    got = place.philox.signs(on_device, philox.STREAMS["signs"], *keys, size)
    assert torch.equal(got.cpu(), philox.signs(seeds, step, site, size))


@pytest.mark.parametrize("both", [True, False])
def test_factors_of_a_product(place, both):
    x, a, b = numbers(3, 40, 9), torch.rand(3), torch.rand(3) if both else None
    apart = torch.full((3, 400), 7.0, device=place.device)
    apart[:, 8:368] = x.flatten(1)
    lying = apart[:, 8:368].view(x.shape)
    got = place.products.scale(lying, a.to(place.device), b if b is None else b.to(place.device))
    assert got is lying
    assert same(got, scaled(x, a, b))
    assert (apart[:, :8] == 7).all()
    assert (apart[:, 368:] == 7).all()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw(place, weight_decay, monkeypatch):
    g = torch.Generator().manual_seed(1)
    weight, bias, *gradients = (torch.randn(3, *size, generator=g) for size in ((40, 30), (7,), *[(1207,)] * 3))
    numbers = [Numbers(AdamW(), decay, 0.9, 0.95, 1e-8, math.inf, 1.0) for decay in (weight_decay, 0.0, weight_decay)]
    alive = torch.tensor([True, False, True], device=place.device)

    def optimizer():
        model = torch.nn.Linear(1, 1)
        model.place = None  # its weight decays, its bias does not
        model.weight, model.bias = (torch.nn.Parameter(t.to(place.device)) for t in (weight, bias))
        return LaneOptimizer(model, torch.tensor([1e-3, 2e-3, 3e-2], device=place.device), numbers, [1.0, 1.0, 0.5])

    plain, kernels = optimizer(), optimizer()
    before = plain.flat.clone()
    for step, gradient in enumerate(gradients):
        for taken, one in ((False, plain), (True, kernels)):
            take_kernels(monkeypatch, "adamw", taken=taken)
            one.step(gradient.to(place.device), alive, torch.tensor([step], device=place.device))
        for name in ("mean", "square"):
            assert same(plain.kept[name], kernels.kept[name])
        assert same(plain.flat, kernels.flat)
    assert torch.equal(plain.flat[1], before[1])
    assert not torch.equal(plain.flat[0], before[0])


@pytest.mark.parametrize("sizes", [(64, 1024, 8, 3000), (5, 3, 700, 1, 2400)], ids=["aligned", "odd"])
def test_adamw_writes_copies_of_the_weights_that_have_one(place, sizes):
    """Of the second and of the last two tensors: within a tile, over several, and beside others of the same tile."""
    length, has = sum(sizes), [False, True, *[False] * (len(sizes) - 4), True, True]
    flat, gradient, mean = (x[..., :length].to(place.device) for x in numbers(3, 3, length + 1))
    flat = flat.nan_to_num(0.1, 3.0, -3.0).contiguous()
    square, constants = torch.rand(3, length, device=place.device), torch.rand(3, 9, device=place.device) + 0.1
    tensors, starts = flat.split(sizes, 1), [sum(sizes[:i]) for i in range(len(sizes))]
    chosen = [i for i, one in enumerate(has) if one]
    copies = Copies([(tensors[i], starts[i]) for i in chosen], length)
    assert copies.is_aligned == (sizes[0] == 64)
    alive, before = torch.tensor([True, False, True], device=place.device), flat.clone()
    place.adamw.adamw(flat, mean.contiguous(), square, gradient, alive, constants, None, copies)
    assert torch.equal(flat[1], before[1])
    assert not torch.equal(flat[0], before[0])
    for i in chosen:
        expected = tensors[i].to(torch.bfloat16)
        assert same(rounded(tensors[i], torch.bfloat16), expected)
        begin = int(copies.places[chosen.index(i), 2])
        assert same(copies.values[begin : begin + expected.numel()].view(expected.shape), expected)


def test_a_copy_is_read_while_it_is_as_new_as_its_tensor():
    x, values = torch.randn(3, 4, 5), torch.zeros(3, 4, 5, dtype=torch.bfloat16)
    keep_copy(x, values)
    assert torch.equal(rounded(x, torch.bfloat16), x.to(torch.bfloat16))
    refresh(x)
    assert rounded(x, torch.bfloat16) is values
    assert torch.equal(values, x.to(torch.bfloat16))
    values.zero_()
    refresh(x)
    assert not values.any()
    x.detach()[1] += 1
    assert torch.equal(rounded(x, torch.bfloat16), x.to(torch.bfloat16))
    refresh(x)
    assert rounded(x, torch.bfloat16) is values
    assert torch.equal(values, x.to(torch.bfloat16))
    keep_copy(x, None)
    assert rounded(x, torch.bfloat16) is not values
