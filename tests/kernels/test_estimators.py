"""Surrogates have the published values, gradients are those of the smooth surrogate, and layers use them as told."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Hadamard, Quantizer, Recipe
from fp4dse.dse.estimator import (
    DGE,
    RELAXATION_NAMES,
    STE,
    Clipped,
    Estimator,
    PowerLaw,
    Sigmoid,
    Spline,
    Through,
    Trust,
)
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.rounding import Nearest
from fp4dse.dse.rules.estimators import ONE_GRID
from fp4dse.dse.scale import FP32, UE5M3
from fp4dse.kernels import LaneNumerics, QuantLinear, lanes, quantize
from fp4dse.kernels.ops.rotation import fixed_signs, rotate, rotate_back
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.spec.codecs import CODECS
from fp4dse.kernels.quant.spec.estimators import surrogate, through
from fp4dse.kernels.quant.spec.reference import quantize_blocks
from tests.each import each

E2M1 = ELEMENTS["e2m1"]
SCALE_GRADIENTS = ("none", "diagonal", "exact", "softmax-diagonal", "softmax")
replace = msgspec.structs.replace


def nearest(z: np.ndarray, element=E2M1) -> np.ndarray:
    """The element nearest to z, float64."""
    values = np.array(element.magnitudes())
    return np.copysign(values[np.abs(np.abs(z)[..., None] - values).argmin(-1)], z)


def slope(z, relaxation, element=E2M1, masked=False) -> np.ndarray:
    z = np.atleast_1d(np.asarray(z, dtype=np.float64))
    q = torch.tensor(nearest(z, element)).float()
    return surrogate(torch.tensor(z).float(), q, Through(element=relaxation, masked=masked), element).double().numpy()


# values


@pytest.mark.parametrize(
    ("z", "expected"),
    [(0.1, 0.301), (0.2, 0.725), (0.25, 3), (0.45, 0.239), (2.5, 3), (5.9, 0.2175), (6.0, 0.2), (6.1, 0), (50, 0)],
)
def test_dge_has_its_worked_values(z, expected):
    assert slope([z, -z], DGE()) == pytest.approx(expected, abs=5e-4)


def test_dge_reaches_its_cap_where_the_position_is_below_15_to_the_minus_five_fourths():
    edge = 15 ** (-5 / 4)
    z = 5 + np.array([edge - 1e-4, edge + 1e-4])  # the interval from 4 to 6: t = z - 5
    assert slope(z, DGE())[0] == 3
    assert slope(z, DGE())[1] < 3


@pytest.mark.parametrize("name", ELEMENTS)
def test_the_mean_of_dge_over_an_interval_of_any_grid_is_593_thousandths(name):
    values = np.array(ELEMENTS[name].magnitudes())
    t = (np.arange(20_000) + 0.5) / 20_000
    for low, high in list(pairwise(values))[:20]:
        assert slope(low + t * (high - low), DGE(), ELEMENTS[name]).mean() == pytest.approx(0.593, abs=1e-3)


def test_the_power_law_is_dge_without_cap_only_where_intervals_are_two_wide():
    z = np.array([4.1, 4.7, 5.6])
    assert slope(z, PowerLaw()) == pytest.approx(slope(z, DGE(cap=1e9)), rel=1e-6)
    assert slope(0.1, PowerLaw()) == pytest.approx(0.25 * 0.2 * 0.15**-0.8, rel=1e-5)
    assert slope([0.25, 5.0], PowerLaw()) == pytest.approx(0)


def test_the_sigmoid_peaks_at_six_and_never_falls_below_its_lower_bound():
    assert slope([0.25, 1.75, 5.0, -5.0], Sigmoid()) == pytest.approx(6, rel=1e-6)
    z = np.linspace(-9, 9, 9001)
    assert slope(z, Sigmoid()).min() == 0.5
    means = slope(np.linspace(-6, 6, 240_001), Sigmoid(lower=1e-9))
    assert (means.mean(), np.median(means)) == pytest.approx((1.0, 0.06), abs=0.01)


def test_the_spline_has_four_slopes_and_64_percent_of_its_segments_are_flat():
    middles = (np.arange(39) + 0.5) * 12 / 39 - 6
    found = slope(middles, Spline(lower=1e-9))
    assert np.unique(found.round(6)).tolist() == pytest.approx([0, 1.625, 3.25, 6.5])
    assert (found < 1e-6).sum() == 25
    assert slope(middles, Spline()).min() == 0.5
    assert slope([6.5, -80.0], Spline()) == pytest.approx(0.5)


def test_clipped_and_trust_cut_off_at_the_grid_and_half_a_step_beyond():
    z = [5.9, 6.0, -6.1, 6.9, 7.1, np.inf]
    assert slope(z, Clipped()).tolist() == [1, 1, 0, 0, 0, 0]
    assert slope(z, Trust()).tolist() == [1, 1, 1, 1, 0, 0]
    up = surrogate(torch.tensor([4.1]), torch.tensor([6.0]), Through(element=Trust()), E2M1)
    assert up.item() == 0  # rounded up by chance, by more than half a step


@each("relaxation", RELAXATION_NAMES.values())
@each("name", ELEMENTS)
def test_surrogates_are_even_finite_and_not_negative_on_every_grid(relaxation, name):
    element = ELEMENTS[name]
    values = np.array(element.magnitudes())
    anywhere = np.random.default_rng(0).uniform(0, 1.2, 500) * element.max
    z = np.concatenate([values, (values[1:] + values[:-1]) / 2, anywhere])
    up, down = slope(z, relaxation, element), slope(-z, relaxation, element)
    assert np.array_equal(up, down)
    assert (np.isfinite(up) & (up >= 0)).all()


@pytest.mark.parametrize("relaxation", [DGE(), PowerLaw(), Sigmoid(), Spline(), Clipped()])
def test_masked_counts_only_from_the_largest_element_on(relaxation):
    z = np.random.default_rng(1).uniform(-9, 9, 2000)
    masked, unmasked, inside = slope(z, relaxation, masked=True), slope(z, relaxation), np.abs(z) < 6
    assert (masked[inside] == 1).all()
    assert np.array_equal(masked[~inside], unmasked[~inside])


# finite differences of the smooth surrogate, in float64


def smooth(z, at, relaxation, masked):
    """The surrogate of Q near `at`, element by element, up to a constant: what its slope is the derivative of."""
    grid = np.array(E2M1.magnitudes())
    i = np.clip(np.searchsorted(grid, np.abs(at), side="right") - 1, 0, len(grid) - 2)
    low, width = grid[i], grid[i + 1] - grid[i]
    a, a0 = z * np.sign(at), np.abs(at)
    u, u0 = a - low - width / 2, a0 - low - width / 2
    match relaxation:
        case STE():
            f = a
        case Clipped():
            f = np.clip(a, -6, 6)
        case DGE(k=k, cap=cap):
            t, t0 = 2 * u / width, 2 * u0 / width
            f = width / 2 * np.where(np.abs(t0) ** (1 / k - 1) / k < cap, np.sign(t) * np.abs(t) ** (1 / k), cap * t)
            f = np.where(a0 <= 6, f, 0)
        case PowerLaw(k=k):
            f = width / 2 * np.sign(u) * np.abs(u) ** (1 / k)
        case Sigmoid(temperature=temperature, lower=lower):
            s, s0 = (1 / (1 + np.exp(-12 * v / (width * temperature))) for v in (u, u0))
            f = np.where(12 * s0 * (1 - s0) / temperature > lower, width * s, lower * a)
        case Spline(lower=lower):
            knots = np.linspace(-6, 6, 40)
            f = np.interp(a, knots, nearest(knots))
            rises = np.interp(a0 + 1e-4, knots, nearest(knots)) - np.interp(a0 - 1e-4, knots, nearest(knots)) > 1e-9
            f = np.where(rises, f, lower * a)
        case Trust():
            f = np.where(np.abs(nearest(at) - at) <= 1, a, 0)
    return np.sign(at) * np.where(masked & (a0 < 6), a, f)


def block_scale(x, at, weights, val_max):
    """S(x) [blocks, 1] near x = at."""
    amax = np.abs(at).max(-1, keepdims=True)
    if weights == "none":
        return amax / val_max
    if not weights.startswith("softmax"):
        return np.abs(x).max(-1, keepdims=True) / val_max

    def soft_maximum(v):  # with the gradient softmax(80 |x| / amax)
        return amax / 80 * np.log(np.exp(80 * (np.abs(v) / amax - 1)).sum(-1, keepdims=True))

    return (amax + soft_maximum(x) - soft_maximum(at)) / val_max


def decoded(x, at, spec, val_max):
    """x̂ of the smooth surrogate near x = at; at x = at that of the hard quantizer."""
    s, s0 = block_scale(x, at, spec.scale, val_max), block_scale(at, at, spec.scale, val_max)
    elements = [smooth(z, at / s0, spec.element, spec.masked) for z in (x / s, at / s0)]
    return s * (nearest(at / s0) + elements[0] - elements[1])


def finite_differences(g, x, spec, val_max):
    """dL/dx of L = Σ g · x̂, float64 [blocks, B]; for the diagonal forms each element through its own x̂ alone."""
    out = np.zeros_like(x)
    for j in range(x.shape[1]):
        h = 1e-6 * np.abs(x).max(-1)
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[:, j] += sign * h
            ends.append(g * decoded(moved, x, spec, val_max))
        change = (ends[0] - ends[1]) / (2 * h[:, None])
        out[:, j] = change[:, j] if "diagonal" in spec.scale else change.sum(-1)
    return out


@each("masked", [False, True])
@each("scale", SCALE_GRADIENTS)
@each("relaxation", RELAXATION_NAMES.values())
@each("val_max", [5.5, 7.5])
def test_gradients_are_the_finite_differences_of_the_smooth_surrogate(relaxation, scale, masked, val_max):
    random = np.random.default_rng(0)
    s = 2.0 ** random.integers(-20, 20, (24, 1))
    z = (random.integers(-int(val_max * 64) + 1, int(val_max * 64) - 1, (24, 16)) + 0.5) / 64  # off all kinks
    z[np.arange(24), random.integers(0, 16, 24)] = val_max * random.choice([-1, 1], 24)
    x, g, spec = z * s, random.integers(-512, 512, (24, 16)) / 256, Through(relaxation, masked, scale)
    expected = finite_differences(g, x, spec, val_max)
    arguments = (torch.tensor(t).float()[None] for t in (g, x, nearest(z), s[:, 0]))
    got = through(*arguments, torch.ones(1), spec, E2M1, 1 / val_max)[0].double().numpy()
    assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


def encoded(q: Quantizer, x: torch.Tensor):
    """(elements, scales, decode factors) of blocks [L, n, B]."""
    blocks, dec = quantize_blocks(x, *descriptor([q.canonical()] * len(x)), None, True)
    return blocks.q, blocks.scale, dec


def test_straight_through_with_the_exact_scale_gradient_is_the_residual_at_the_block_maximum():
    torch.manual_seed(0)
    g, x = torch.randn(2, 50, 16), torch.randn(2, 50, 16)
    q, scale, dec = encoded(Quantizer(scale=FP32()), x)  # a scale that is not rounded to speak of
    got = through(g, x, q, scale, dec, Through(scale="exact"), E2M1).double() - g.double()
    residual = (g.double() * (x.double() - q.double() * scale.double()[:, :, None])).sum(2)
    index = x.abs().argmax(2, keepdim=True)
    expected = -x.gather(2, index).sign()[:, :, 0] * residual / x.abs().amax(2)
    assert torch.allclose(got.gather(2, index)[:, :, 0], expected, rtol=1e-5, atol=1e-6)
    assert (got != 0).sum() == 100


def test_of_several_largest_elements_the_first_has_the_weight():
    x = torch.tensor([1.0, -3.0, 3.0, 0.7] * 4)[None, None]
    q, scale, dec = encoded(Quantizer(scale=FP32()), x)
    got = through(torch.ones_like(x), x, q, scale, dec, Through(scale="exact"), E2M1)
    assert (got != 1).nonzero()[:, 2].tolist() == [1]


def test_under_the_encode_convention_the_published_term_is_ours_times_the_squared_rounding_of_the_scale():
    torch.manual_seed(0)
    g, x = torch.randn(2, 50, 16).double(), torch.randn(2, 50, 16)
    q, scale, dec = (t.double() for t in encoded(Quantizer(scale=UE5M3(convention="encode")), x))
    ours = through(g.float(), x, q.float(), scale.float(), dec.float(), Through(scale="exact"), E2M1).double() - g
    x, m = x.double(), 1 / scale[:, :, None]
    amax = x.abs().amax(2, keepdim=True)
    bracket = (g * (x / m - q / m**2)).sum(2, keepdim=True)
    published = torch.where(x.abs() == amax, -(6 / amax) / amax * x.sign() * bracket, 0.0)
    rounding = (scale[:, :, None] * 6 / amax) ** 2
    assert torch.allclose(published, ours * rounding, rtol=1e-4, atol=1e-6)
    assert ((rounding - 1).abs() < 0.14).all()


def test_blocks_of_zeros_and_blocks_whose_scale_is_lost_pass_finite_gradients():
    x = torch.zeros(1, 3, 16)
    x[0, 1], x[0, 2, 0] = 1e-6, 2.0  # the first two blocks have an E4M3 scale of zero
    q, scale, dec = encoded(Quantizer(), x)
    assert (scale == 0).sum() == 2
    for relaxation in RELAXATION_NAMES.values():
        for kind in SCALE_GRADIENTS:
            got = through(torch.ones_like(x), x, q, scale, dec, Through(relaxation, scale=kind), E2M1)
            assert got.isfinite().all()
            assert (got[0, 0] == torch.tensor(slope(0, relaxation))).all()


# layers


@pytest.fixture
def eager(monkeypatch):
    """Compiling takes longer than all that is computed here."""
    monkeypatch.setattr(lanes, "backend", lambda device: PLAIN)


OFF = Quantizer.named("none")
RECIPES = ("nvfp4", "nvfp4-sr", "nvfp4", "ue5m3-sr", "nvfp4-sr")


def quantized(q: Quantizer, rotation: Hadamard | None = None, **operands: Through) -> Recipe:
    """The forward product quantized, the backward products plain, with estimators for x and w."""
    recipe = Recipe.uniform(OFF)
    fprop = replace(recipe.fprop, x=q, w=q, rotation=rotation)
    return replace(recipe, fprop=fprop, estimator=Estimator(**operands))


def run(*recipes: Recipe, m=48, k=32, n=24, steps=1):
    """(y, dx, dw) of one layer, a lane per recipe, in the last of some steps."""
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(len(recipes), *s, generator=generator) for s in ((m, k), (n, k), (m, n)))
    x.requires_grad_()
    numerics = LaneNumerics(recipes, range(len(recipes)))
    layer = QuantLinear(w, None, numerics, layer=3)
    for step in range(steps):
        numerics.step.fill_(step)
        x.grad = layer.weight.grad = None
        y = layer(x)
        y.backward(g)
    return y.detach(), x.grad, layer.weight.grad


def weights(m=48, k=32, n=24):
    """The weights that `run` gives two lanes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, *shape, generator=generator) for shape in ((m, k), (n, k))][1]


