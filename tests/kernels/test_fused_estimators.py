"""Gradients pass through the kernel as through the reference, bit for bit, whatever the estimator and the quantizer."""

import itertools
import random

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Hadamard, Quantizer, Recipe
from fp4dse.dse.estimator import (
    DGE,
    RELAXATION_NAMES,
    SCALE_RELAXATION_NAMES,
    STE,
    Estimator,
    PowerLaw,
    Sigmoid,
    Spline,
    Through,
)
from fp4dse.dse.formats import ELEMENTS
from fp4dse.dse.rounding import Ema, Nearest, Stochastic
from fp4dse.dse.rules import canonical_faults
from fp4dse.dse.rules.quantizers import quantizer_faults
from fp4dse.dse.scale import BF16, E4M3, SCALE_NAMES, TensorScale
from fp4dse.kernels import LaneNumerics, QuantLinear, lanes
from fp4dse.kernels.ops import launching
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.operand.records import SavedInput
from fp4dse.kernels.quant.spec import estimators
from fp4dse.kernels.quant.triton import operators as fused

replace = msgspec.structs.replace
SCALES = ("none", "diagonal", "exact", "softmax-diagonal", "softmax")
KERNELS = replace(PLAIN, operand=fused.operand, through=fused.through)


def recipe(q, spec, rotation=None):
    """The weights of the forward product quantized, with an estimator."""
    r = Recipe.uniform(Quantizer.named("none"))
    return replace(r, fprop=replace(r.fprop, w=q, rotation=rotation), estimator=Estimator(w=spec))


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
    """What becomes of g on its way through the quantizer of fprop.w, which sees smaller numbers from step to step, in
    the last of them; whether its kernel was taken, and why not."""
    monkeypatch.setattr(lanes, "backend", lambda _: backend)
    numerics = LaneNumerics(recipes, range(len(recipes)), place.device)
    for step in range(steps):
        numerics.step.fill_(step + 7)
        saved = numerics.forward(3, x[:, :1], x * (steps - step), save=(False, True)).saved_w
    by_kernel = isinstance(saved, SavedInput)
    return numerics.backward("w", 3, g, saved).cpu(), by_kernel, numerics.through_why_not


def agree(place, monkeypatch, recipes, x, steps=1):
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(place.device)
    x = x.to(place.device)
    expected, by_kernel, why_not = gradients(place, monkeypatch, PLAIN, recipes, x, g, steps)
    assert not by_kernel
    assert not why_not
    got, by_kernel, why_not = gradients(place, monkeypatch, KERNELS, recipes, x, g, steps)
    assert by_kernel
    assert not why_not
    nan = expected.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(torch.int32)[~nan], expected.view(torch.int32)[~nan])
    return expected


NV = QUANTIZERS["nvfp4"]
FORMS = [
    Through(r, masked, scale)
    for r, scale in itertools.product(RELAXATION_NAMES.values(), SCALES)
    for masked in (False, True)
]
FORMS = [form for form in FORMS if form.canonical(NV.scale) == form != Through()]


@pytest.mark.slow
@pytest.mark.parametrize("spec", FORMS, ids=Through.label)
def test_every_form_has_the_bits_of_the_reference(place, monkeypatch, spec):
    agree(
        place, monkeypatch, [recipe(replace(NV, rounding=r), spec) for r in (Nearest(), Stochastic())], hard(2, 15, 48)
    )


@pytest.mark.parametrize("spec", random.Random(0).sample(FORMS, 8), ids=Through.label)
def test_some_form_has_the_bits_of_the_reference(place, monkeypatch, spec):
    agree(
        place, monkeypatch, [recipe(replace(NV, rounding=r), spec) for r in (Nearest(), Stochastic())], hard(2, 15, 32)
    )


