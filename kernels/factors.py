"""A weight in parts that are trained: its largest singular components as factors, and the rest (Metis, 2509.00404).

    W = U diag(s) Vᵀ + R                       at the start U, s, V are those of W, and R is what is left of it
    Y = X̂ R̂ᵀ + ((X V) diag(s)) Uᵀ + b          X̂, R̂ as the recipe quantizes x and w; the products of factors in BF16

R is the layer's `weight`; U, s and V are parameters beside it, with gradients of their own. They are not quantized and
are not made again later, so R may come to have large components, too. At the start they are found by the iteration
of spec/low_rank.py, which a lane has to itself; the authors take a singular value decomposition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fp4dse.dse import Recipe
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.outliers import TrainedFactors, outlier_words
from fp4dse.kernels.ops.philox import many_signs
from fp4dse.kernels.ops.products import multiply
from fp4dse.kernels.quant.spec.low_rank import components

ITERATIONS = 8
"""From random signs on. Singular values of a random weight are near each other, and slow to tell apart."""


NAMES = tuple(f"factors.{name}" for name in "usv")
"""Ends of the names of factors among a layer's parameters, beside `weight`."""


class Factors(nn.Module):
    """The parameters u [L, out, r], s [L, r], v [L, r, in], float32, of a weight [L, out, in]."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        lanes, outputs, inputs = weight.shape
        self.u = nn.Parameter(weight.new_zeros(lanes, outputs, rank))
        self.s = nn.Parameter(weight.new_zeros(lanes, rank))
        self.v = nn.Parameter(weight.new_zeros(lanes, rank, inputs))

    @torch.no_grad()
    def take_from(self, weight: Tensor, seeds: Tensor, layer: int) -> None:
        """Become the largest components of a weight, and leave it the rest, in place. seeds, layer: keys of the signs
        that they are looked for from."""
        _, rank, inputs = self.v.shape
        site = torch.full((), layer, device=weight.device)
        start = many_signs(seeds, torch.zeros_like(site), site, rank * inputs).view(len(weight), rank, inputs)
        found = components(weight, start, ITERATIONS)
        self.u.copy_(found.u.mT)
        self.s.copy_(found.s)
        self.v.copy_(found.v)
        weight.sub_(found.product())


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
    """True for the name of a parameter that is a factor."""
    return name.endswith(NAMES)


def with_whole_weights(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's parameters [L, …] by name, with each weight as a whole in place of its parts."""
    found = {name: value for name, value in state.items() if not is_factor(name)}
    for name in state:
        if name.endswith(NAMES[0]):
            layer = name.removesuffix(NAMES[0])
            u, s, v = (state[layer + of] for of in NAMES)
            found[f"{layer}weight"] = state[f"{layer}weight"] + multiply(u * s[:, None], v.mT.contiguous())
    return found