def gain(q):
    """What decoded operands are multiplied by on purpose."""
    return 1.009276 if q.range == "aligned" else 1


def positions(x, q):
    """z of every element of lanes [L, R, C]."""
    seen = [quantize(lane, q) for lane in x]
    return x / torch.stack([s.scales.repeat_interleave(q.block, -1) * s.tensor_scale / gain(q) for s in seen])


def equal(a, b) -> list[bool]:
    return [torch.equal(s, t) for s, t in zip(a, b, strict=True)]


DGE_EXACT = Through(DGE(), scale="exact")


@pytest.mark.usefixtures("eager")
def test_without_a_quantizer_an_estimator_changes_nothing():
    estimator = Estimator(x=DGE_EXACT, w=DGE_EXACT)
    assert all(equal(run(*[replace(Recipe.uniform(OFF), estimator=estimator)] * 2), run(*[Recipe.uniform(OFF)] * 2)))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("operand", "changed"), [("x", 1), ("w", 2)])
@pytest.mark.parametrize("name", ["nvfp4-sr-rht", "mxfp4"])
def test_an_estimator_changes_the_gradient_of_its_own_operand_alone(name, operand, changed):
    recipe = Recipe.named(name)
    other = replace(recipe, estimator=Estimator(**{operand: DGE_EXACT}))
    assert equal(run(recipe, recipe), run(other, other)) == [i != changed for i in range(3)]