def test_a_large_lane_has_the_bits_of_the_reference(place, monkeypatch):
    monkeypatch.setattr(launching, "NEAR", 0)
    for q in (replace(NV, rounding=Stochastic()), QUANTIZERS["if4"]):
        agree(place, monkeypatch, [recipe(q, Through(DGE(), False, "exact"))] * 2, hard(2, 15, 2 * q.unit))


NUMBERS = (
    DGE(k=1.0),
    DGE(k=0.5, cap=1.5),
    PowerLaw(k=1.0),
    PowerLaw(k=0.7),
    PowerLaw(k=3.7),
    Sigmoid(0.3, 0.01),
    Spline(1e-3),
)


@pytest.mark.parametrize("relaxation", NUMBERS, ids=str)
def test_a_form_has_its_numbers(place, monkeypatch, relaxation):
    agree(place, monkeypatch, [recipe(NV, Through(relaxation))] * 2, hard(2, 15, 32))


OF_8_BITS = [name for name in SCALE_NAMES if name not in ("e8m0", "e6m2", "bf16", "fp32", "one")]
ROUNDINGS = [r for r in SCALE_RELAXATION_NAMES.values() if r != STE()]


@pytest.mark.parametrize(("number", "scale"), list(enumerate(OF_8_BITS)))
def test_the_rounding_of_every_scale_has_the_bits_of_the_reference(place, monkeypatch, number, scale):
    """Lanes with and without a tensor scale; every relaxation with two formats or more."""
    spec = Through(STE(), number % 2 == 0, SCALES[1 + number % 4], ROUNDINGS[number % len(ROUNDINGS)])
    lanes = [Quantizer(scale=SCALE_NAMES[scale], tensor_scale=t) for t in (TensorScale(), None)]
    agree(place, monkeypatch, [recipe(q, spec) for q in lanes], hard(2, 15, 32))


@pytest.mark.slow
@pytest.mark.parametrize("scale", OF_8_BITS)
def test_every_rounding_of_every_scale_has_the_bits_of_the_reference(place, monkeypatch, scale):
    for rounding, masked in itertools.product(ROUNDINGS, (False, True)):
        spec = Through(Sigmoid(), masked, "diagonal", rounding).canonical(SCALE_NAMES[scale])
        lanes = [Quantizer(scale=SCALE_NAMES[scale], tensor_scale=t) for t in (TensorScale(), None)]
        agree(place, monkeypatch, [recipe(q, spec) for q in lanes], hard(2, 15, 32))


ON_THE_GRID = [name for name in ELEMENTS if name not in ("s1p2", "radix4", "radix4-odd")]


@pytest.mark.parametrize(("number", "element"), list(enumerate(ON_THE_GRID)))
def test_every_element_has_the_bits_of_the_reference(place, monkeypatch, number, element):
    spec = Through((PowerLaw(), DGE(), Spline(), Sigmoid())[number % 4], scale="exact")
    for scale in ("e8m0-nearest", "fp32"):
        agree(
            place, monkeypatch, [recipe(Quantizer(element, 32, SCALE_NAMES[scale]), spec)] * 2, hard(2, 15, 64, element)
        )


WITH_PARTS = {
    "soft maxima": replace(NV, scaling="softmax", rounding=Stochastic()),
    "soft maxima of 32": Quantizer(block=32, scale=SCALE_NAMES["e8m0-encode"], scaling="softmax"),
    "zero kept": Quantizer(scale=E4M3(convention="encode", rounding="up")),
    "4over6": QUANTIZERS["nvfp4-4over6-mse"],
    "3/4": replace(QUANTIZERS["mxfp4-34"], block=64),
    "aligned": replace(QUANTIZERS["mxfp4"], range="aligned", block=128),
    **{name: QUANTIZERS[name] for name in ("quest-mxfp4", "amxfp4", "mbs-mxfp4")},
    "exact": Quantizer(arithmetic="exact", tensor_scale=TensorScale()),
}


