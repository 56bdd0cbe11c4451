"""One kernel for each of the decoder's operations has the bits of the plain functions, forward and backward."""

import pytest
import torch

from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.ops.embedding import sum_by_token
from fp4dse.kernels.ops.rms_norm import added_rms_norm, rms_norm
from fp4dse.kernels.ops.rope import heads_apart, rope_tables
from fp4dse.kernels.ops.swiglu import swiglu
from fp4dse.tasks.language.decoder import Decoder, Shape
from tests.kernels.comparing import comparer, randn, same, take_kernels

GROUPED = {"kv_heads": 1, "head_width": 12, "qkv_bias": True, "out_bias": True, "qk_norm": True, "tied": True}
DECODER = "rms_norm", "rope", "swiglu", "embedding"

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 2, 3, 40, 96, 128, 1000, 2048]


@pytest.fixture
def check(place, monkeypatch):
    return comparer(place, monkeypatch, *DECODER)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(check, width, dtype):
    for lanes, *rows in ([1, 1], [3, 3, 7], [2, 8]):
        check(rms_norm, randn(lanes, *rows, width, dtype=dtype), randn(lanes, width, seed=1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 128])
def test_rms_norm_of_a_sum(check, width, dtype):
    h, branch = (randn(3, 2, 9, width, seed=seed, dtype=dtype) for seed in (1, 2))
    check(added_rms_norm, h, branch, randn(3, width, seed=3))
    check(lambda *inputs: added_rms_norm(*inputs)[1], h, branch, randn(3, width, seed=3))  # only the norm is used


def test_rms_norm_of_what_does_not_lie_in_one_piece(check):
    x, gains = randn(3, 40, 9), randn(3, 100, seed=1)
    check(lambda x, gains: rms_norm(x.mT, gains[:, 7:47]), x, gains)


def test_rms_norm_of_large_small_and_strange_numbers(check):
    x = randn(2, 9, 40) * torch.exp2(torch.arange(-160, 200).view(9, 40).remainder(97) - 48.0)
    x[1, 0, 0], x[1, 1, 3], x[1, 2] = torch.nan, torch.inf, 0.0
    (y,), (dx, d_gain) = check(rms_norm, x, randn(2, 40, seed=1))
    assert all(found[0].isfinite().all() for found in (y, dx, d_gain))  # NaN stays in its lane


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "size"), [(1, 2), (3, 10), (4, 32), (2, 64)])
def test_heads(check, heads, size, dtype):
    for lanes, batch, length in ((1, 1, 1), (2, 3, 5), (2, 1, 67)):
        qkv = randn(lanes, batch, length, 3 * heads * size, dtype=dtype)
        check(lambda qkv: heads_apart(qkv, heads, *rope_tables(70, size, qkv.device)), qkv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 40, 352])
def test_swiglu(check, width, dtype):
    x = 8 * randn(3, 2, 5, 2 * width, dtype=dtype)
    check(swiglu, x)
    x[1, 0, 0, 0] = torch.nan
    (y,), (dx,) = check(swiglu, x)
    assert not any(found[[0, 2]].isnan().any() for found in (y, dx))


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (63, 2), (64, 1), (65, 1), (200, 1), (700, 3), (90, 60)])
@pytest.mark.parametrize("width", [3, 100])
def test_sums_by_token(place, monkeypatch, rows, size, width):
    g = randn(2, rows, width)
    g[1, 0, 0] = torch.nan
    tokens = torch.randint(size, (2, rows), generator=torch.Generator().manual_seed(1)) ** 2 // size
    expected = sum_by_token(g, tokens, size)
    take_kernels(monkeypatch, "embedding")
    assert same(expected, sum_by_token(g.to(place.device), tokens.to(place.device), size))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("more", [{}, {"experts": 4}, GROUPED], ids=["dense", "experts", "grouped"])
def test_a_decoder(place, monkeypatch, more, dtype):
    shape, seeds, vocabulary = Shape(32, 48, 2, 2, 16, **more), [0, 1], 20
    tokens = torch.randint(vocabulary, (2, 2, 16), generator=torch.Generator().manual_seed(1)).to(place.device)

    def trained():
        numerics = LaneNumerics([Recipe.named("bf16")] * 2, seeds, place.device, dtype=dtype)
        parameters = {name: x.to(place.device) for name, x in shape.initial(vocabulary, seeds).items()}
        model = Decoder(shape, parameters, numerics)
        logits, balance = model(tokens)
        weights = randn(*logits.shape, dtype=logits.dtype).to(place.device)
        ((logits * weights).to(torch.float32).sum() + balance.sum()).backward()
        return [logits.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]

    take_kernels(monkeypatch, *DECODER, taken=False)
    expected = trained()
    take_kernels(monkeypatch, *DECODER)
    for here, there in zip(expected, trained(), strict=True):
        assert same(here, there)