NEVER_CLIPS = {
    "1x32": Quantizer.named("mxfp4-rceil"),
    "32x32": Quantizer.named("mxfp4-2d"),
    "row": Quantizer(block="row", scale=FP32()),
    "tensor": Quantizer(element="int4", block="tensor", scale=FP32()),
    "3/4": Quantizer.named("mxfp4-34"),
}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rotation", [None, Hadamard(size=32)])
@pytest.mark.parametrize("q", NEVER_CLIPS.values(), ids=NEVER_CLIPS)
def test_a_surrogate_that_is_one_everywhere_is_straight_through(q, rotation):
    """Any block, sizes that are padded; with a rotation up to its own rounding."""
    sizes = {"m": 20, "k": 17, "n": 10}
    straight, clipped = (quantized(q, rotation, x=Through(e), w=Through(e)) for e in (STE(), Clipped()))
    expected, got = run(straight, straight, **sizes), run(clipped, clipped, **sizes)
    assert torch.equal(got[0], expected[0])
    for ours, theirs in zip(got[1:], expected[1:], strict=True):
        assert torch.equal(ours, theirs) if rotation is None else torch.allclose(ours, theirs, atol=1e-5)


ON_ONE_GRID = {n: q for n, q in QUANTIZERS.items() if q.codec in ONE_GRID and q.codec in CODECS and not q.is_plain}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", ON_ONE_GRID)
def test_the_forward_product_has_the_same_bits_with_an_estimator(name):
    straight, clipped = (quantized(ON_ONE_GRID[name], x=Through(e), w=Through(e)) for e in (STE(), Clipped()))
    expected, got = (run(r, r, m=32, n=64, k=64)[0] for r in (straight, clipped))
    assert torch.equal(got, expected)