@pytest.mark.parametrize("name", WITH_PARTS)
def test_every_codec_on_one_grid_has_the_bits_of_the_reference(place, monkeypatch, name):
    q = WITH_PARTS[name]
    for scale, rounding in itertools.product(SCALES[::-1], (PowerLaw(), STE())):
        r = recipe(q, Through(Sigmoid(), True, scale, rounding if scale != "none" else STE()))
        if not canonical_faults(r.canonical()):
            break
    assert not quantizer_faults(q)
    agree(place, monkeypatch, [r] * 2, hard(2, 15, 2 * q.unit))


@pytest.mark.parametrize(
    ("rotation", "block"),
    [
        (Hadamard(16), 16),
        (Hadamard(32), 32),
        (Hadamard(128), 16),
        (Hadamard(16, "fixed"), 64),
        (Hadamard(32, "none"), 16),
    ],
    ids=str,
)
def test_what_the_kernel_rotates_has_the_bits_of_the_reference(place, monkeypatch, rotation, block):
    q = replace(NV, block=block, rounding=Stochastic())
    r = recipe(q, Through(DGE(), scale="exact", scale_rounding=Sigmoid()), rotation)
    agree(place, monkeypatch, [r] * 2, hard(2, 15, 128))


@pytest.mark.parametrize("rotation", [None, Hadamard(16), Hadamard(32, order="sequency")], ids=str)
def test_padded_bfloat16_operands_have_the_bits_of_the_reference(place, monkeypatch, rotation):
    """The last rotation is not the kernel's."""
    q = replace(NV, rounding=Stochastic())
    x = hard(3, 15, 40).to(torch.bfloat16)
    agree(place, monkeypatch, [recipe(q, Through(Sigmoid(), True, "softmax"), rotation)] * 3, x)


@pytest.mark.parametrize("shape", [(1, 1, 16), (2, 37, 80), (3, 130, 16)], ids=str)
def test_odd_shapes(place, monkeypatch, shape):
    """Several programs, of which the last has few rows or one; lanes of a tensor that lie apart."""
    lanes = [replace(NV, rounding=r) for r in (Stochastic(), Nearest(), Stochastic(bits=8))][: shape[0]]
    memory = torch.randn(shape[0], shape[1] * shape[2] + 8, generator=torch.Generator().manual_seed(0))
    x = memory[:, : shape[1] * shape[2]].view(shape)
    agree(place, monkeypatch, [recipe(q, Through(Sigmoid(), scale="diagonal")) for q in lanes], x)


def test_a_masked_spline_is_flat_beyond_its_last_knot_which_is_the_largest_element():
    for element in ELEMENTS.values():
        knots, slopes = estimators._spline_table(element, torch.device("cpu"))
        assert (knots[-1], slopes[-1]) == (element.max, 0)


@pytest.mark.parametrize("amax", ["previous", "held"])
def test_elements_are_made_again_with_the_maxima_of_the_forward_pass(place, monkeypatch, amax):
    q = replace(NV, tensor_scale=TensorScale(amax=amax, steps=3))
    x = hard(2, 15, 32)[:, 7:13]
    spec = Through(PowerLaw(), scale="exact")
    found = [agree(place, monkeypatch, [recipe(q, spec)] * 2, x, steps) for steps in (1, 2)]
    assert not torch.equal(found[0], found[1])


def test_a_block_that_decodes_to_nan_has_a_gradient_that_is_nan(place, monkeypatch):
    q = replace(NV, tensor_scale=None)
    got = agree(place, monkeypatch, [recipe(q, Through(DGE()))] * 2, hard(2, 15, 32))
    nan = torch.zeros(2, 15, 2, dtype=torch.bool)
    nan[1, 13:, 0] = True
    assert torch.equal(got.isnan(), nan.repeat_interleave(16, 2))


