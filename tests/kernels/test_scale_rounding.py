"""Surrogates of the scale's rounding have their values on every code of a format, and gradients are those of the smooth
surrogate, for each way in which a gradient goes through the scale."""

import sys

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import Quantizer, Recipe
from fp4dse.dse.estimator import (
    DGE,
    SCALE_RELAXATION_NAMES,
    STE,
    Clipped,
    Estimator,
    PowerLaw,
    Sigmoid,
    Spline,
    Through,
)
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.scale import BF16, E4M3, E5M2, E8M0, SCALE_NAMES, UE4M4, UE5M3, TensorScale, scale_grid
from fp4dse.kernels import LaneNumerics, QuantLinear, lanes
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.estimators import rounded_slope, scale_surrogate, through
from fp4dse.kernels.quant.spec.reference import quantize_blocks
from tests.each import each

E2M1 = ELEMENTS["e2m1"]
SCALES = [E8M0(), E4M3(), UE5M3(), UE5M3(max=61440), E5M2(), UE4M4(), BF16()]
SCALE_GRADIENTS = ("diagonal", "exact", "softmax-diagonal", "softmax")
replace = msgspec.structs.replace
codecs_block = sys.modules["fp4dse.kernels.quant.spec.codecs.block"]  # the package has a function of that name


def slope(u, relaxation, scale=E4M3(), masked=False) -> np.ndarray:  # noqa: B008  (immutable)
    """q'(u), float64."""
    spec = Through(masked=masked, scale="exact", scale_rounding=relaxation)
    u = torch.tensor(np.atleast_1d(np.asarray(u, dtype=np.float64))).float()
    return scale_surrogate(u, spec, scale_grid(scale)).double().numpy()


# values


@pytest.mark.parametrize(
    ("relaxation", "values"),
    [
        # 300 lies in E4M3's interval from 288 to 320 at t = 2(300 - 304)/32 = -1/4, 290 at t = -7/8; 449 is beyond 448
        (STE(), (1, 1, 1)),
        (Clipped(), (1, 1, 0)),
        (DGE(), (0.25**-0.8 / 5, 0.875**-0.8 / 5, 0)),
        (PowerLaw(), (16 * 4**-0.8 / 5, 16 * 14**-0.8 / 5, 16 * 17**-0.8 / 5)),
        (Sigmoid(), (24 * np.exp(3) / (1 + np.exp(3)) ** 2, 0.5, 0.5)),
        (Spline(), (3, 0.5, 0.5)),
    ],
)
def test_surrogates_have_their_worked_values_on_e4m3(relaxation, values):
    assert slope([300, 290, 449], relaxation) == pytest.approx(values, rel=1e-5)


@pytest.mark.parametrize("relaxation", [DGE(), PowerLaw()])
def test_between_two_and_four_e8m0_has_an_interval_that_is_two_wide(relaxation):
    assert slope([2.5, 3.9], relaxation, E8M0()) == pytest.approx([0.5**-0.8 / 5, 0.9**-0.8 / 5], rel=1e-5)


def test_codes_are_those_of_the_formats():
    codes = {name: len(scale_grid(SCALE_NAMES[name]).magnitudes()) for name in ("e8m0", "e4m3", "ue5m3", "e5m2")}
    assert codes == {"e8m0": 256, "e4m3": 127, "ue5m3": 255, "e5m2": 124}
    assert scale_grid(E8M0()).magnitudes()[1:] == [2.0**e for e in range(-127, 128)]


def surrogate_in_float64(z, relaxation, low, high):
    """q' at z in the interval from low to high, from its definition."""
    centre, width = (low + high) / 2, high - low
    u = z - centre
    match relaxation:
        case STE() | Clipped():
            return np.ones_like(z)
        case DGE(k=k, cap=cap):
            return np.minimum(cap, np.abs(2 * u / width) ** (1 / k - 1) / k)
        case PowerLaw(k=k):
            return width / 2 * np.abs(u) ** (1 / k - 1) / k
        case Sigmoid(temperature=temperature, lower=lower):
            sigma = 1 / (1 + np.exp(-12 * u / (width * temperature)))
            return np.maximum(12 * sigma * (1 - sigma) / temperature, lower)
        case Spline(lower=lower):
            nodes = np.array([0, 1 / 3, 2 / 3, 1])
            slopes = np.diff(nodes > 0.5) / np.diff(nodes)  # of what rounding to nearest makes of them
            return np.maximum(slopes[(3 * (z - low) / width).astype(int)], lower)


