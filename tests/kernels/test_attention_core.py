"""The quantized attention core: with BF16 operands it is ops/attention, operand by operand it is what a few lines say,
and lanes do not depend on each other."""

import msgspec
import pytest
import torch
import torch.nn.functional as F

from fp4dse.dse import QUANTIZERS, ConfigError, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.attention import ATTENTION_PRODUCTS, ATTENTION_SLOTS, Attention
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.ops.attention import attention
from fp4dse.kernels.ops.attention_core import AttentionCore, attention_core
from fp4dse.kernels.quant.backend import backend
from fp4dse.kernels.quant.quantize import quantize
from fp4dse.tasks.catalogue import get_task
from fp4dse.tasks.engine import train
from fp4dse.tasks.job import Lane

LANES, HEADS, LENGTH, SIZE = 3, 4, 48, 32
"""Heads: samples × heads of a lane."""


def recipe(base="nvfp4", quantizer=None, slots=(), **more):
    data = recipe_to_dict(Recipe.named(base))
    core = {}
    for slot in slots:
        product, operand = slot.split(".")
        core.setdefault(product, {})[operand] = quantizer
    return recipe_from_dict({**data, "attention": core | more})


def inputs(lanes=LANES, length=LENGTH):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(lanes * HEADS, length, SIZE, generator=generator) for _ in range(4)]


def passes(function, tensors):
    """Output and gradients of q, k, v."""
    *operands, g = tensors
    leaves = [x.clone().requires_grad_() for x in operands]
    out = function(*leaves)
    out.backward(g)
    return [out.detach(), *(x.grad for x in leaves)]


def passes_of(recipes, tensors, causal=True, seeds=None, step=0):
    numerics = LaneNumerics(recipes, seeds or list(range(len(recipes))))
    numerics.step.fill_(step)
    return passes(lambda q, k, v: numerics.attention(7, q, k, v, causal), tensors)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("length", [48, 33])
def test_bf16_operands_give_the_bits_of_the_unquantized_core(causal, length):
    numerics = LaneNumerics([Recipe.named("bf16")] * LANES, [0, 1, 2])
    core = AttentionCore([Attention()] * LANES, torch.device("cpu"), backend("cpu"), "exact")
    found = passes(lambda q, k, v: attention_core(q, k, v, causal, core, numerics, 0), inputs(length=length))
    wanted = passes(lambda q, k, v: attention(q, k, v, causal), inputs(length=length))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def by_hand(tensors, quantized, quantizer, causal=True, smooth=False, unnormalized=False):
    """One lane whose operands of these names are quantized along their contraction."""
    q, k, v, g = tensors
    k = k - k.mean(1, keepdim=True) if smooth else k

    def operand(name, x):
        if name not in quantized:
            return x.to(torch.bfloat16).to(torch.float32)
        length = x.shape[-1]
        rows = F.pad(x, (0, -length % 32)).reshape(-1, length + -length % 32)
        return quantize(rows, QUANTIZERS[quantizer]).values.view(*x.shape[:2], -1)[..., :length]

    def product(name, a, b):
        one, two = ATTENTION_PRODUCTS[name]
        return operand(f"{name}.{one}", a) @ operand(f"{name}.{two}", b).mT

    scores = product("scores", q, k) * SIZE**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    weights = torch.softmax(scores, -1)
    if unnormalized:
        raw = torch.exp(scores - scores.amax(-1, keepdim=True))
        out = product("context", raw, v.mT) / raw.sum(-1, keepdim=True)
    else:
        out = product("context", weights, v.mT)
    d_scores = weights * (product("dp", g, v) - (g * out).sum(-1, keepdim=True))
    return [
        out,
        product("dq", d_scores, k.mT) * SIZE**-0.5,
        product("dk", d_scores.mT, q.mT) * SIZE**-0.5,
        product("dv", weights.mT, g.mT),
    ]