NOT_TAKEN = {
    "block: found 16x16; accepted: 16, 32": QUANTIZERS["nvfp4-2d"],
    "codec: found radix4; accepted: block, eden": replace(QUANTIZERS["radix4"], block=16),
    "tensor_scale.over: found row; accepted: tensor": replace(NV, tensor_scale=TensorScale(over="row")),
    "scale.rounding: found stochastic": Quantizer(scale=E4M3(rounding="stochastic")),
    "rounding: found ema; accepted": replace(NV, rounding=Ema()),
    "scale: found bf16 with a gradient through its rounding": Quantizer(scale=BF16()),
}


@pytest.mark.parametrize(("reason", "q"), NOT_TAKEN.items(), ids=list(NOT_TAKEN))
def test_what_the_kernel_does_not_take_goes_through_the_reference_and_is_told(place, monkeypatch, reason, q):
    spec = Through(Sigmoid(), scale="exact", scale_rounding=Sigmoid()) if q.codec == "block" else Through(Sigmoid())
    x, g = torch.randn(2, 2, 32, 32).to(place.device)
    expected, _, nothing = gradients(place, monkeypatch, PLAIN, [recipe(q, spec)] * 2, x, g)
    got, by_kernel, why_not = gradients(place, monkeypatch, KERNELS, [recipe(q, spec)] * 2, x, g)
    assert nothing == ()
    assert not by_kernel
    assert why_not[0].startswith("fprop.w: gradient through the reference (" + reason)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["nvfp4-sr-rht", "quartet", "mxfp4"])
def test_a_layer_has_the_gradients_of_the_reference(place, monkeypatch, name):
    """quartet's backward operands are the forward's copies."""
    spec = Through(Sigmoid(), True, "none" if name == "quartet" else "softmax-diagonal")
    recipes = [replace(Recipe.named(name), estimator=Estimator(x=spec, w=spec))] * 2
    x, w, g = (torch.randn(2, *shape, device=place.device) for shape in ((20, 40), (24, 40), (20, 24)))
    found = []
    for backend in (PLAIN, KERNELS):
        monkeypatch.setattr(lanes, "backend", lambda _, backend=backend: backend)
        leaf = x.clone().requires_grad_()
        layer = QuantLinear(w, None, LaneNumerics(recipes, (3, 4), place.device), layer=1)
        y = layer(leaf)
        y.backward(g)
        found.append((y.detach(), leaf.grad, layer.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_what_is_counted_goes_through_the_reference(place, monkeypatch):
    monkeypatch.setattr(lanes, "backend", lambda _: KERNELS)
    numerics = LaneNumerics([recipe(NV, Through(DGE()), Hadamard(16))] * 2, (3, 4), place.device)
    x, g = torch.randn(2, 2, 32, 32).to(place.device)
    found = []
    for numerics.counting in (False, True):
        saved = numerics.forward(3, x, x, save=(False, True)).saved_w
        numerics.counting = False
        found.append(numerics.backward("w", 3, g, saved))
    assert torch.equal(*found)
    assert numerics.lost()


def test_the_operator_is_sound(place, monkeypatch):
    monkeypatch.setattr(lanes, "backend", lambda _: KERNELS)
    slot = LaneNumerics([recipe(NV, Through(Spline(), scale="exact"))] * 2, (3, 4), place.device).slots["fprop.w"]
    x, g = torch.randn(2, 2, 32, 32).to(place.device)
    seeds, step = torch.arange(2, device=place.device), torch.tensor(0, device=place.device)
    amax, form = torch.ones(2, device=place.device), ("spline", False, "exact", "ste")
    call = Call(16, *slot.scaled.quantizers.tables, slot.scaled.quantizers.features, seeds, step, 5, amax, 16)
    flat = *call[:3], list(call.features), *call[4:]
    arguments = g, x, slot.numbers, *form, *flat
    torch.library.opcheck(torch.ops.fp4dse.through, arguments, test_utils=["test_schema", "test_faketensor"])
    with pytest.raises(ValueError, match=r"g: found torch.float32 \(2, 16, 32\); accepted: float32 \(2, 32, 32\)"):
        fused.through(g[:, :16], x, call, slot.numbers, form)
