"""Bias and variance of a gradient are found as they are, and the error of the mean follows from them."""

import pytest
import torch

from fp4dse.tasks.inspection.gradient_error import BLOCKS, GradientErrors

TRUE = torch.linspace(-1, 1, 40, dtype=torch.float64)
SCALE = float(TRUE.square().sum())
SIZES, GROUPS = [10, 30], [[0, 1], [0], [1]]


def errors_of(passes: int, bias: torch.Tensor, sigma: float, seed: int = 0):
    """Errors of gradients TRUE + bias + normal noise, in all and of both parameters."""
    draws = torch.Generator().manual_seed(seed)
    found = GradientErrors(SIZES, GROUPS)
    for _ in range(BLOCKS):
        shape = passes // BLOCKS, len(TRUE)
        noise = sigma * torch.randn(shape, generator=draws, dtype=torch.float64)
        found.add(TRUE + bias + noise, TRUE.expand(shape))
    return found.found()


@pytest.mark.parametrize("passes", [16, 64, 512])
@pytest.mark.parametrize("size", [0.0, 0.05])
def test_bias_and_variance_are_those_that_were_put_in(passes, size):
    """Within four standard errors: of 24 estimates, one in 600 such runs is farther out."""
    bias = size * torch.ones(40, dtype=torch.float64)
    for error, n in zip(errors_of(passes, bias, 0.3), (40, 10, 30), strict=True):
        norm = error.norm**2
        assert abs(error.bias2 - size**2 * n / norm) < 4 * error.bias2_se
        assert abs(error.variance - 0.3**2 * n / norm) < 4 * error.variance_se
        assert error.error == pytest.approx(error.bias2 + error.variance)


def test_standard_errors_are_the_spread_of_estimates_over_repetitions():
    """Of 60 repetitions; with a bias the jackknife is right, without one it overstates by at most √2. Both spreads are
    known to 1 / √120 = 9 %, and bounds are four times that."""
    for size, most in ((0.05, 1.0), (0.0, 2**0.5)):
        runs = [errors_of(64, size * torch.ones(40, dtype=torch.float64), 0.3, seed)[0] for seed in range(60)]
        for name in ("bias2", "variance"):
            spread = torch.tensor([getattr(run, name) for run in runs]).std()
            said = torch.tensor([getattr(run, f"{name}_se") for run in runs]).square().mean().sqrt()
            assert 0.64 < said / spread < 1.36 * (most if name == "bias2" else 1)


def test_the_error_of_the_mean_is_the_bias_and_the_variance_over_n():
    bias = 0.05 * torch.ones(40, dtype=torch.float64)
    error = errors_of(256, bias, 0.3)[0]
    assert [point.n for point in error.curve] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert [point.runs for point in error.curve] == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert error.curve[0].error == pytest.approx(error.error)
    assert error.curve[-1].error == pytest.approx(error.bias2 + error.variance / 256)
    assert error.curve[-1].se is None
    for point in error.curve[:-2]:  # of four runs or more the spread is known
        assert abs(point.error - (error.bias2 + error.variance / point.n)) < 4 * point.se


def test_without_chance_there_is_no_variance_and_the_curve_is_flat():
    bias = torch.arange(40, dtype=torch.float64)
    for error in errors_of(64, bias, 0.0):
        assert error.variance == pytest.approx(0, abs=1e-9 * error.bias2)
        assert {round(point.error / error.bias2, 9) for point in error.curve} == {1.0}
    assert errors_of(16, bias, 0.0)[0].bias2 == pytest.approx(float(bias.square().sum()) / SCALE)


def test_the_cosine_is_that_of_a_pass_and_its_true_gradient():
    bias = torch.zeros(40, dtype=torch.float64)
    bias[:10] = -2 * TRUE[:10]
    whole, first, second = errors_of(16, bias, 0.0)
    assert (first.cosine, second.cosine) == (pytest.approx(-1), pytest.approx(1))
    assert whole.cosine == pytest.approx(1 - 2 * float(TRUE[:10].square().sum()) / SCALE)


def test_a_gradient_of_zeros_has_no_relative_error_and_too_few_blocks_are_refused():
    found = GradientErrors([3], [[0]])
    with pytest.raises(ValueError, match="found 0; accepted: 16"):
        found.found()
    for _ in range(BLOCKS):
        found.add(torch.zeros(1, 3, dtype=torch.float64), torch.zeros(1, 3, dtype=torch.float64))
    [error] = found.found()
    assert (error.norm, error.error, error.bias2, error.variance, error.cosine) == (0, None, None, None, None)
