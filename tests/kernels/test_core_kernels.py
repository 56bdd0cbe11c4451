"""The kernels of the quantized attention core: P and dS are quantized as the definition has it, what follows agrees with
it within the order of sums, each lane has bits of its own, and what they do not take is the definition's, with a reason.
"""

import msgspec
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.attention import ATTENTION_SLOTS
from fp4dse.dse.rounding import Stochastic
from fp4dse.kernels import lanes as numerics_module
from fp4dse.kernels.dispatch import refusals
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.ops.attention_core import CoreUse
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.quantize import quantize
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
    "tensor, one": ["fp8-current"],
}


@pytest.mark.parametrize(
    ("group", "one"),
    [
        ("blocks of 16", "v"),
        ("blocks of 16", "q"),
        ("blocks of 32", "k"),
        ("tensor", "v"),
        ("tensor", "k"),
        ("tensor, one", "q"),
    ],
)
def test_given_s_the_bits_of_p_and_ds_are_those_of_the_definition(place, plain_backend, group, one):
    """Where an operand is the unit matrix the product shows the other one. q, k, v are integers, so that products are
    exact, and do is the unit matrix, so that rowsum(do ∘ o) is the diagonal of o."""
    causal, length = one != "q", 24  # blocks are cut by the end
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
    dq, dk, dv = place.attention_core.backward(unit, q, k, v, out, kept, use)

    scale = length**-0.5
    s = q @ k.mT * torch.tensor(1.4426950408889634 * scale, device=q.device)
    if causal:
        s = s.masked_fill(torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1), float("-inf"))
    p = torch.exp2(s - kept.m[..., None]) * kept.inverse[..., None]
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