IN_RANGES = {n: Quantizer.named(n) for n in ("nvfp4", "mxfp4-34")}
IN_RANGES["mxfp4 aligned"] = replace(Quantizer.named("mxfp4"), range="aligned")
ROUNDED_TO_NEAREST = {n: q for n, q in ON_ONE_GRID.items() if isinstance(q.rounding, Nearest)}


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("q", (ROUNDED_TO_NEAREST | IN_RANGES).values(), ids=ROUNDED_TO_NEAREST | IN_RANGES)
def test_elements_are_the_nearest_to_the_position_that_the_backward_pass_sees(q):
    w = torch.randn(2, 32, 128, generator=torch.Generator().manual_seed(0))
    recipe = quantized(q, w=Through(Clipped()))
    saved = LaneNumerics([recipe] * 2, [0, 1]).forward(0, w, w, save=(False, True)).saved_w
    scale = saved.scale if saved.scale.ndim == 3 else saved.scale[:, :, None]
    z = (saved.x / (scale * saved.dec.view(2, -1, 1) / gain(q))).double().numpy()
    error, least = (np.abs(t - z) for t in (saved.q.double().numpy(), nearest(z, ELEMENTS[q.element])))
    assert (error <= least + 1e-5 * np.abs(z)).all()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("amax", ["previous", "held"])
