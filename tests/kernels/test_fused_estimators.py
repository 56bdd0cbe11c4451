"""Gradients pass through the kernel as through the reference, bit for bit, whatever the estimator and the quantizer."""

import itertools
import random

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Hadamard, Quantizer, Recipe
from fp4dse.dse.estimator import DGE, RELAXATION_NAMES, SCALE_RELAXATION_NAMES, STE, Estimator, PowerLaw, Sigmoid, Spline, Through
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.rounding import Ema, Nearest, Stochastic
from fp4dse.dse.rules import canonical_faults, quantizer_faults
from fp4dse.dse.scale import BF16, SCALE_NAMES, E4M3, TensorScale
from fp4dse.kernels import LaneNumerics, QuantLinear, lanes
from fp4dse.kernels.backend import PLAIN
from fp4dse.kernels.fused import operators as fused

replace = msgspec.structs.replace
SCALES = ("none", "diagonal", "exact", "softmax-diagonal", "softmax")
KERNELS = replace(PLAIN, operand=fused.operand, through=fused.through)


def recipe(q, spec, rotation=None):
    r = Recipe.uniform(q)
    return replace(r, fprop=replace(r.fprop, rotation=rotation), estimator=Estimator(x=spec, w=spec))


def hard(lanes, rows, width, element="e2m1"):
    """Rows of many sizes: on the grid of small powers of two, between its points, zero, subnormal, huge, all equal;
    NaN and Inf in the last lane."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(lanes, rows, width, generator=g)
    grid = torch.tensor(ELEMENTS[element].magnitudes())
    sizes = torch.exp2(torch.randint(-20, 20, (lanes, rows, 1), generator=g).float())
    x[:, 1] = 0
    x[:, 2] *= 1e-41
    x[:, 3] = grid[torch.randint(len(grid), (lanes, width), generator=g)] * x[:, 3].sign() * sizes[:, 3]
    steps = torch.randint(int(grid[-1] / grid[1]) * 4, (lanes, width), generator=g) * (grid[1] / 4)
    x[:, 4] = steps * x[:, 4].sign() * sizes[:, 4]
    x[:, 5] *= 1e37
    x[:, 6] = -1.99
    x[:, 7:12] *= sizes[:, 7:12]
    x[:, 12, 3:] = -0.0
    x[-1, 13, 3], x[-1, 14, 5] = float("nan"), float("inf")
    return x


def gradients(place, monkeypatch, backend, recipes, x, g, steps=1):
    """What becomes of g on its way through the quantizer of fprop.w, and whether its kernel was taken."""
    monkeypatch.setattr(lanes, "backend", lambda _: backend)
    numerics = LaneNumerics(recipes, range(len(recipes)), place.device)
    for step in range(steps):
        numerics.step.fill_(step + 7)
        kept = numerics.forward(3, x, x, keep=(False, True)).kept_w
    return numerics.through("w", 3, g, kept).cpu(), kept.q is None


def agree(place, monkeypatch, recipes, x, steps=1):
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(place.device)
    x = x.to(place.device)
    expected, without = gradients(place, monkeypatch, PLAIN, recipes, x, g, steps)
    got, with_kernel = gradients(place, monkeypatch, KERNELS, recipes, x, g, steps)
    assert (without, with_kernel) == (False, True)
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(torch.int32)[~nan], expected.view(torch.int32)[~nan])
    return expected


NV = QUANTIZERS["nvfp4"]


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", RELAXATION_NAMES)
def test_every_form_has_the_bits_of_the_reference(place, monkeypatch, name, scale, masked):
    spec = Through(RELAXATION_NAMES[name], masked, scale)
    if spec.canonical(NV.scale) == Through():
        pytest.skip("straight through")
    agree(place, monkeypatch, [recipe(replace(NV, rounding=r), spec) for r in (Nearest(), Stochastic())], hard(2, 15, 48))
