"""The decoder's operations against plain torch, values and gradients, and lanes against themselves in company."""

import pytest
import torch
import torch.nn.functional as F

from fp4dse.kernels.ops.embedding import embedding, sum_by_token
from fp4dse.kernels.ops.rms_norm import EPS, rms_norm
from fp4dse.kernels.ops.rope import rope, rope_tables

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(function, *inputs):
    """The output y, and the gradients of the inputs where that of y is y² - 0.3."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    out.backward((out * out - 0.3).detach())
    return [out.detach(), *(x.grad for x in inputs)]


def assert_close(ours, theirs, tolerance=1e-5):
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())


def assert_lanes_are_their_own(function, *inputs):
    """A lane has the same bits among 5 as among 2, at another place."""
    among = gradients(function, *inputs)
    few = gradients(function, *(x[[3, 1]] for x in inputs))
    for a, b in zip(among, few, strict=True):
        assert torch.equal(a[[3, 1]], b)


@pytest.mark.parametrize("width", [1, 7, 96])
def test_rms_norm_is_that_of_torch(width):
    x, gain = randn(3, 2, 5, width), randn(3, width, seed=1)

    def plain(x, gain):
        return torch.stack([F.rms_norm(a, (width,), b, eps=EPS) for a, b in zip(x, gain, strict=True)])

    assert_close(gradients(rms_norm, x, gain), gradients(plain, x, gain))


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norms_of_lanes_are_their_own(device):
    assert_lanes_are_their_own(rms_norm, randn(5, 3, 7, 24).to(device), randn(5, 24, seed=1).to(device))


def test_rope_turns_each_pair_by_its_angle():
    x = randn(2, 9, 8, dtype=torch.float64)
    as_complex = torch.complex(x[..., :4], x[..., 4:])
    angle = torch.arange(9.0, dtype=torch.float64)[:, None] * 10_000.0 ** -(torch.arange(4.0, dtype=torch.float64) / 4)
    turned = as_complex * torch.polar(torch.ones_like(angle), angle)
    assert torch.allclose(rope(x, *rope_tables(12, 8)), torch.cat([turned.real, turned.imag], -1), atol=1e-6)


def test_after_rope_products_depend_on_distances_alone():
    q, k = randn(1, 1, 16), randn(1, 1, 16, seed=1)
    q, k = (rope(x.expand(1, 40, 16), *rope_tables(40, 16))[0] for x in (q, k))
    products = q @ k.T
    assert torch.allclose(products[5, 3], products[35, 33], atol=1e-4)
    assert not torch.allclose(products[5, 3], products[5, 4], atol=1e-2)


@pytest.mark.parametrize("size", [1, 3, 50, 1000])
def test_embedding_is_that_of_torch(size):
    weight, tokens = randn(3, size, 8), torch.randint(size, (3, 4, 17), generator=torch.Generator().manual_seed(1))

    def plain(weight):
        return torch.stack([F.embedding(t, w) for t, w in zip(tokens, weight, strict=True)])

    assert_close(gradients(lambda w: embedding(w, tokens), weight), gradients(plain, weight), 1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_embeddings_of_lanes_are_their_own(device):
    tokens = torch.randint(30, (5, 200), generator=torch.Generator().manual_seed(1)).to(device)
    g = randn(5, 200, 8).to(device)
    among = sum_by_token(g, tokens, 30)
    assert torch.equal(among[[3, 1]], sum_by_token(g[[3, 1]], tokens[[3, 1]], 30))
    assert torch.equal(among.cpu(), sum_by_token(g.cpu(), tokens.cpu(), 30))


def test_gradients_of_a_token_do_not_depend_on_the_tokens_between():
    g = randn(1, 6, 4)
    together = sum_by_token(g, torch.tensor([[5, 5, 5, 1, 2, 3]]), 8)[0, 5]
    apart = sum_by_token(g[:, [3, 0, 4, 1, 5, 2]], torch.tensor([[1, 5, 2, 5, 3, 5]]), 8)[0, 5]
    assert torch.equal(together, apart)


def test_a_lane_with_nan_leaves_others_alone():
    g, tokens = randn(2, 20, 4), torch.arange(20).remainder(3).expand(2, 20)
    calm = sum_by_token(g, tokens, 4)
    g[0] = torch.nan
    assert torch.equal(sum_by_token(g, tokens, 4)[1], calm[1])
