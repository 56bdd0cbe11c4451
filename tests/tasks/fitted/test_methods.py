"""Weights that are fitted to a grid stay on it, and lose less of what the layer puts out than rounding to nearest."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fp4dse.dse import QUANTIZERS, ConfigError
from fp4dse.dse.formats import ELEMENTS
from fp4dse.kernels import quantize
from fp4dse.tasks.fitted import methods
from fp4dse.tasks.fitted.grid import hold, nearest, padded
from fp4dse.tasks.fitted.methods import METHODS, inverse_factor, output_error

NAMES = ("nvfp4", "mxfp4", "mxfp4-rceil", "fp4-row", "nvfp4-2d")


def problem(seed=0, rows=48, inputs=64, samples=256):
    """A weight whose rows differ in size, and inputs that depend on each other."""
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=made, dtype=torch.float64)
    x = x @ torch.randn(inputs, inputs, generator=made, dtype=torch.float64)
    w = torch.randn(rows, inputs, generator=made) * torch.exp2(torch.randn(rows, 1, generator=made))
    return w, x


@pytest.fixture(autouse=True)
def few_candidates(monkeypatch):
    monkeypatch.setattr(methods, "SHRINKS", 12)
    monkeypatch.setattr(methods, "SEARCH_STEPS", 25)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", NAMES)
def test_the_result_is_on_the_quantizers_grid(name, method):
    """Quantized again it stays as it is, to a rounding of FP32."""
    (w, x), q = problem(), QUANTIZERS[name]
    fitted = METHODS[method](w, q, x.T @ x).to(torch.float32)
    again = quantize(fitted, q).values
    assert torch.allclose(again, fitted, rtol=2**-22, atol=0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_gptq_loses_less_than_rounding_to_nearest_and_searched_scales_no_more(name, seed):
    """On the calibration data themselves: ‖X (Ŵ - W)ᵀ‖², computed from X."""
    (w, x), q = problem(seed), QUANTIZERS[name]

    def error(fitted):
        return (x @ (fitted.double() - w.double()).T).square().sum()

    to_nearest = error(quantize(w, q).values)
    errors = {method: error(fit(w, q, x.T @ x)) for method, fit in METHODS.items()}
    assert errors["nearest"] == pytest.approx(to_nearest.item(), rel=1e-4)
    assert errors["gptq"] < 0.8 * to_nearest
    assert errors["mr-gptq"] < 0.8 * to_nearest
    assert errors["llm-fp4"] <= (1 + 1e-6) * to_nearest
    fitted = METHODS["gptq"](w, q, x.T @ x)
    assert output_error(w, fitted, x.T @ x) == pytest.approx(errors["gptq"].item(), rel=1e-9)


def test_columns_are_those_of_optimal_brain_quantization_in_order():
    """Against OBQ (2208.11580) as its authors write it: the inverse of H is updated after every column, no factor of
    Cholesky's."""
    (w, x), q = problem(rows=6, inputs=32, samples=40), QUANTIZERS["mxfp4-rceil"]
    h = x.T @ x
    grid, left = hold(w, q), w.double().clone()
    damped = h + methods.DAMPING * h.diagonal().mean() * torch.eye(32, dtype=torch.float64)
    inverse, expected = torch.linalg.inv(damped), torch.zeros_like(left)
    for column in range(32):
        expected[:, column] = grid.rounded(left[:, column], column)
        error = (left[:, column] - expected[:, column]) / inverse[column, column]
        left -= error[:, None] * inverse[column]
        inverse = inverse - torch.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    assert torch.equal(methods.gptq(w, q, h), expected)


def test_one_column_after_another_is_best_where_only_two_are_left():
    """By hand: two equal inputs, so that only the sum of the two weights matters."""
    w = torch.tensor([[6.0, *[0.0] * 29, 1.2, 1.2]])
    h = torch.zeros(32, 32, dtype=torch.float64)
    h[30:, 30:] = 1.0
    fitted = methods.gptq(w, QUANTIZERS["mxfp4"], h)
    assert fitted[0, 30:].tolist() == [1.0, 1.5], "1.2 + 1.2 is 1 + 1.5 rather than 1 + 1"


@given(x=arrays("float64", 16, elements=st.floats(-8, 8)), name=st.sampled_from(["e2m1", "e1m2", "int4", "e4m3"]))
def test_rounding_is_that_of_the_quantizers(x, name):
    """At random, on all levels and on all ties, against the formats' own list of values."""
    levels = torch.tensor(ELEMENTS[name].magnitudes(), dtype=torch.float64)
    ties = (levels[1:] + levels[:-1]) / 2
    values = torch.cat([torch.from_numpy(x), levels, ties, -ties])
    found = nearest(values, levels)
    for value, of in zip(values.tolist(), found.tolist(), strict=True):
        away = [(abs(abs(value) - level), index % 2) for index, level in enumerate(levels.tolist())]
        assert abs(of) == levels[away.index(min(away))]
        assert of * value >= 0


@pytest.mark.parametrize("name", NAMES)
def test_a_held_grid_rounds_its_own_weight_as_the_quantizer_does(name):
    w, _ = problem()
    assert torch.allclose(hold(w, QUANTIZERS[name]).rounded(w.double()).float(), quantize(w, QUANTIZERS[name]).values)


def test_inputs_that_are_never_there_do_no_harm():
    w, x = problem()
    x[:, 5] = 0
    assert inverse_factor(x.T @ x).isfinite().all()
    assert METHODS["gptq"](w, QUANTIZERS["nvfp4"], x.T @ x).isfinite().all()


def test_padding_is_to_whole_blocks():
    assert padded(torch.ones(3, 5), QUANTIZERS["nvfp4-2d"]).shape == (16, 16)
    assert padded(torch.ones(3, 32), QUANTIZERS["mxfp4"]).shape == (3, 32)


def test_what_has_no_single_grid_is_refused_by_its_field():
    for name, field in ("nvfp4-4over6-mse", "adapt"), ("if4", "adapt"), ("hif4", "rounding"):
        with pytest.raises(ConfigError, match=rf"fprop\.w\.{field}: found .*one grid"):
            hold(torch.ones(16, 64), QUANTIZERS[name])
