"""Radix-4 FP4 rounds at arithmetic midpoints, and the mean of its two phases is nearly linear."""

import itertools

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp4dse.dse import Quantizer
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.rounding import Nearest, Stochastic
from fp4dse.dse.scale import E4M3, E8M0, TensorScale
from fp4dse.kernels import quantize
from fp4dse.kernels.selftest import odd_blocks

EVEN, ODD = Quantizer.named("radix4"), Quantizer.named("radix4-odd")
PHASES = {"radix4": EVEN, "radix4-odd": ODD}


def unscaled(values: torch.Tensor, q: Quantizer, seed: int = 0) -> torch.Tensor:
    """Values quantized under a scale of one: beside the largest number of the even phase."""
    rows = torch.full((len(values), 2), 64.0)
    rows[:, 1] = values
    got = quantize(rows, msgspec.structs.replace(q, block="row"), seed=seed)
    assert (got.scales == 1).all()
    return got.values[:, 1]


def oracle(y: np.ndarray, grid: list[float]) -> np.ndarray:
    """From each arithmetic midpoint on the upper level; saturating."""
    levels = np.array(grid)
    return levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, np.abs(y), side="right")] * np.sign(y)


@pytest.mark.parametrize("name", PHASES)
def test_values_equal_a_plain_transcription(name):
    grid = ELEMENTS[name].magnitudes()
    middle = np.array([(a + b) / 2 for a, b in itertools.pairwise(grid)], np.float32)
    edges = [
        np.nextafter(middle, np.float32(0)),
        middle,
        np.nextafter(middle, np.float32(99)),
        np.array(grid, np.float32),
    ]
    random = np.exp2(np.random.default_rng(0).uniform(-10, 6, 20000)).astype(np.float32)
    y = np.concatenate([*edges, random, -random, random.astype(np.float16).astype(np.float32)])
    assert np.array_equal(unscaled(torch.from_numpy(y), PHASES[name]).numpy(), oracle(y, grid).astype(np.float32))


@pytest.mark.parametrize(
    ("x", "even", "odd"), [(1, 1, 0.5), (1.5, 1, 2), (2.4, 1, 2), (2.5, 4, 2), (3, 4, 2), (6, 4, 8), (10, 16, 8)]
)
def test_worked_examples_of_two_phase_rounding(x, even, odd):
    x = torch.tensor([float(x)])
    assert unscaled(x, EVEN).item() == even
    assert unscaled(x, ODD).item() == odd


def test_both_phases_take_the_same_scale_whatever_it_is():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    scales = [EVEN.scale, E8M0(), E8M0(rule="rceil"), E8M0(rule="even"), E4M3(), E4M3(convention="encode", zero="min")]
    for scale in scales:
        for factor in (None, TensorScale()):
            parts = [
                quantize(x, Quantizer(element=name, block=32, scale=scale, tensor_scale=factor)) for name in PHASES
            ]
            assert torch.equal(parts[0].scales, parts[1].scales)
            assert torch.equal(parts[0].tensor_scale, parts[1].tensor_scale)
            assert not torch.equal(parts[0].values, parts[1].values)


def test_the_largest_number_is_the_top_of_the_even_phase_and_saturates_the_odd_one():
    x = torch.tensor([[3.2, 0.1]])
    assert quantize(x, EVEN).elements[0, 0] == 64
    assert quantize(x, ODD).elements[0, 0] == 32


@pytest.mark.parametrize("kind", ["normal", "log-normal"])
def test_the_mean_of_both_phases_is_closer_than_either(kind):
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
    x = x if kind == "normal" else torch.exp(2 * x.abs()) * x.sign()
    even, odd = quantize(x, EVEN).values, quantize(x, ODD).values
    error = [float(((v - x) ** 2).mean()) for v in (even, odd, (even + odd) / 2)]
    assert error[2] < 0.7 * min(error[:2])


@given(st.floats(0, 64, width=32), st.sampled_from(sorted(PHASES)))
def test_stochastic_rounding_meets_the_two_neighbours_alone(x, name):
    grid = ELEMENTS[name].magnitudes()
    q = msgspec.structs.replace(PHASES[name], rounding=Stochastic())
    top = min(x, grid[-1])
    neighbours = {max(v for v in grid if v <= top), min(v for v in grid if v >= top)}
    assert set(unscaled(torch.full((64,), x), q).tolist()) <= neighbours


@pytest.mark.parametrize("bits", [8, 16])
def test_stochastic_rounding_is_unbiased_below_the_top(bits):
    points, n = torch.tensor([1e-3, 0.01, 0.03, 0.2, 1.7, 3.1, 7.0, 20.0, 31.0]), 20000
    for name, q in PHASES.items():
        q = msgspec.structs.replace(q, rounding=Stochastic(bits=bits))
        drawn = unscaled(points.repeat(n), q).view(n, -1).double()
        grid = torch.tensor(ELEMENTS[name].magnitudes())
        step = grid[torch.searchsorted(grid, points)] - grid[torch.searchsorted(grid, points) - 1]
        deviation = (drawn.mean(0) - points).abs() / step
        assert (deviation < 5 * 0.5 / n**0.5 + 2.0 ** -(bits + 1)).all()


def test_ties_have_no_mode():
    for q in PHASES.values():
        assert msgspec.structs.replace(q, rounding=Nearest(ties="away")).canonical() == q.canonical()


@pytest.mark.parametrize("name", PHASES)
def test_nan_stays_in_its_block_and_codes_give_the_values(name):
    x = odd_blocks()[1]
    got = quantize(x, msgspec.structs.replace(PHASES[name], block="row"))
    bad = ~torch.isfinite(x).all(1)
    assert torch.equal(got.values.isnan().all(1), bad)
    assert torch.equal(torch.isfinite(got.values).all(1), ~bad)
    levels = torch.tensor(ELEMENTS[name].magnitudes())
    decoded = levels[(got.codes[~bad] & 7).long()] * torch.where(got.codes[~bad] > 7, -1, 1)
    assert torch.equal(decoded, got.elements[~bad])
