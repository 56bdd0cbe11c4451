"""The kernels of the quantized attention core: P and dS are quantized as the definition has it, what follows agrees
with it within the order of sums, each lane has bits of its own, and what they do not take is the definition's.
"""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.attention import ATTENTION_SLOTS
from fp4dse.dse.scale import TensorScale
from fp4dse.kernels import lanes as numerics_module
from fp4dse.kernels.dispatch import refusals
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.ops.attention_core import CoreUse
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.operand.lane_quantizers import LaneQuantizers
from fp4dse.kernels.quant.operand.paths import PATHS
from fp4dse.kernels.quant.operand.records import Use
from fp4dse.kernels.quant.triton import operators
from tests.kernels.comparing import take_kernels

INNER = ("context.p", "dv.p", "dq.s", "dk.s")
LAYER, STEP = 7, 5


def recipe(quantizer, slots=ATTENTION_SLOTS, **more):
    core = {}
    for slot in slots:
        product, operand = slot.split(".")
        core.setdefault(product, {})[operand] = quantizer
    return recipe_from_dict({**recipe_to_dict(Recipe.named("bf16")), "attention": core | more})


def drawn(lanes, length, size, heads=1, seed=0):
    """q, k, v and a gradient, float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, lanes * heads, length, size, generator=generator).unbind(0)


def numerics_of(place, recipes, step=STEP):
    numerics = LaneNumerics(recipes, range(3, 3 + len(recipes)), place.device)
    numerics.step.fill_(step)
    return numerics


def passes(place, numerics, tensors, causal=True, dtype=torch.float32):
    """The output and the gradients of q, k, v, on the CPU."""
    *operands, g = (x.to(place.device, dtype) for x in tensors)
    leaves = [x.clone().requires_grad_() for x in operands]
    out = numerics.attention(LAYER, *leaves, causal)
    out.backward(g)
    return [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))]


@pytest.fixture
def plain_backend(place, monkeypatch):
    """On a CPU operands are quantized by the reference: there is nothing to compile."""
    if place.device == "cpu":
        monkeypatch.setattr(numerics_module, "backend", lambda device: PLAIN)


@pytest.fixture
def both(place, plain_backend, monkeypatch):
    """What the kernels, and what the definition computes."""

    def run(recipes, tensors, causal=True, dtype=torch.float32):
        found = []
        for taken in (True, False):
            take_kernels(monkeypatch, "attention_core", taken=taken)
            refusals()
            found.append(passes(place, numerics_of(place, recipes), tensors, causal, dtype))
            assert not refusals()
        take_kernels(monkeypatch, "attention_core")
        return found

    return run


def error(ours, theirs):
    """The largest relative one, of norms."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def same(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


NVFP4 = QUANTIZERS["nvfp4"]
GROUPS = {
    "blocks of 16": [{"like": "nvfp4", "rounding": "stochastic"}, "nvfp4-4over6-mse"],
    "blocks of 32": ["mxfp8-e5m2", {"like": "mxfp4-34", "rounding": "stochastic"}],
    "tensor": ["fp8", "fp8-e5m2"],
    "tensor, by chance": [{"like": "fp8", "rounding": "stochastic"}],
    "tensor, one": ["fp8-current"],
}


