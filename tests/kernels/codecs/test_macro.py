"""Macro-block scaling is ALTO's: one mantissa factor per 128 elements, MXFP4 below it."""

import math

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import ConfigError, Quantizer
from fp4dse.dse.scale import E8M0
from fp4dse.kernels import quantize
from fp4dse.kernels.selftest import odd_blocks

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
MBS = Quantizer.named("mbs-mxfp4")
FITS = {  # the exponent is the smallest that fits
    "floor": lambda amax, e: amax < 8 * 2.0**e,
    "rceil": lambda amax, e: amax <= 6 * 2.0**e,
    "even": lambda amax, e: amax < 7 * 2.0**e,
}


def with_rule(rule: str, **changes) -> Quantizer:
    return msgspec.structs.replace(MBS, scale=E8M0(rule=rule), **changes)


def nearest(y: float) -> float:
    """The nearest E2M1 magnitude, ties to the even code."""
    code = min(range(8), key=lambda c: (abs(E2M1[c] - y), c % 2))
    return float(E2M1[code])


def factor_of(amax: np.float32) -> float:
    with np.errstate(divide="ignore", over="ignore"):
        ratio = float(np.float32(6) / amax)
    if not math.isfinite(ratio):
        return 1.0
    significand = 2 * math.frexp(ratio)[0]
    return 1 + math.floor((significand - 1) * 256) / 256


def oracle(x: np.ndarray, rule: str, block: int) -> tuple[np.ndarray, np.ndarray]:
    """One macro block of 128 float32: decoded values, and the factor."""
    f = factor_of(np.abs(x).max())
    decoded = []
    for part in x.reshape(-1, block):
        amax = float(np.float32(float(np.abs(part).max()) * f)) if np.abs(part).max() * f < 3.4e38 else math.inf
        e = -127
        while e < 127 and not FITS[rule](min(amax, 2.0**128), e):
            e += 1
        for value in part:
            y = float(np.float32(abs(float(value)) * f / 2.0**e))
            scale = np.float32(np.float32(2.0**e) / np.float32(f))
            decoded.append(np.copysign(np.float32(nearest(y)) * scale, value))
    return np.array(decoded, np.float32), np.float32(f)


@pytest.mark.parametrize("rule", FITS)
@pytest.mark.parametrize("block", [16, 32])
def test_values_and_factors_equal_a_plain_transcription(rule, block):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 128, generator=generator) * torch.logspace(-3, 3, 24)[:, None]
    x[8:16] = x[8:16].bfloat16().float()
    x = torch.cat([x, odd_blocks()[0, 8:20]])  # wide range, zero, subnormal, huge, an outlier
    got = quantize(x, with_rule(rule, block=block))
    for row, values, factor in zip(x.numpy(), got.values.numpy(), got.meta["factor"].numpy(), strict=True):
        expected, f = oracle(row, rule, block)
        assert factor == f
        assert np.array_equal(values, expected)


def test_worked_example():
    x = torch.zeros(1, 128)
    x[0, 40] = 3.7
    got = quantize(x, MBS)
    factor = 1 + math.floor(0.62162 * 256) / 256
    assert got.meta["factor"].tolist() == [factor] == [1.62109375]
    assert factor * 3.7 == pytest.approx(5.998, abs=1e-3)
    assert got.elements[0, 40] == 6
    assert got.values[0, 40].item() == pytest.approx(6 / 1.62109375, rel=1e-7)


def test_the_largest_element_of_a_macro_block_is_neither_clipped_nor_far_below_the_largest_code():
    amax = torch.linspace(1, 2, 5001)[:-1]
    x = torch.zeros(len(amax), 128)
    x[:, 77] = amax
    factor = quantize(x, MBS).meta["factor"]
    top = factor.double() * amax.double()  # 6 · 2^k, or up to 1/256 below, but for one rounding
    position = top / torch.where(top < 1.6, 1.5, 3)
    assert (position <= 1 + 2**-23).all()
    assert (position > 1 - 2**-8).all()


@pytest.mark.parametrize(("rule", "error"), [("floor", 1.217e-2), ("rceil", 1.183e-2), ("even", 1.175e-2)])
def test_gaussian_error_anchors(rule, error):
    x = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(0))
    got = quantize(x, with_rule(rule)).values
    assert float(((got - x) ** 2).sum() / (x**2).sum()) == pytest.approx(error, rel=0.01)


def test_nan_stays_in_its_macro_block():
    x = torch.randn(4, 128)
    x[1, 3], x[2, 100] = float("nan"), float("-inf")
    values = quantize(x, MBS).values
    assert values[1:3].isnan().all()
    assert torch.equal(values[[0, 3]], quantize(x[[0, 3]], MBS).values)


def test_a_contraction_that_macro_blocks_do_not_divide_is_named():
    with pytest.raises(ConfigError, match=r"x.shape\[-1\]: found 96; accepted: a multiple of the block size 128"):
        quantize(torch.ones(2, 96), MBS)