@pytest.mark.parametrize("slot", [*ATTENTION_SLOTS, "all"])
@pytest.mark.parametrize("quantizer", ["mxfp4", "fp8"])
def test_each_operand_is_quantized_along_its_own_contraction(slot, quantizer):
    slots = ATTENTION_SLOTS if slot == "all" else (slot,)
    tensors = inputs(lanes=1)
    found = passes_of([recipe("bf16", quantizer, slots)], tensors)
    for a, b in zip(found, by_hand(tensors, slots, quantizer), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # the order of sums is another
    plain = passes_of([Recipe.named("bf16")], tensors)
    assert not all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))


@pytest.mark.parametrize("more", [{"smooth_k": True}, {"weights": "unnormalized"}])
def test_keys_may_be_smoothed_and_weights_quantized_before_they_are_divided(more):
    tensors = inputs(lanes=1)
    tensors[1] = tensors[1] + 3.0  # what smoothing is for
    found = passes_of([recipe("bf16", "mxfp4", ATTENTION_SLOTS, **more)], tensors)
    wanted = by_hand(tensors, ATTENTION_SLOTS, "mxfp4", smooth="smooth_k" in more, unnormalized="weights" in more)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_smoothing_helps_keys_with_a_common_part():
    tensors = inputs(lanes=1)
    tensors[1] = tensors[1] + 8.0
    plain = passes_of([Recipe.named("bf16")], tensors)[0]
    errors = [
        (passes_of([recipe("bf16", "nvfp4", ("scores.q", "scores.k"), smooth_k=smooth)], tensors)[0] - plain).norm()
        for smooth in (False, True)
    ]
    assert errors[1] < 0.7 * errors[0]


SR = {"like": "nvfp4", "rounding": "stochastic"}


@pytest.mark.parametrize("causal", [False, True])
def test_lanes_do_not_depend_on_each_other(causal):
    recipes = [recipe("nvfp4", q, ATTENTION_SLOTS) for q in ("nvfp4", SR, {"like": "nvfp4", "element": "e2m1"})]
    assert len({of.signature() for of in recipes}) == 1
    tensors = inputs()
    together = passes_of(recipes, tensors, causal, [4, 5, 6])
    for lane in range(LANES):
        rows = slice(lane * HEADS, (lane + 1) * HEADS)
        alone = passes_of([recipes[lane]], [x[rows] for x in tensors], causal, [4 + lane])
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, together, strict=True))