@pytest.mark.parametrize(
    ("group", "one"),
    [
        ("blocks of 16", "v"),
        ("blocks of 16", "q"),
        ("blocks of 32", "k"),
        ("tensor", "k"),
        ("tensor, by chance", "v"),
        ("tensor, one", "q"),
    ],
)
def test_given_s_the_bits_of_p_and_ds_are_those_of_the_definition(place, plain_backend, group, one):
    """Where an operand is the unit matrix the product shows the other one. q, k, v are integers, so that products are
    exact, and do is the unit matrix, so that rowsum(do ∘ o) is the diagonal of o."""
    causal, length = one != "q", 16 if "chance" in group else 24  # blocks are cut by the end
    recipes = [recipe(q, INNER) for q in GROUPS[group]]
    generator = torch.Generator().manual_seed(1)
    unit = torch.eye(length).expand(len(recipes), -1, -1)
    q, k, v = torch.randint(-9, 10, (3, *unit.shape), generator=generator).float().unbind(0)
    q, k, v = (unit if name == one else x for name, x in zip("qkv", (q, k, v), strict=True))
    numerics = numerics_of(place, recipes)
    use = CoreUse(numerics.core, numerics, LAYER, causal)
    q, k, v, unit = (x.to(place.device) for x in (q, k, v, unit))
    assert place.attention_core.why_not(q, k, v, use) is None
    out, kept = place.attention_core.forward(q, k, v, use)
    dq, dk, dv = place.attention_core.backward(unit, out, kept, use, (torch.float32,) * 3)

    scale = length**-0.5
    s = q @ k.mT * torch.tensor(1.4426950408889634 * scale, device=q.device)
    if causal:
        s = s.masked_fill(torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    p = torch.exp2(s - kept.scores.m[..., None]) * kept.scores.inverse[..., None]
    ds = p * (v.mT - torch.diagonal(out, dim1=1, dim2=2)[..., None])

    def quantized(name, x):
        return numerics.core.products[name].operands(x, unit, numerics.use(LAYER), LAYER)[0].decoded()[..., :length]

    shown = [(dv, quantized("dv", p.mT))]
    shown += [(out, quantized("context", p))] if one == "v" else []
    shown += [(dq, quantized("dq", ds) * scale)] if one == "k" else []
    shown += [(dk, quantized("dk", ds.mT) * scale)] if one == "q" else []
    for found, wanted in shown:
        assert len({float(x) for x in wanted.flatten()}) > 9
        if place.device == "cpu":
            assert torch.equal(found, wanted)
        else:  # whose 2^x may be an ulp off torch's, so that ties fall otherwise
            assert (found == wanted).float().mean() > 0.99


@pytest.mark.parametrize(
    ("quantizer", "slots", "shape", "causal", "more"),
    [
        ("nvfp4", ATTENTION_SLOTS, (70, 16), True, {}),
        ({"like": "mxfp8", "block": 64}, ATTENTION_SLOTS, (40, 16), False, {"weights": "unnormalized"}),
        ("mxfp4", ATTENTION_SLOTS, (33, 24), True, {"smooth_k": True}),
        ("fp8", ATTENTION_SLOTS, (17, 8), False, {}),
        ("nvfp4-2d", ("scores.q", "dv.g", "dq.k"), (40, 16), True, {}),
        ("mxfp8", ("dk.s", "scores.k"), (1, 8), True, {}),
    ],
)
def test_outputs_and_gradients_agree_with_the_definition(both, quantizer, slots, shape, causal, more):
    """A number near a tie may be rounded the other way; another format, or another place to quantize, would change all
    by more than a hundredth."""
    kernels, definition = both([recipe(quantizer, slots, **more)], drawn(1, *shape), causal)
    assert error(kernels, definition) < 2e-3


def test_bf16_comes_and_goes_rounded_once(both):
    tensors = [x.to(torch.bfloat16).float() for x in drawn(1, 20, 16)]
    low, definition = both([recipe("nvfp4")], tensors, True, torch.bfloat16)
    assert all(x.dtype == torch.bfloat16 for x in low)
    assert error(low, definition) < 2e-3


def test_lanes_have_bits_of_their_own(place, both):
    """Alone, among others, in another place, and beside one that has diverged."""
    slots = (*INNER, "scores.k", "dk.q")
    recipes = [recipe(q, slots) for q in ("nvfp4", {"like": "nvfp4", "rounding": "stochastic"}, "e4m3-b16")]
    assert len({of.signature() for of in recipes}) == 1
    tensors = drawn(3, 40, 16)
    among, _ = both(recipes, tensors)
    for x in tensors:
        x[1] = float("nan")
    beside = passes(place, numerics_of(place, recipes), tensors)
    assert same([x[::2] for x in among], [x[::2] for x in beside])
    assert all(x[1].isnan().all() for x in beside)
    alone = numerics_of(place, recipes[2:])
    alone.reseed([5])
    assert same([x[2:] for x in among], passes(place, alone, [x[2:] for x in tensors]))


def test_heads_of_a_lane_share_their_maxima_and_no_others(place, both):
    q, k, v, g = drawn(2, 16, 16, heads=2)
    q[1], v[0], g[3] = 30 * q[1], 5 * v[0], 9 * g[3]
    kernels, definition = both([recipe("nvfp4"), recipe("e4m3-b16")], (q, k, v, g))
    assert error(kernels, definition) < 2e-3


def test_every_output_is_written(place, both, monkeypatch):
    recipes, tensors = [recipe("nvfp4", (*INNER, "dv.g"))], drawn(1, 20, 24)
    expected, _ = both(recipes, tensors)
    empty = torch.empty

    def poisoned(*shape, **more):
        made = empty(*shape, **more)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", poisoned)
    assert same(passes(place, numerics_of(place, recipes), tensors), expected)


@pytest.mark.parametrize("amax", ["previous", "history"])
def test_maxima_of_earlier_steps_are_followed(place, plain_backend, monkeypatch, amax):
    q = msgspec.structs.replace(NVFP4, tensor_scale=TensorScale(amax=amax, steps=2.0))
    states = []
    for taken in (True, False):
        take_kernels(monkeypatch, "attention_core", taken=taken)
        numerics = numerics_of(place, [recipe(q)], step=0)
        for step in range(2):
            numerics.step.fill_(step)
            found = passes(place, numerics, [(1 + step) * x for x in drawn(1, 16, 16, seed=step)])
        states.append([found, {name: slot.state for name, slot in numerics.core.slots.items()}])
    (ours, of_ours), (theirs, of_theirs) = states
    assert error(ours, theirs) < 2e-3
    for name, state in of_theirs.items():
        assert state.keys() == of_ours[name].keys() != set()
        for key, value in state.items():
            torch.testing.assert_close(of_ours[name][key], value, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("quantizer", "slot", "reason"),
    [
        ("fp4-row", "scores.q", "scores.q: found fp4-row; accepted: operands that BF16 holds"),
        ("fp8-row", "dp.v", "dp.v: tensor_scale.over: found row; accepted: tensor"),
        ("fp8-1x128", "context.p", "context.p: tensor_scale.over: found segment; accepted: tensor"),
        ("if4", "dv.p", "dv.p: codec: found if4; accepted: block"),
        ("int4-sawb", "dk.q", "dk.q: codec: found sawb; accepted: block"),
        ("nvfp4-2d", "dq.s", "dq.s: block: found 16x16; accepted: 16, 32, 64, tensor"),
        (
            {"like": "nvfp4", "rounding": {"mode": "stochastic", "samples": 2}},
            "dk.s",
            "dk.s: found sampled; accepted: ",
        ),
        ("none", "dk.s", "dk.s: element: found none; accepted: bf16, and block scales"),
        (
            {"like": "e4m3-b16", "scale": {"format": "e4m3", "rounding": "stochastic"}},
            "dk.s",
            "dk.s: scale_stochastic: ",
        ),
        (
            {"like": "fp8", "rounding": "stochastic"},
            "dk.s",
            "dk.s: rounding: found stochastic with rows of 9; accepted: ",
        ),
    ],
)
def test_what_the_kernels_do_not_take_is_the_definitions_with_the_reason(
    place, both, monkeypatch, quantizer, slot, reason
):
    product, operand = slot.split(".")
    tensors, of = drawn(1, 9, 8), recipe("fp8", ("dv.g",), **{product: {operand: quantizer}} if product != "dv" else {})
    of = of if product != "dv" else recipe(quantizer, (slot,))
    take_kernels(monkeypatch, "attention_core")
    refusals()  # of other tests
    found = passes(place, numerics_of(place, [of]), tensors)
    (said,) = refusals()
    assert said.startswith(f"attention_core: computed by torch ({reason}")
    take_kernels(monkeypatch, "attention_core", taken=False)
    assert same(found, passes(place, numerics_of(place, [of]), tensors))


def test_passes_that_count_are_the_definitions(place, both, monkeypatch):
    tensors = drawn(1, 16, 16)
    _, definition = both([recipe("nvfp4")], tensors)
    numerics = numerics_of(place, [recipe("nvfp4")])
    numerics.counting = True
    refusals()
    assert same(passes(place, numerics, tensors), definition)
    assert set(numerics.lost()) >= {f"attention.{slot}" for slot in ATTENTION_SLOTS}
    assert not refusals()


@pytest.mark.parametrize("name", ["fp8", "fp8-e5m2-current", "luq"])
def test_an_operand_that_is_one_block_has_the_bits_of_the_reference(place, name):
    x = (
        torch.randn(3, 7, 37, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1.0, 1e-30, 1e20])[:, None, None]
    )
    x[1, 2] = 0.0
    quantizers = [QUANTIZERS[name].canonical()] * 3
    of = LaneQuantizers(quantizers, 3, torch.device("cpu"), PLAIN)
    use = Use(torch.arange(3), torch.tensor(STEP), LAYER, True)
    expected = PATHS["reference"].run(of, x, use).decoded()
    call = Call(*(t.to(place.device) if isinstance(t, torch.Tensor) else t for t in of.call(0, use)))
    values, factor = place.of_tensor.of_tensor(x.to(place.device), call)
    assert values.dtype == torch.bfloat16
    assert torch.equal((values.float() * factor[:, None, None]).cpu(), expected)
    x[2, 0, 0] = float("inf")
    assert place.of_tensor.of_tensor(x.to(place.device), call)[1].isnan().tolist() == [False, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp8"])
def test_the_size_of_training_on_a_device(place, monkeypatch, name):
    """48 matrices of 256 × 64 in each of seven lanes: the definition's results, and the same bits twice and in the
    company of fewer."""
    if place.device == "cpu":
        pytest.skip("too much for an interpreter")
    recipes, tensors = [recipe(name)] * 7, drawn(7, 256, 64, heads=48)
    refusals()
    found = passes(place, numerics_of(place, recipes), tensors)
    assert not refusals()
    assert same(found, passes(place, numerics_of(place, recipes), tensors))
    for lanes in (1, 2):
        few = passes(place, numerics_of(place, recipes[:lanes]), [x[: 48 * lanes] for x in tensors])
        assert same([x[: 48 * lanes] for x in found], few)
    take_kernels(monkeypatch, "attention_core", taken=False)
    assert error(found, passes(place, numerics_of(place, recipes), tensors)) < 2e-3


def test_operands_of_both_products_from_one_read_are_those_of_two(place, both, monkeypatch):
    outside = ("scores.q", "scores.k", "dp.g", "dp.v", "dk.q", "dq.k", "dv.g", "context.v")
    across, along = "nvfp4", "e4m3-b16"
    products = {}
    for slot in outside:
        product, operand = slot.split(".")
        products.setdefault(product, {})[operand] = across if product in ("scores", "dp") else along
    of, tensors = recipe("nvfp4", (), **products), drawn(1, 16, 16, heads=2)
    expected, _ = both([of], tensors)
    used = []
    monkeypatch.setattr(operators, "_run", lambda *call: used.append(call))  # what quantizes one operand
    backend = msgspec.structs.replace(PLAIN, operand=operators.operand)
    monkeypatch.setattr(numerics_module, "backend", lambda device: backend)
    assert same(passes(place, numerics_of(place, [of]), tensors), expected)
    assert not used  # each of q, k, v and do is read once
