"""The attention core computes what torch's does, with BF16 operands, in any chunks and in any company."""

import pytest
import torch
import torch.nn.functional as F

from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.ops import attention as module
from fp4dse.kernels.ops.attention import attention
from fp4dse.tasks.nn import self_attention
from fp4dse.tasks.threads import torch_threads

BF16 = torch.bfloat16


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gradients(function, *inputs):
    """The output y, and the gradients of the inputs where that of y is y² - 0.3."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    out.backward((out * out - 0.3).detach())
    return [out.detach(), *(x.grad for x in inputs)]


def written_out(q, k, v, causal):
    """The formulas of the module, every number in float64 but for what is rounded to BF16."""

    def low(x):
        return x.to(BF16).double()

    scale = q.shape[-1] ** -0.5
    q, k, v = low(q), low(k), low(v)
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    p = torch.softmax(scores, -1)
    o = low(p) @ v
    do = o * o - 0.3
    ds = p * (low(do) @ v.mT - (do * o).sum(-1, keepdim=True))
    return o, low(ds) @ k * scale, low(ds).mT @ q * scale, low(p).mT @ low(do)


def error(ours, theirs):
    """Relative, of norms."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "chunk"), [(8, 8), (9, 8), (21, 8), (21, 64)])
def test_operands_are_rounded_to_bf16_and_nothing_else_is(monkeypatch, length, chunk, causal):
    """A number near a tie may be rounded the other way, one in a few thousand; another rounding would change all."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    qkv = [randn(4, length, 24, seed=i) for i in range(3)]
    got = gradients(lambda *x: attention(*x, causal), *qkv)
    assert max(error(got, written_out(*qkv, causal))) < 2e-4

    def plain(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    far = error(got, gradients(plain, *qkv))
    assert min(far) > 5e-4
    assert max(far) < 3e-2


def test_a_single_token_attends_to_itself():
    q, k, v = (randn(3, 1, 8, seed=i) for i in range(3))
    assert torch.equal(attention(q, k, v), v.to(BF16).float())


def test_bf16_comes_out_where_it_went_in():
    qkv = [randn(4, 21, 16, seed=i).to(BF16) for i in range(3)]
    for low, wide in zip(gradients(attention, *qkv), gradients(attention, *(x.float() for x in qkv)), strict=True):
        assert low.dtype == BF16
        assert float((low - wide).norm() / wide.norm()) < 1e-2  # the gradient of y is rounded too


class AsItIs:
    """In place of a projection: queries, keys and values are what comes in."""

    def __init__(self, numerics):
        self.numerics, self.layer = numerics, 0

    def __call__(self, x):
        return x


def test_samples_of_images_attend_by_head():
    qkv = randn(2, 3, 5, 24)
    q, k, v = (part.view(2, 3, 5, 2, 4).transpose(2, 3) for part in qkv.split(8, dim=-1))
    wanted = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).flatten(3)
    numerics = LaneNumerics([Recipe.named("bf16")] * 2, [0, 1])
    assert max(error([self_attention(AsItIs(numerics), qkv, 2)], [wanted])) < 1e-2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("length", [32, 300])
@pytest.mark.parametrize(
    ("device", "threads"), [("cpu", 1), ("cpu", 2), pytest.param("cuda", 1, marks=pytest.mark.gpu)]
)
def test_attention_of_lanes_is_their_own(length, device, threads, dtype, causal):
    def folded(q, k, v):
        return attention(*(x.reshape(-1, length, 16) for x in (q, k, v)), causal).view(q.shape)

    qkv = [randn(5, 2, 3, length, 16, seed=i).to(device, dtype) for i in range(3)]
    with torch_threads(threads):
        among, few = gradients(folded, *qkv), gradients(folded, *(x[[3, 1]] for x in qkv))
    for a, b in zip(among, few, strict=True):
        assert torch.equal(a[[3, 1]], b)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "size"), [(16, 8), (300, 64), (20, 160)])
def test_a_gpu_computes_the_same_by_kernels_where_they_take_the_heads(length, size, causal):
    qkv = [randn(4, length, size, seed=i) for i in range(3)]
    there = [x.cuda() for x in qkv]
    assert (module._ATTENTION.kernels(*there) is not None) == (size <= 128)
    got = [x.cpu() for x in gradients(lambda *x: attention(*x, causal), *there)]
    assert max(error(got, written_out(*qkv, causal))) < 5e-4