def test_stochastic_operands_are_drawn_anew_in_every_step_and_for_every_operand():
    tensors = inputs(lanes=1)
    both = recipe("bf16", SR, ("scores.q", "scores.k"))
    first, again, later = (passes_of([both], tensors, step=step)[0] for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_evaluation_and_the_finish_leave_the_core_as_they_leave_products():
    tensors = inputs(lanes=1)
    quantized = recipe("bf16", SR, ATTENTION_SLOTS)
    numerics = LaneNumerics([quantized], [0])
    plain = passes_of([Recipe.named("bf16")], tensors)
    q, k, v, _ = tensors
    numerics.training, numerics.evaluation = False, "bf16"
    assert torch.equal(numerics.attention(7, q, k, v, True), plain[0])
    numerics.evaluation = "quantized"
    nearest = passes_of([recipe("bf16", "nvfp4", ATTENTION_SLOTS)], tensors)
    assert torch.equal(numerics.attention(7, q, k, v, True), nearest[0])
    numerics.training, numerics.evaluation = True, ""
    numerics.precise_stages = frozenset({"fprop", "dgrad", "wgrad"})
    ended = passes(lambda q, k, v: numerics.attention(7, q, k, v, True), tensors)
    assert all(torch.equal(a, b) for a, b in zip(ended, plain, strict=True))


@pytest.mark.parametrize("preset", ["language:smoke", "vision:smoke", "diffusion:dit-smoke"])
def test_models_train_with_it(preset):
    task = get_task(*preset.split(":"))
    task = msgspec.structs.replace(task, steps=task.steps // 3, finish=None)
    lanes = [Lane(of, 1e-2, 0) for of in (Recipe.named("nvfp4"), recipe("nvfp4", "fp8", ATTENTION_SLOTS))]
    plain, quantized = (train(task, [lane], "cpu").lanes[0] for lane in lanes)
    assert quantized.val_loss != plain.val_loss
    assert abs(quantized.val_loss - plain.val_loss) < 0.1 * plain.val_loss
    assert quantized.val_loss_bf16 != quantized.val_loss


@pytest.mark.parametrize("amax", ["previous", "history"])
def test_the_backward_pass_has_the_weights_of_the_forward_pass(amax):
    """Whatever maxima scales follow. Where do and v are unit matrices, dv is Pᵀ and o is P."""
    unit = torch.eye(16).expand(HEADS, -1, -1)
    late = recipe("bf16", {"like": "nvfp4", "tensor_scale": {"amax": amax, "steps": 1}}, ("scores.q", "scores.k"))
    numerics = LaneNumerics([late], [0])
    for step in range(2):
        numerics.step.fill_(step)
        q, k = torch.randn(2, HEADS, 16, 16, generator=torch.Generator().manual_seed(step)) * (1 + 9 * step)
        out, _, _, dv = passes(lambda q, k, v: numerics.attention(7, q, k, v, True), [q, k, unit, unit])
        assert torch.equal(out, dv.mT)


def test_lanes_share_a_population_only_if_their_cores_take_one_path():
    """Sums have an order of each path's own, so that the company would change bits else."""
    layouts = [
        recipe("bf16", q, ("dk.s",)).attention.layout
        for q in (
            "nvfp4",
            {"like": "nvfp4", "scale": {"format": "bf16"}},
            {"like": "nvfp4", "scale": {"format": "fp32"}},
            {"like": "e4m3-b16", "scale": {"format": "e4m3", "rounding": "stochastic"}},
            "fp8",
            {"like": "fp8", "rounding": "stochastic"},
        )
    ]
    assert len(set(layouts)) == len(layouts)
    alike = [{"like": q, "rounding": r} for q in ("nvfp4", "e4m3-b16") for r in ("nearest", "stochastic")]
    assert len({recipe("bf16", q, ("dk.s",)).attention.layout for q in alike}) == 1
    untouched = recipe("bf16", "fp8", ("dk.q",), dv={"p": "none"}).attention.layout
    assert untouched != recipe("bf16", "fp8", ("dk.q",)).attention.layout


def test_a_plain_core_is_the_default():
    assert recipe("nvfp4", "bf16", ATTENTION_SLOTS, smooth_k=True).config_id == Recipe.named("nvfp4").config_id
    ids = {recipe("nvfp4", "fp8", (slot,)).config_id for slot in ATTENTION_SLOTS}
    assert len(ids) == len(ATTENTION_SLOTS)
    assert recipe("bf16", "fp8", ("dk.q",)).is_plain is False
    assert recipe("bf16", "fp8", ("dk.q",)).baseline() == Recipe.named("bf16").canonical()


def test_labels_say_which_operands():
    assert recipe("nvfp4", "fp8", ATTENTION_SLOTS).label() == "nvfp4, attention core fp8"
    found = recipe("nvfp4", "fp8", ("scores.q", "scores.k", "context.v"), smooth_k=True)
    assert found.columns()["attention"] == "scores and context.v fp8, smooth k"
    assert Recipe.named("nvfp4").columns()["attention"] == "none"


@pytest.mark.parametrize(
    ("slot", "quantizer", "error"),
    [
        ("scores.q", {"like": "nvfp4", "outliers": "occ"}, "attention.scores.q.outliers"),
        ("context.p", "ms-eden", "attention.context.p"),
        ("dv.p", {"like": "mxfp4", "rounding": "ema"}, "attention.dv.p"),
    ],
)
def test_what_the_core_cannot_take_is_an_error_that_names_the_operand(slot, quantizer, error):
    assert "ms-eden" in QUANTIZERS
    with pytest.raises(ConfigError, match=error):
        recipe("nvfp4", quantizer, (slot,))
