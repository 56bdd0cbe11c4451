"""A weight in parts that are trained: a part of low rank as factors, and the rest (Metis, 2509.00404; LoRA).

    W = U diag(s) Vᵀ + R                       at the start U, s, V are those of W, and R is what is left of it
    Y = X̂ R̂ᵀ + ((X V) diag(s)) Uᵀ + b          X̂, R̂ as the recipe quantizes x and w; the products of factors in BF16

For LoRA (2106.09685) U is zero at the start, V uniform within 1/√inputs as its authors have it, and there is no s:
their scale alpha / rank is 1.

R is the layer's `weight`; U, s and V are parameters beside it, with gradients of their own. They are not quantized and
are not made again later, so R may come to have large components, too. At the start they are found by the iteration
of spec/low_rank.py, which a lane has to itself; the authors take a singular value decomposition.

Where one weight is deployed, factors are added to R before it is quantized (`merged`), which rounds what they have
learned. Maxima and averages that were kept of R say nothing of the sum, which is quantized by its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fp4dse.dse import Recipe
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.outliers import TrainedFactors, outlier_words
from fp4dse.kernels import block_scales
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.ops.philox import STREAMS, many_signs, random32
from fp4dse.kernels.ops.products import multiply
from fp4dse.kernels.quant.spec.low_rank import components

ITERATIONS = 8
"""From random signs on. Singular values of a random weight are near each other, and slow to tell apart."""
NAMES = tuple(f"factors.{name}" for name in "usv")
"""Ends of the names of factors among a layer's parameters, beside `weight`."""
HAS_LENGTHS = {"largest": True, "zero": False}
"""`TrainedFactors.start` -> True if there is an s."""


class Factors(nn.Module):
    """The parameters u [L, out, r], s [L, r] or None, v [L, r, in], float32, of a weight [L, out, in]."""

    def __init__(self, weight: Tensor, of: TrainedFactors) -> None:
        super().__init__()
        lanes, outputs, inputs = weight.shape
        rank = of.count(outputs, inputs)
        self.u = nn.Parameter(weight.new_zeros(lanes, outputs, rank))
        self.s = nn.Parameter(weight.new_zeros(lanes, rank)) if HAS_LENGTHS[of.start] else None
        self.v = nn.Parameter(weight.new_zeros(lanes, rank, inputs))

    @torch.no_grad()
    def take_from(self, weight: Tensor, seeds: Tensor, layer: int) -> None:
        """Become the largest components of a weight, and leave it the rest, in place; without s, become nothing.

        seeds, layer: keys of the signs that components are looked for from, or of V's draws.
        """
        _, rank, inputs = self.v.shape
        if self.s is None:
            draws = random32(seeds.cpu(), STREAMS["factors"], 0, layer, rank * inputs).to(torch.float64)
            uniform = ((draws + 0.5) * 2.0**-31 - 1) / inputs**0.5
            self.u.zero_()
            self.v.copy_(uniform.view_as(self.v))
            return
        site = torch.full((), layer, device=weight.device)
        start = many_signs(seeds, torch.zeros_like(site), site, rank * inputs).view(len(weight), rank, inputs)
        found = components(weight, start, ITERATIONS)
        self.u.copy_(found.u.mT)
        self.s.copy_(found.s)
        self.v.copy_(found.v)
        weight.sub_(found.product())

    def product(self) -> Tensor:
        """U diag(s) Vᵀ, float32 [L, out, in]."""
        return _product(self.u, self.s, self.v)


def _product(u: Tensor, s: Tensor | None, v: Tensor) -> Tensor:
    return multiply(u if s is None else u * s[:, None], v.mT.contiguous())


@contextmanager
def merged(model: nn.Module, numerics: LaneNumerics) -> Iterator[None]:
    """In the block each weight of a model has its factors' part, they are nothing, and quantizers of weights have no
    state. What is captured goes on to hold: no tensor is another one."""
    found = ((m, getattr(m, "factors", None)) for m in model.modules())
    parts = [(m.get_parameter("weight"), factors) for m, factors in found if isinstance(factors, Factors)]
    kept = [(weight.detach().clone(), factors.u.detach().clone()) for weight, factors in parts]
    states = [part.slots["fprop.w"].state for part in numerics.parts()]
    kept_states = [dict(state) for state in states]
    with torch.no_grad():
        for weight, factors in parts:
            weight.add_(factors.product())
            factors.u.zero_()
    for state in states:
        state.clear()
    try:
        yield
    finally:
        with torch.no_grad():
            for (weight, factors), (old, u) in zip(parts, kept, strict=True):
                weight.copy_(old)
                factors.u.copy_(u)
        for state, was in zip(states, kept_states, strict=True):
            state.update(was)


def has_factors(model: nn.Module) -> bool:
    """True where a layer of the model has some."""
    return any(isinstance(of, Factors) for of in model.modules())


def trained_factors(here: Sequence[Recipe]) -> TrainedFactors | None:
    """The factors that the weights of lanes with these recipes have; all lanes share them, or none has them."""
    found = here[0].fprop.w.outliers
    return found if isinstance(found, TrainedFactors) else None


def layers_of_factors(layer: int) -> tuple[int, int]:
    """The numbers of the products with V and with U, which no layer of a model has."""
    return -1 - 2 * layer, -2 - 2 * layer


def refuse_factors(here: Sequence[Recipe], why: str) -> None:
    """ConfigError for weights with trained factors where nothing can hold these."""
    if (found := trained_factors(here)) is not None:
        raise ConfigError("fprop.w.outliers", outlier_words(found), f"none, low-rank ({why})")


def is_factor(name: str) -> bool:
    """True for the name of a parameter that is a factor, or the trained scales of a weight's blocks."""
    return name.endswith((*NAMES, block_scales.NAME))


def with_whole_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's parameters [L, …] by name, with each weight as a whole in place of its parts."""
    found = {name: value for name, value in state.items() if not is_factor(name)}
    for name in state:
        if name.endswith(NAMES[0]):
            layer = name.removesuffix(NAMES[0])
            u, s, v = (state.get(layer + of) for of in NAMES)
            assert u is not None
            assert v is not None
            found[f"{layer}weight"] = state[f"{layer}weight"] + _product(u, s, v)
        elif name.endswith(block_scales.NAME):
            layer = name.removesuffix(block_scales.NAME)
            found[f"{layer}weight"] = block_scales.into_weight(state[f"{layer}weight"], state[name])
    return found
