"""Parts of image models compute what torch's own do, and a lane's part does not depend on how many there are."""

import pytest
import torch
import torch.nn.functional as F

from fp4dse.dse import Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.kernels import LaneNumerics, QuantConv2d, QuantLinear
from fp4dse.kernels.ops.affine import affine
from fp4dse.kernels.ops.group_norm import group_norm
from fp4dse.kernels.ops.layer_norm import layer_norm
from fp4dse.tasks import nn
from fp4dse.tasks.threads import torch_threads
from fp4dse.tasks.vision.resnet import BatchNorm


def numerics(lanes=3):
    return LaneNumerics([Recipe.named("bf16")] * lanes, range(lanes))


def first(x):
    """Channels first, lanes folded into the batch, as torch has images."""
    return x.flatten(0, 1).permute(0, 3, 1, 2)


def gradients(function, *inputs):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = function(*leaves)
    torch.manual_seed(1)
    out.backward(torch.randn_like(out))
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def close(ours, theirs, tolerance=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def test_batch_norm_is_that_of_torch_in_each_lane():
    torch.manual_seed(0)
    x, gain, shift = torch.randn(3, 4, 5, 5, 6) * 3 + 1, torch.rand(3, 6) + 0.5, torch.randn(3, 6)
    lanes = numerics()
    ours = BatchNorm(gain.clone(), shift.clone(), lanes)
    theirs = [torch.nn.BatchNorm2d(6) for _ in range(3)]
    for lane, norm in enumerate(theirs):
        norm.weight.data, norm.bias.data = gain[lane].clone(), shift[lane].clone()
    for training in (True, True, False):
        lanes.training = training
        inputs = x.clone().requires_grad_()
        out = ours(inputs)
        out.backward(torch.arange(out.numel()).view_as(out) % 7 - 3.0)
        for lane, norm in enumerate(theirs):
            norm.train(training)
            twin = x[lane].clone().requires_grad_()
            wanted = norm(twin.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            wanted.backward((torch.arange(out.numel()).view_as(out) % 7 - 3.0)[lane])
            close((out[lane], inputs.grad[lane]), (wanted, twin.grad), 2e-5)
            close((ours.mean[lane], ours.variance[lane]), (norm.running_mean, norm.running_var))
            close((ours.gain.grad[lane], ours.shift.grad[lane]), (norm.weight.grad, norm.bias.grad), 1e-4)


def test_group_norm_is_that_of_torch():
    x = torch.randn(2, 3, 4, 4, 16)
    ours = gradients(lambda t: first(group_norm(t, 4)), x)
    theirs = gradients(lambda t: F.group_norm(first(t), 4), x)
    close(ours, theirs)


@pytest.mark.parametrize("size", [6, 7])
def test_pools_are_those_of_torch(size):
    x = torch.randn(2, 3, size, size, 4).abs()
    close(gradients(lambda t: first(nn.max_pool(t)), x), gradients(lambda t: F.max_pool2d(first(t), 2), x))
    wanted = F.max_pool2d(first(x), 3, 2, 1)
    close([first(nn.max_pool_overlapping(x))], [wanted])
    close([nn.mean_pool(x).flatten(0, 1)], [first(x).mean((2, 3))])


def test_doubling_is_the_nearest_neighbour_of_torch():
    x = torch.randn(2, 3, 4, 5, 6)
    wanted = gradients(lambda t: F.interpolate(first(t), scale_factor=2, mode="nearest"), x)
    close(gradients(lambda t: first(nn.upsampled(t)), x), wanted)


def test_patches_are_cut_and_joined():
    x = torch.arange(2 * 3 * 4 * 6 * 2).view(2, 3, 4, 6, 2)
    cut = nn.patches(x, 2)
    assert cut.shape == (2, 3, 6, 8)
    assert torch.equal(cut[0, 0, 1], x[0, 0, 0:2, 2:4].flatten())
    assert torch.equal(nn.unpatched(cut, 2, (4, 6, 2)), x)


def test_affine_has_the_gradients_of_its_formula():
    x, gain, shift = torch.randn(3, 7, 5), torch.randn(3, 5), torch.randn(3, 5)
    close(gradients(affine, x, gain, shift), gradients(lambda a, b, c: a * b[:, None] + c[:, None], x, gain, shift))


class Threefold:
    """In place of a layer: queries, keys and values are what comes in."""

    def __init__(self, lanes):
        self.numerics, self.layer = numerics(lanes), 0

    def __call__(self, x):
        return torch.cat([x] * 3, -1)


@pytest.mark.parametrize(
    "part",
    [
        lambda x: group_norm(x, 4),
        lambda x: layer_norm(x.flatten(2)),
        lambda x: nn.self_attention(Threefold(len(x)), x.flatten(2, 3), 2),
        lambda x: BatchNorm(torch.ones(len(x), 8), torch.ones(len(x), 8), numerics(len(x)))(x),
        nn.max_pool,
        nn.max_pool_overlapping,
        nn.mean_pool,
        nn.upsampled,
    ],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_lane_has_the_same_bits_in_any_company(part, threads):
    with torch_threads(threads):
        torch.manual_seed(0)
        x = torch.randn(7, 9, 6, 6, 8)

        def run(chosen):
            leaf = x[chosen].clone().requires_grad_()
            out = part(leaf)
            out.backward(out.detach() * out.detach() + 1)
            return out.detach(), leaf.grad

        together = run(list(range(7)))
        for chosen in ([3, 1], [6, 0, 2], [1, 2, 3, 4, 5]):
            for few, of_all in zip(run(chosen), together, strict=True):
                assert torch.equal(few, of_all[chosen])


def test_layers_know_their_place():
    shapes = {
        "stem": (4, 3, 3, 1),
        "block0.conv1": (4, 3, 3, 4),
        "block0.skip": (4, 1, 1, 4),
        "block1.qkv": (12, 4),
        "block1.time": (4, 4),
    }
    made = nn.make_layers(nn.initial_weights([0, 1], shapes, {}), numerics(2), 2)
    assert [layer.place for layer in made.values()] == [
        Place("embedding", None, 2, name="stem"),
        Place("conv", 0, 2, "spatial", name="block0.conv1"),
        Place("conv", 0, 2, "pointwise", name="block0.skip"),
        Place("attention", 1, 2, "qkv", name="block1.qkv"),
        Place("linear", 1, 2, name="block1.time"),
    ]
    assert [type(layer) for layer in made.values()] == [QuantConv2d, QuantConv2d, QuantConv2d, QuantLinear, QuantLinear]
    assert len({layer.layer for layer in made.values()}) == 5


def test_weights_have_the_variance_that_was_asked_for_and_a_seed_its_own():
    drawn = nn.initial_weights([3, 4], {"a": (64, 3, 3, 16), "block0.b": (8, 16)}, {"a": 2.0}, biased=("b",))
    assert set(drawn) == {"a.w", "block0.b.w", "block0.b.b"}
    assert float(drawn["a.w"].std()) == pytest.approx(2 / 12, rel=0.02)
    assert torch.equal(drawn["a.w"][1], nn.initial_weights([4], {"a": (64, 3, 3, 16)}, {"a": 2.0})["a.w"][0])
