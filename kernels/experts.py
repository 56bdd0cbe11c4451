"""The layers of experts: one product of all experts and lanes in place of one after the other, with the same bits.

An expert's layer is a `QuantLinear` of its own, with its weights, its place and what it carries from step to step. To
multiply them together, experts stand beside their lane: [L, E, C, K] is [L · E, C, K], E lanes of the lane's recipe.
So tokens of different experts share no block and no tensor scale: an operand that is contracted over tokens (that of
the weight's gradient) has its blocks within an expert's C places, from the first on, and the last block is filled up
with the zeros of empty places.

Where an expert's layer has another seed, `expert_seed`, and draws by the number of the first one, no number differs
along the new axis but the seed. It is so where experts are multiplied one by one, too: bits do not depend on the way.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.kernels.block_scales import trained_scales
from fp4dse.kernels.factors import trained_factors
from fp4dse.kernels.lanes import LaneNumerics, expert_seed
from fp4dse.kernels.layers import QuantLinear, product


def group_layers(layers: Sequence[QuantLinear], first: int = 0) -> None:
    """Have the layers of experts draw as members of one group, to be called before the first product. first: the number
    of the first of them among all, where others are elsewhere, in layers of the same numbers."""
    numerics, numbers = layers[0].numerics, tuple(layer.layer for layer in layers)
    numerics.keys.update({number: (numbers[0], expert) for expert, number in enumerate(numbers, first)})
    if reason := why_not_grouped(numerics, numbers):
        numerics.ungrouped.add(reason)


def expert_products(
    x: Tensor,
    layers: Sequence[QuantLinear],
    filled: Tensor,
    numerics: LaneNumerics | None = None,
    weights: Sequence[Tensor] | None = None,
) -> Tensor:
    """Each expert's rows times its own weight: x [L, E, C, K] -> [L, E, C, N] of `numerics.dtype`.

    layers: those of `group_layers`, without biases. filled: int64 [L, E], how many of the C rows have a token; those
    after them must be zeros. numerics, weights: the layers' own, unless others are given.
    """
    numerics, numbers = numerics or layers[0].numerics, tuple(layer.layer for layer in layers)
    each = weights or [layer.weight for layer in layers]
    if not numerics.groups_experts or why_not_grouped(numerics, numbers):
        rows = zip(layers, x.unbind(1), filled.unbind(1), each, strict=True)
        alone = [_alone(layer, numerics, part.contiguous(), number, w) for layer, part, number, w in rows]
        return torch.stack(alone, dim=1)
    stacked = torch.stack(list(each), dim=1)
    split = numerics.split(numbers[0])
    if split is None:
        return _together(numerics, numbers, x, stacked, filled)
    parts = zip(split.groups, split.cut(x), split.cut(stacked), split.cut(filled), strict=True)
    return split.join([_together(group.numerics, numbers, *part) for group, *part in parts])


def why_not_grouped(numerics: LaneNumerics, numbers: Sequence[int]) -> str | None:
    """The reason why experts, the numbers of their layers, are multiplied one by one; None if they are not."""
    first, every = numerics.splits.get(numbers[0]), set(numbers)
    groups = None if first is None else first.groups
    splits = [numerics.splits.get(number) for number in numbers]
    alike = all((None if split is None else split.groups) == groups for split in splits)
    if not alike or len(every & numerics.precise_layers) not in (0, len(every)):
        return "layers: found rules for some experts; accepted: for all of a layer"
    here = [numerics] if groups is None else [group.numerics for group in groups]
    if any(of.recipe.fprop.channels is not None for of in here):
        return "fprop.channels: accepted: none"
    if trained_factors(numerics.recipes) is not None:
        return "outliers: found trained factors; accepted: others"
    if trained_scales(numerics.recipes) is not None:
        return "outliers: found trained scales; accepted: others"
    learns = any((operand, number) in numerics.learned for operand in "xw" for number in numbers)
    return "outliers: found learned clips; accepted: others" if learns else None


def _alone(layer: QuantLinear, numerics: LaneNumerics, x: Tensor, filled: Tensor, weight: Tensor) -> Tensor:
    """The product of one expert, x [L, C, K] -> [L, C, N], by the operation that takes all of them: which way they go
    depends on all lanes, and no lane's bits may."""
    now = numerics.at_present(numerics)
    now.filled = filled
    return layer.product(x, numerics=now, weight=weight)


def _together(numerics: LaneNumerics, numbers: tuple[int, ...], x: Tensor, w: Tensor, filled: Tensor) -> Tensor:
    """The products of lanes that compute alike: x [L, E, C, K], w [L, E, N, K] -> [L, E, C, N]."""
    fold = numerics.at_present(_fold(numerics, tuple(numerics.keys[number][1] for number in numbers)))
    fold.members, fold.filled, fold.precise_layers = numbers, filled.flatten(), numerics.precise_layers
    y = product(x.flatten(0, 1), w.flatten(0, 1), None, fold, numbers[0])
    return y.view(*x.shape[:2], *y.shape[1:])


def _fold(numerics: LaneNumerics, experts: tuple[int, ...]) -> LaneNumerics:
    """Numerics of these experts of every lane, made once."""
    if experts not in numerics.folds:
        recipes = [recipe for recipe in numerics.recipes for _ in experts]
        seeds = [expert_seed(seed, expert) for seed in numerics.seeds.tolist() for expert in experts]
        fold = LaneNumerics(recipes, seeds, numerics.seeds.device, numerics.steps, numerics.dtype)
        for name, slot in fold.slots.items():
            slot.share_state(numerics.slots[name])
        numerics.folds[experts] = fold
    return numerics.folds[experts]