@each("scale", SCALES)
@each("relaxation", SCALE_RELAXATION_NAMES.values())
@each("t", [1 / 64, 19 / 64, 0.46875, 45 / 64, 63 / 64])
def test_on_every_interval_of_every_format_a_surrogate_is_what_its_definition_says(scale, relaxation, t):
    codes = np.array(scale_grid(scale).magnitudes())
    codes = codes[codes >= 2.0**-120]  # FP32 has no room between E8M0's and BF16's smallest
    low, high = codes[:-1], codes[1:]
    u = (low + t * (high - low)).astype(np.float32).astype(np.float64)
    assert np.allclose(slope(u, relaxation, scale), surrogate_in_float64(u, relaxation, low, high), rtol=1e-4, atol=0)


@each("scale", SCALES)
@each("relaxation", SCALE_RELAXATION_NAMES.values())
def test_surrogates_are_finite_and_not_negative_at_every_code_and_beyond(scale, relaxation):
    codes = np.array(scale_grid(scale).magnitudes(), dtype=np.float32)
    u = np.concatenate([codes, (codes[1:] - codes[:-1]) / 2 + codes[:-1], [np.finfo(np.float32).max, 1e-45]])
    got = slope(u, relaxation, scale)
    assert (np.isfinite(got) & (got >= 0)).all()


def test_the_mean_of_the_spline_and_of_the_sigmoid_over_an_interval_is_one_without_a_lower_bound():
    u = 288 + 32 * (np.arange(30_000) + 0.5) / 30_000
    assert slope(u, Spline(lower=1e-9)).mean() == pytest.approx(1, abs=1e-3)
    assert slope(u, Sigmoid(lower=1e-9)).mean() == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("relaxation", [DGE(), PowerLaw(), Sigmoid(), Spline()])
def test_masked_counts_only_from_the_largest_scale_on(relaxation):
    u = np.random.default_rng(0).uniform(0, 900, 500)
    masked, unmasked, inside = slope(u, relaxation, masked=True), slope(u, relaxation), u < 448
    assert (masked[inside] == 1).all()
    assert np.array_equal(masked[~inside], unmasked[~inside])


# finite differences of the smooth surrogate, in float64


def smooth_rounding(u, at, relaxation, grid):
    """The surrogate of a scale's rounding near `at`, up to a constant: what q' is the derivative of."""
    i = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
    low, width = grid[i], grid[i + 1] - grid[i]
    v, v0 = u - low - width / 2, at - low - width / 2
    match relaxation:
        case DGE(k=k, cap=cap):
            t, t0 = 2 * v / width, 2 * v0 / width
            power = np.sign(t) * np.abs(t) ** (1 / k)
            return width / 2 * np.where(np.abs(t0) ** (1 / k - 1) / k < cap, power, cap * t)
        case PowerLaw(k=k):
            return width / 2 * np.sign(v) * np.abs(v) ** (1 / k)
        case Sigmoid(temperature=temperature, lower=lower):
            s, s0 = (1 / (1 + np.exp(-12 * x / (width * temperature))) for x in (v, v0))
            return np.where(12 * s0 * (1 - s0) / temperature > lower, width * s, lower * u)
        case Spline(lower=lower):
            return np.where(np.abs(v0) < width / 6, 3 * u, lower * u)
        case _:
            return u


def maximum(x, at, weights):
    """The block maximum that the scale follows, near x = at: hard, or with the gradient of a soft one."""
    amax = np.abs(at).max(-1, keepdims=True)
    if not weights.startswith("softmax"):
        return np.abs(x).max(-1, keepdims=True)
    soft = [amax / 80 * np.log(np.exp(80 * (np.abs(v) / amax - 1)).sum(-1, keepdims=True)) for v in (x, at)]
    return amax + soft[0] - soft[1]


