"""`luq` is LUQ (arXiv 2112.10769): stochastic pruning below alpha and logarithmic stochastic rounding above it."""

import pytest
import torch

from fp4dse.dse import Quantizer
from fp4dse.kernels import quantize

LUQ = Quantizer.named("luq")


def drawn(points: torch.Tensor, n: int) -> torch.Tensor:
    """n draws of each point [n, points], in a tensor whose largest magnitude is 1: alpha = 2^-6."""
    rows = torch.ones(n, 1 + len(points))
    rows[:, 1:] = points
    got = quantize(rows, LUQ, seed=1)
    assert got.scales.item() == 2.0**-4
    return got.values[:, 1:].double()


def test_seven_magnitudes_lie_between_alpha_and_the_maximum():
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    values = quantize(x / x.abs().max(), LUQ).values
    assert values.abs().unique().tolist() == [0, *(2.0**-k for k in range(6, -1, -1))]


def test_below_alpha_x_becomes_alpha_with_probability_x_over_alpha():
    alpha, n = 2.0**-6, 40000
    share = torch.tensor([0.01, 0.1, 0.5, 0.75, 0.99])
    values = drawn(share * alpha, n)
    assert set(values.unique().tolist()) == {0, alpha}
    assert ((values == alpha).double().mean(0) - share).abs().max() < 5 * 0.5 / n**0.5


def test_above_alpha_x_goes_to_the_upper_power_with_the_probability_of_its_fraction():
    n, low = 40000, torch.tensor([2.0**-k for k in range(6, 0, -1)])
    for fraction in (0.05, 0.25, 0.5, 0.9):
        values = drawn(low * (1 + fraction), n)
        up = values == 2 * low
        assert (up | (values == low)).all()
        assert (up.double().mean(0) - fraction).abs().max() < 5 * 0.5 / n**0.5


def test_it_is_unbiased_up_to_the_maximum():
    points, n = torch.tensor([1e-4, 0.003, 0.02, 0.07, 0.3, 0.8, 0.999, 1.0, -0.6]), 40000
    values = drawn(points, n)
    spread = values.std(0).clamp(min=1e-9)
    assert ((values.mean(0) - points).abs() < 5 * spread / n**0.5 + points.abs() * 2**-16).all()


@pytest.mark.parametrize(("x", "expected"), [(1.49, 1), (1.5, 2), (2.9, 2), (3.1, 4)])
def test_to_nearest_it_is_logarithmic_rounding_to_nearest_power(x, expected):
    import msgspec

    q = msgspec.structs.replace(LUQ, rounding=Quantizer.named("nvfp4").rounding)
    got = quantize(torch.tensor([[16.0, x]]), q).values[0, 1].item()
    assert got == expected