def test_what_a_slot_keeps_from_step_to_step_moves_on_once_a_step_with_an_estimator(amax):
    q = Quantizer.named("nvfp4")
    q = replace(q, tensor_scale=replace(q.tensor_scale, amax=amax, steps=2))
    straight, clipped = (quantized(q, x=Through(e), w=Through(e)) for e in (STE(), Clipped()))
    for steps in (1, 2, 3):
        assert torch.equal(run(straight, straight, steps=steps)[0], run(clipped, clipped, steps=steps)[0])


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("rotation", [None, Hadamard(size=16, signs="fixed")])
@pytest.mark.parametrize("q", IN_RANGES.values(), ids=IN_RANGES)
def test_the_weight_gradient_is_multiplied_by_the_surrogate_at_the_weights_position(q, rotation):
    straight, dge = (quantized(q, rotation, w=t) for t in (Through(), Through(DGE())))
    dw, got = run(straight, straight)[2], run(dge, dge)[2]
    fixed = fixed_signs(16, torch.device("cpu"))
    turn = (lambda t: rotate(t, 16, 2, fixed)) if rotation else (lambda t: t)
    back = (lambda t: rotate_back(t, 16, 2, fixed)) if rotation else (lambda t: t)
    factor = torch.tensor(slope(positions(turn(weights()), q), DGE())).float()
    assert torch.allclose(got, back(turn(dw) * factor), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(got, dw, atol=0.1)


@pytest.mark.usefixtures("eager")
def test_masked_as_released_differs_from_straight_through_only_at_clipped_weights():
    q = Quantizer.named("nvfp4")
    straight, masked, unmasked = (quantized(q, w=t) for t in (Through(), Through(DGE(), masked=True), Through(DGE())))
    dw, got, full = (run(r, r)[2] for r in (straight, masked, unmasked))
    inside = positions(weights(), q).abs() < 6 * (1 - 2**-20)
    assert torch.equal(got == dw, inside)
    assert 0.01 < (~inside).float().mean() < 0.06
    assert (full == dw).float().mean() < 0.01


SPECS = [Through(DGE(), scale="softmax"), Through(Sigmoid(), True, "exact"), Through(PowerLaw())]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("spec", SPECS)
def test_a_lane_has_the_same_bits_in_any_company_with_an_estimator(spec):
    recipes = [replace(Recipe.named(n), estimator=Estimator(x=spec, w=spec)) for n in RECIPES]
    torch.manual_seed(0)
    x, w, g = torch.randn(5, 40, 48), torch.randn(5, 24, 48), torch.randn(5, 40, 24)
    x[1, :3] = 0

    def gradients(*lanes):
        layer = QuantLinear(w[[*lanes]], None, LaneNumerics([recipes[i] for i in lanes], lanes), layer=1)
        leaf = x[[*lanes]].requires_grad_()
        layer(leaf).backward(g[[*lanes]])
        return leaf.grad, layer.weight.grad

    together = gradients(0, 1, 2, 3, 4)
    assert all(t.isfinite().all() for t in together)
    x[0] = float("nan")
    assert all(torch.equal(a[1:], b[1:]) for a, b in zip(together, gradients(0, 1, 2, 3, 4), strict=True))
    for chosen in ([3, 1], [4, 2, 1], [1, 2, 3, 4]):
        assert all(equal(gradients(*chosen), [t[chosen] for t in together]))


@pytest.mark.usefixtures("eager")
def test_lanes_whose_estimators_or_their_grids_differ_are_refused():
    def recipe(element="e2m1", k=5.0):
        return quantized(Quantizer(element=element), w=Through(DGE(k=k)))

    for other in (recipe(k=5.000001), recipe("e1m2")):
        with pytest.raises(ValueError, match="structural signature"):
            LaneNumerics([recipe(), other], [0, 1])
    LaneNumerics([quantized(Quantizer(element=e)) for e in ("e2m1", "e1m2")], [0, 1])