def decoded(x, at, spec, scale, stored):
    """x̂ near x = at: elements straight through, the scale by the smooth surrogate, from `stored` at x = at."""
    grid = np.array(scale_grid(scale).magnitudes())
    u, u0 = (maximum(t, at, spec.scale) / 6 for t in (x, at))
    if is_encode(scale):
        u, u0, stored = 1 / u, 1 / u0, 1 / stored
    rounded = stored + np.subtract(*(smooth_rounding(v, u0, spec.scale_rounding, grid) for v in (u, u0)))
    s, s0 = (1 / rounded, 1 / stored) if is_encode(scale) else (rounded, stored)
    return s * (nearest(at / s0) + x / s - at / s0)


def is_encode(scale):
    return getattr(scale, "convention", "") == "encode"


def nearest(z):
    values = np.array(E2M1.magnitudes())
    return np.copysign(values[np.abs(np.abs(z)[..., None] - values).argmin(-1)], z)


def finite_differences(g, x, spec, scale, stored):
    """dL/dx of L = Σ g · x̂; for the diagonal forms each element through its own x̂ alone."""
    out = np.zeros_like(x)
    for j in range(x.shape[1]):
        h = 1e-7 * np.abs(x).max(-1)
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[:, j] += sign * h
            ends.append(g * decoded(moved, x, spec, scale, stored))
        change = (ends[0] - ends[1]) / (2 * h[:, None])
        out[:, j] = change[:, j] if "diagonal" in spec.scale else change.sum(-1)
    return out


def blocks_of(q, x):
    """(elements, scales, decode factors) of blocks [1, n, B]."""
    encoded, dec = quantize_blocks(x, *descriptor([q.canonical()]))
    return encoded.q, encoded.scale, dec


ROUNDED = {
    "e4m3": E4M3(),
    "ue5m3 up": UE5M3(rounding="up"),
    "e8m0": E8M0(),
    "e4m3 encode": E4M3(convention="encode", zero="min"),
}


@each("scale", ROUNDED.values())
@each("kind", SCALE_GRADIENTS)
@each("relaxation", SCALE_RELAXATION_NAMES.values())
def test_gradients_are_the_finite_differences_of_the_smooth_surrogate(relaxation, kind, scale):
    """Under the encode convention but for the factor (S · 6 / amax)² that is left out."""
    random = np.random.default_rng(0)
    wanted = (1.0375 + random.integers(0, 8, (24, 1)) / 8) * 2.0 ** random.integers(-5, 8, (24, 1))  # off all kinks
    x = random.standard_normal((24, 16))
    x *= 6 * (1 / wanted if is_encode(scale) else wanted) / np.abs(x).max(-1, keepdims=True)
    x = torch.tensor(x).float()[None]
    g = torch.tensor(random.standard_normal((24, 16))).float()[None]
    spec, q = Through(scale=kind, scale_rounding=relaxation), Quantizer(scale=scale)
    elements, stored, dec = blocks_of(q, x)
    slopes = rounded_slope(x, dec, torch.tensor([1 / 6]), spec, q)
    got = through(g, x, elements, stored, dec, spec, E2M1, slopes)
    got, g, x, s = (t[0].double().numpy() for t in (got, g, x, stored[:, :, None]))
    left_out = (s * 6 / np.abs(x).max(-1, keepdims=True)) ** 2 if is_encode(scale) else 1
    expected = finite_differences(g, x, spec, scale, s)
    assert np.abs(g + (got - g) * left_out - expected).max() <= 1e-4 * np.abs(expected).max()
    assert np.abs(got - g).max() > 0.01


# layers


@pytest.fixture
def eager(monkeypatch):
    """Compiling takes longer than all that is computed here."""
    monkeypatch.setattr(lanes, "backend", lambda device: PLAIN)


