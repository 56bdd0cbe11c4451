"""The memory of a training step on one GPU, and the step's time where what does not fit is made again.

    states      Model.parameters · Model.state_bytes: weights, gradients and the optimizer's state
    kept        for the backward pass, of every micro-batch in flight: inputs of layers in the bits of
                `activation_bits`, what Model.kept names beside them, and copies of experts' weights (Model.copies)
    made again  of blocks under recomputation only the input is kept, BF16 [tokens, Model.residual]; their forward pass
                is computed twice: products, passes over X, two of the seven products of attention, a third of the
                element-wise traffic, and what is sent to experts

A recipe that keeps less has more room, so fewer blocks are made again: at equal memory it is faster than at equal
recomputation. Workspaces, buffers of communication and fragmentation are not modelled.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from fp4dse.dse.cost.chip import Chip
from fp4dse.dse.cost.core import core
from fp4dse.dse.cost.exchange import WAYS, exchange_seconds
from fp4dse.dse.cost.model import OUTSIDE, Model
from fp4dse.dse.cost.products import product
from fp4dse.dse.cost.scenario import MID, under
from fp4dse.dse.cost.step import is_bf16, layers_by_recipe, pass_seconds, step_cost
from fp4dse.dse.cost.storage import activation_bits
from fp4dse.dse.cost.units import gemm_of
from fp4dse.dse.recipe import Recipe

FORWARD_CORE, FORWARD_TRAFFIC = 2 / 7, 1 / 3
"""Of attention's products and of element-wise passes, those of a forward pass."""


class Fit(NamedTuple):
    """A training that fits into a memory: the share of blocks that are made again, bytes, seconds of a micro-batch and
    its tokens a second."""

    recomputed: float
    bytes: float
    seconds: float
    tokens_per_s: float


def kept_bytes(recipe: Recipe, model: Model) -> float:
    """Bytes that a micro-batch keeps for the backward pass where nothing is made again."""
    parts, bits, copied = layers_by_recipe(recipe, model), 0.0, 0.0
    for r, part in parts:
        inputs = sum(of.count * of.tokens * of.inputs for of in part.linears if of.keeps)
        bits += inputs * activation_bits(r)
        experts = sum(of.count * of.inputs * of.outputs for of in part.linears if of.expert and model.copies)
        copied += experts * (2.0 if is_bf16(r) else 4.0)
    for of in model.kept:
        bits += of.count * of.width * (of.bits or activation_bits(recipe))
    return model.tokens * bits / 8 + copied


def memory(recipe: Recipe, model: Model, recomputed: float = 0.0) -> float:
    """Bytes on the GPU where a share of the blocks is made again."""
    again = 2.0 * model.tokens * model.residual * model.blocks
    kept = (1 - recomputed) * kept_bytes(recipe, model) + recomputed * again
    return model.parameters * model.state_bytes + model.in_flight * kept


def forward_seconds(recipe: Recipe, model: Model, chip: Chip, scenario: str = MID) -> float:
    """Seconds of a micro-batch's forward pass through the blocks."""
    chip = under(chip, scenario)
    traffic = step_cost(recipe, msgspec.structs.replace(model, parameters=0), chip).seconds["rest"]
    sent = exchange_seconds(recipe, model, chip, WAYS[:2])
    layers = sum(seconds for _, seconds in forward_of_layers(recipe, model, chip))
    return layers + FORWARD_CORE * core(recipe, model, chip) + FORWARD_TRAFFIC * traffic + sent


def forward_of_layers(recipe: Recipe, model: Model, chip: Chip) -> list[tuple[Recipe, float]]:
    """Seconds of the blocks' forward products and of the passes over X, by the recipe that layers compute as; in a
    scenario's chip."""
    out: list[tuple[Recipe, float]] = []
    blocks = [of for of in model.linears if of.kind not in OUTSIDE]
    for r, part in layers_by_recipe(recipe, msgspec.structs.replace(model, linears=blocks)):
        products = sum(seconds for _, seconds in product("fprop", r.fprop, part, chip, gemm_of(r)))
        out.append((r, products + pass_seconds(r, part, chip)))
    return out


def fit(recipe: Recipe, model: Model, chip: Chip, capacity: float, scenario: str = MID) -> Fit | None:
    """The training in so many bytes, with as few blocks made again as fit; None if not even all of them do."""
    all_kept, none_kept = memory(recipe, model), memory(recipe, model, 1.0)
    if min(all_kept, none_kept) > capacity:
        return None
    share = max(0.0, (all_kept - capacity) / (all_kept - none_kept)) if all_kept > none_kept else 0.0
    return at_share(recipe, model, chip, share, scenario)


def at_share(recipe: Recipe, model: Model, chip: Chip, recomputed: float, scenario: str = MID) -> Fit:
    """The training in which this share of the blocks is made again."""
    seconds = step_cost(recipe, model, chip, scenario).total
    seconds += recomputed * forward_seconds(recipe, model, chip, scenario)
    return Fit(recomputed, memory(recipe, model, recomputed), seconds, model.tokens / seconds)
