"""A soft maximum in the place of the block maximum, and its gradient."""

import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.dse.estimator import Through
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.scale import E4M3, E8M0, FP32, UE5M3, TensorScale
from fp4dse.kernels import quantize
from fp4dse.kernels.quant.spec.estimators import through

SOFT = Quantizer(scale=FP32(), scaling="softmax")


def soft_maximum(x: np.ndarray, amax: np.ndarray) -> np.ndarray:
    """(amax/80) ln Σ exp(80 |x| / amax), float64 [blocks, 1]."""
    return amax + amax / 80 * np.log(np.exp(80 * (np.abs(x) / amax - 1)).sum(-1, keepdims=True))


@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_the_scale_follows_from_logsumexp(block):
    x = torch.randn(200, block, generator=torch.Generator().manual_seed(0))
    x[0] = 1.0
    got = quantize(x, Quantizer(block=block, scale=FP32(), scaling="softmax"))
    wide = x.double().numpy()
    z = soft_maximum(wide, np.abs(wide).max(-1, keepdims=True))
    assert np.allclose(got.scales.double().numpy(), z / 6, rtol=3e-7)
    assert got.scales[0].item() == pytest.approx((1 + np.log(block) / 80) / 6)
    expected = torch.round(x / got.scales * 2).abs()  # near zero the grid is uniform
    assert torch.equal((got.elements * 2).abs()[expected <= 3], expected[expected <= 3])


@pytest.mark.parametrize(
    "q",
    [
        SOFT,
        Quantizer(scale=E4M3(), tensor_scale=TensorScale(), scaling="softmax"),
        Quantizer(scale=UE5M3(), scaling="softmax"),
        Quantizer(block=32, scale=E8M0(rule="even"), scaling="softmax"),
    ],
)
def test_zeros_stay_zero_nan_stays_in_its_block_and_powers_of_two_only_move_the_scale(q):
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    x[1] = 0
    values = quantize(x, q).values
    assert (values[1] == 0).all()
    assert torch.equal(quantize(x * 64, q).values, values * 64)
    if q.tensor_scale is None:
        broken = x.clone()
        broken[0, 3] = float("nan")
        got = quantize(broken, q).values
        assert got[0, :16].isnan().all()
        assert torch.equal(got[1:], values[1:])


def test_the_softmax_is_its_gradient():
    random = np.random.default_rng(0)
    x, g = random.standard_normal((24, 16)).astype(np.float32), random.standard_normal((24, 16)).astype(np.float32)
    element = ELEMENTS["e2m1"]
    got = quantize(torch.tensor(x), SOFT)
    ours = through(
        *(t[None] for t in (torch.tensor(g), torch.tensor(x), got.elements, got.scales)),
        torch.ones(1),
        Through(scale="softmax"),
        element,
    )
    x, g, q, amax = x.astype(float), g.astype(float), got.elements.double().numpy(), np.abs(x).max(-1, keepdims=True)

    def loss(moved):
        s, s0 = soft_maximum(moved, amax) / 6, soft_maximum(x, amax) / 6
        return (g * s * (q + moved / s - x / s0)).sum(-1)

    for j in range(16):
        h = np.zeros_like(x)
        h[:, j] = 1e-6
        expected = (loss(x + h) - loss(x - h)) / 2e-6
        assert np.allclose(ours[0, :, j].numpy(), expected, rtol=1e-5, atol=1e-5)