@pytest.mark.parametrize("tensor_scale", [None, TensorScale()], ids=["none", "amax"])
@pytest.mark.parametrize("convention", ["decode", "encode"])
@pytest.mark.parametrize("range_", ["full", "16/17"])
@pytest.mark.parametrize("scaling", ["amax", "softmax"])
def test_the_position_is_that_of_the_scale_which_is_rounded(scaling, range_, convention, tensor_scale, monkeypatch):
    x = torch.randn(1, 400, 16, generator=torch.Generator().manual_seed(1))
    q = Quantizer(scale=UE5M3(convention=convention), range=range_, scaling=scaling, tensor_scale=tensor_scale)
    spec = Through(scale="softmax", scale_rounding=Sigmoid(temperature=4, lower=1e-9))  # it tells positions apart
    seen = []
    monkeypatch.setattr(codecs_block, "round_scale", lambda y, *rest: seen.append(y) or y)
    _, dec = quantize_blocks(x, *descriptor([q.canonical()]), codec=q.codec)
    got = rounded_slope(x, dec, torch.tensor([1 / q.val_max]), spec, q) * q.val_max
    expected = scale_surrogate(seen[0], spec, scale_grid(q.scale))
    assert torch.allclose(got, expected, rtol=1e-3)


OFF = Quantizer.named("none")


def run(*recipes: Recipe) -> list[torch.Tensor]:
    """(y, dx, dw) of one layer, a lane per recipe."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(len(recipes), *s, generator=generator) for s in ((48, 32), (24, 32), (48, 24)))
    x.requires_grad_()
    layer = QuantLinear(w, None, LaneNumerics(recipes, range(len(recipes))), layer=3)
    y = layer(x)
    y.backward(g)
    return [y.detach(), x.grad, layer.weight.grad]


def quantized(q: Quantizer | str, **operands: Through) -> Recipe:
    q = Quantizer.named(q) if isinstance(q, str) else q
    recipe = Recipe.uniform(OFF)
    return replace(recipe, fprop=replace(recipe.fprop, x=q, w=q), estimator=Estimator(**operands))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp4-34", "mxfp4-2d"])
def test_in_a_layer_the_scale_gradient_is_multiplied_by_the_surrogate_block_by_block(name):
    """With a lower bound that no sigmoid exceeds, the surrogate is a constant, and the term its multiple."""
    constant = Sigmoid(temperature=24, lower=0.5)
    terms = [Through(), Through(scale="exact"), Through(scale="exact", scale_rounding=constant)]
    straight, full, half = (run(*[quantized(name, x=t, w=t)] * 2) for t in terms)
    assert torch.equal(half[0], straight[0])
    for i in (1, 2):
        assert torch.allclose(half[i] - straight[i], (full[i] - straight[i]) / 2, atol=2e-5)
        assert not torch.allclose(full[i], straight[i], atol=1e-2)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("relaxation", SCALE_RELAXATION_NAMES.values(), ids=SCALE_RELAXATION_NAMES)
def test_a_lane_has_the_same_bits_beside_itself_and_beside_another(relaxation):
    through = Through(DGE(), scale="softmax", scale_rounding=relaxation)
    one, other = (quantized(name, x=through, w=through) for name in ("nvfp4", "nvfp4-1716"))
    assert one.signature() == other.signature()
    alone, mixed = run(one, one), run(one, other)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, mixed, strict=True))
    assert not torch.equal(alone[2][1], mixed[2][1])


@pytest.mark.usefixtures("eager")
def test_masked_as_released_a_scale_within_its_format_is_straight_through():
    masked = Through(masked=True, scale="exact", scale_rounding=DGE())
    straight, got, unmasked = (
        run(*[quantized("ue5m3", w=t)] * 2) for t in (Through(scale="exact"), masked, replace(masked, masked=False))
    )
    assert torch.equal(got[2], straight[2])
    assert not torch.allclose(unmasked[2], straight[2], atol=1e-2)


def test_the_largest_block_of_a_tensor_has_the_largest_scale_whatever_fp32_makes_of_it():
    x = torch.randn(1, 1, 16, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.1, 9, 500)[:, None, None]
    q, spec = Quantizer(tensor_scale=TensorScale()), Through(scale="exact", scale_rounding=Clipped())
    tables = descriptor([q.canonical()] * 500)
    _, dec = quantize_blocks(x, *tables)  # each lane's only block
    assert (rounded_slope(x, dec, torch.full((500,), 1 / 6), spec, q) == torch.tensor(1 / 6)).all()
