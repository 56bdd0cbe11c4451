"""The kernels of the attention core compute what its definition says, each matrix in bits of its own."""

from functools import partial

import pytest
import torch

from fp4dse.kernels.ops.attention import attention, heads_joined

BF16, FP32 = torch.bfloat16, torch.float32
SIZES = [(1, 8), (17, 8), (64, 16), (65, 64), (129, 64), (256, 16), (300, 24), (70, 128)]


def drawn(*shape, seed=0):
    """q, k, v and a gradient, float32."""
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(seed)).unbind(0)


def computed(place, q, k, v, g, causal, dtype=FP32):
    """The output and the gradients of q, k, v, as the kernels have them, on the CPU."""
    q, k, v = (x.to(place.device, BF16) for x in (q, k, v))
    kernels = place.attention
    assert kernels.why_not(q, k, v) is None
    out, *kept = kernels.forward(q, k, v, causal, dtype, 1)
    gradients = kernels.backward(g.to(place.device, dtype), q, k, v, out, *kept, causal, (dtype,) * 3, 1)
    return [x.cpu() for x in (out, *gradients)]


def defined(q, k, v, g, causal):
    """The formulas of the definition, every number in float64 but for what is rounded to BF16."""

    def low(x):
        return x.to(BF16).double()

    scale = q.shape[-1] ** -0.5
    q, k, v, g = low(q), low(k), low(v), g.double()
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    p = torch.softmax(scores, -1)
    o = low(p) @ v
    ds = p * (low(g) @ v.mT - (g * o).sum(-1, keepdim=True))
    return o, low(ds) @ k * scale, low(ds).mT @ q * scale, low(p).mT @ low(g)


def in_torch(q, k, v, g, causal):
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*inputs, causal)
    out.backward(g)
    return [out.detach(), *(x.grad for x in inputs)]


def error(ours, theirs):
    """Relative, of norms."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True)]


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "size"), SIZES)
def test_they_compute_the_definition(place, length, size, causal):
    """A number near a tie may be rounded the other way, one in a few thousand; another rounding would change all."""
    inputs = drawn(2, length, size)
    got = computed(place, *inputs, causal)
    assert max(error(got, defined(*inputs, causal))) < 2e-4
    assert max(error(got, in_torch(*inputs, causal))) < 2e-4


def test_a_single_token_attends_to_itself(place):
    q, k, v, g = drawn(3, 1, 8)
    out, _, _, dv = computed(place, q, k, v, g, True)
    assert same([out, dv], [v.to(BF16).float(), g.to(BF16).float()])


def test_bf16_is_rounded_once(place):
    q, k, v, g = drawn(2, 70, 16)
    low = computed(place, q, k, v, g.to(BF16), True, BF16)
    wide = computed(place, q, k, v, g.to(BF16).float(), True)
    assert all(x.dtype == BF16 for x in low)
    assert torch.equal(low[0], wide[0].to(BF16))
    assert torch.equal(low[3], wide[3].to(BF16))  # dq and dk know the output, which was rounded
    assert max(error(low, wide)) < 5e-3


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's, of maxima
@pytest.mark.parametrize(("length", "size", "causal"), [(17, 8, False), (17, 8, True), (130, 16, True)])
def test_a_matrix_has_bits_of_its_own(place, length, size, causal):
    """Alone, among others, in another place, and beside one that has diverged."""
    inputs = drawn(3, length, size)
    among = computed(place, *inputs, causal)
    moved = computed(place, *(x[[2, 0]] for x in inputs), causal)
    assert same([x[[2, 0]] for x in among], moved)
    assert same([x[2:] for x in among], computed(place, *(x[2:] for x in inputs), causal))
    for x in inputs:
        x[1] = float("nan")
    beside = computed(place, *inputs, causal)
    assert same([x[::2] for x in among], [x[::2] for x in beside])
    assert all(x[1].isnan().all() for x in beside)


def test_views_have_the_bits_of_copies(place):
    q, k, v, g = drawn(3, 20, 16)
    joined = torch.cat([torch.zeros(3, 20, 3), q, k, v], dim=2).to(place.device, BF16)
    views = joined[:, :, 3:].split(16, dim=2)  # at addresses that are no multiples of 16 bytes
    out, *kept = place.attention.forward(*views, True, FP32, 1)
    strided = g.mT.contiguous().mT.to(place.device)
    gradients = place.attention.backward(strided, *views, out, *kept, True, (FP32,) * 3, 1)
    assert same([x.cpu() for x in (out, *gradients)], computed(place, q, k, v, g, True))


@pytest.mark.parametrize("causal", [False, True])
def test_scores_of_minus_infinity_weigh_nothing(place, causal):
    """A whole block of them too, which comes first."""
    q, k, v, g = drawn(1, 300, 16)
    q[:, 200:, 0], k[:, :150, 0], k[:, 150:, 0] = 1e20, -1e20, 0.0
    got, wanted = computed(place, q, k, v, g, causal)[0], in_torch(q, k, v, g, causal)[0]
    assert bool(wanted.isfinite().all())
    assert max(error([got], [wanted])) < 2e-4


@pytest.mark.parametrize("length", [20, 300])
def test_of_huge_scores_the_largest_weighs_one(place, length):
    q, k, v, g = drawn(2, length, 16)
    got, wanted = (f(1e15 * q, 1e15 * k, v, g, True)[0] for f in (partial(computed, place), in_torch))
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize(("length", "size", "dtype"), [(17, 8, FP32), (130, 16, BF16), (70, 12, FP32)])
def test_heads_that_lie_side_by_side_have_the_bits_of_heads_apart(place, heads, length, size, dtype):
    """Forward and backward, by the kernels and by the definition; of one head nothing moves."""
    q, k, v, g = drawn(2 * heads, length, size)
    apart = computed(place, q, k, v, g, True, dtype)
    low = [x.to(place.device, BF16) for x in (q, k, v)]
    out, *kept = place.attention.forward(*low, True, dtype, heads)
    assert out.shape == (2, length, heads * size)
    joined = heads_joined(g.to(place.device, dtype), heads)
    gradients = place.attention.backward(joined, *low, out, *kept, True, (dtype,) * 3, heads)
    assert torch.equal(out.cpu(), heads_joined(apart[0], heads))
    assert same([x.cpu() for x in gradients], apart[1:])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, True, heads)
    out.backward(heads_joined(g, heads))
    expected = in_torch(q, k, v, g, True)
    assert same([out.detach(), *(x.grad for x in leaves)], [heads_joined(expected[0], heads), *expected[1:]])
    assert heads_joined(q, 1) is q


def test_what_they_do_not_take_has_a_reason(place):
    q = torch.zeros(2, 3, 8)
    why_not = place.attention.why_not
    assert why_not(q, q[:, :2], q[:, :2]) == "q, k, v: found (2, 3, 8), (2, 2, 8), (2, 2, 8); accepted: one shape"
    assert "d up to 128" in why_not(*[torch.zeros(2, 3, 129)] * 3)
    assert "none of them 0" in why_not(*[q[:0]] * 3)


def test_heads_that_do_not_divide_n_are_refused(place):
    q, k, v = torch.zeros(3, 5, 4, 8, device=place.device)
    with pytest.raises(ValueError, match="q: found N = 5 with 2 heads"):
        attention(q, k, v, heads=2)
