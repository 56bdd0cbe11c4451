"""The kernels of the quantized attention core: P and dS are quantized as the definition has it, the rest follows within
the order of sums, each lane in bits of its own; and what they do not take is the definition's, with the reason."""

import msgspec
import numpy as np
import pytest
import torch

from fp4dse.dse import QUANTIZERS, Quantizer, Recipe, recipe_from_dict, recipe_to_dict
from fp4dse.dse.attention import ATTENTION_SLOTS, Attention
from fp4dse.kernels import lanes
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.quant.backend import PLAIN
from fp4dse.kernels.quant.quantize import quantize
from tests.kernels.comparing import take_kernels

HEADS = 2


def recipe(quantizer, slots=ATTENTION_SLOTS, base="bf16", **more):
    core = {}
    for slot in slots:
        product, operand = slot.split(".")
        core.setdefault(product, {})[operand] = quantizer
    return recipe_from_dict({**recipe_to_dict(Recipe.named(base)), "attention": core | more})


def drawn(lanes, length, size, seed=0):
    """q, k, v and a gradient, float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, lanes * HEADS, length, size, generator=generator).unbind(0)


def passes(place, recipes, tensors, causal, dtype=torch.float32):
    numerics = LaneNumerics(recipes, range(3, 3 + len(recipes)), place.device)
    numerics.step.fill_(5)
    *operands, g = (x.to(place.device, dtype) for x in tensors)
    leaves = [x.clone().requires_grad_() for x in operands]
    out = numerics.attention(7, *leaves, causal)
    out.backward(g)
    return [x.detach().cpu() for x in (out, *(leaf.grad for leaf in leaves))]


@pytest.fixture
def with_kernels(place, monkeypatch):
    def run(recipes, tensors, causal=True, taken=True, dtype=torch.float32):
        if place.device == "cpu":  # nothing to compile
            monkeypatch.setattr(lanes, "backend", lambda device: PLAIN)
        take_kernels(monkeypatch, "attention_core", taken=taken)
        return passes(place, recipes, tensors, causal, dtype)

    return run


def error(ours, theirs):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4", "mxfp8"])
def test_try(with_kernels, name, causal):
    tensors = drawn(2, 48, 16)
    a = with_kernels([recipe(name)] * 2, tensors, causal)
    b = with_kernels([recipe(name)] * 2, tensors, causal, taken=False)
    print([float((x - y).norm() / y.norm()) for x, y in zip(a, b)])
    assert error(a, b) < 1e-2
