"""The modelled time of sampling: one more token for each of a number of sequences, forward only.

    a layer    max( 2·B·N·K / rate of its unit, stored bytes of W and of B rows of X and Y / bandwidth ) + launch
    operands   the passes of operands.py over X; W was quantized once, after the last update
    attention  keys and values of the context are read, as the cache stores them (`Rollout.kv_cache`), or multiplied in
               BF16, whichever takes longer; + launch
    the rest   a third of the element-wise traffic of a training step, and a launch for each

An expert's W is read if one of the sequences chooses it. W is read as it is stored and decoded in registers where the
unit takes wider operands, as inference kernels do, so few sequences cost what the bytes of W cost. Nothing else
overlaps. `Recipe.sampling` says what the forward pass is. Residuals are priced; channels, components and means that are
multiplied apart, and a quantized attention core, are not.
"""

from __future__ import annotations

from functools import lru_cache

from fp4dse.dse.cost import operands
from fp4dse.dse.cost.chip import Chip, load_chip
from fp4dse.dse.cost.model import Model, load_model
from fp4dse.dse.cost.operands import Use
from fp4dse.dse.cost.scenario import MID, under
from fp4dse.dse.cost.step import DEFAULT_CHIP, DEFAULT_MODEL, layers_by_recipe
from fp4dse.dse.cost.units import gemm_of, product_unit
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import GemmChoice, Recipe
from fp4dse.dse.record import unlabelled
from fp4dse.dse.stages import Fprop

FORWARD_SHARE = 1 / 3
"""Of the passes of a training step that Traffic counts."""


def token_seconds(
    recipe: Recipe, model: Model, chip: Chip, sequences: int, context: float, scenario: str = MID
) -> float:
    """Seconds until each of `sequences` sequences of `context` tokens has one more."""
    chip = under(chip, scenario)
    sampling = recipe.sampling()
    layers = sum(_layers(r.fprop, part, chip, gemm_of(r), sequences) for r, part in layers_by_recipe(sampling, model))
    return layers + _rest(model, chip, sequences, context, _of_cache(recipe))


SEQUENCES, CONTEXT = 128, 4096
"""Of the rollouts that rows hold the time of: answers that are sampled at once, and their tokens so far."""


def samples_tokens(model: Model) -> bool:
    """True for models that read tokens one after another."""
    return bool(model.attention) and model.attention[0].causal


def rollout_overhead(recipe: Recipe) -> float:
    """Modelled time of a token of a rollout relative to BF16's, of the default model on the default chip."""
    mine, bf16 = (_default_seconds(of) for of in (recipe, Recipe.named("bf16")))
    return mine / bf16


@lru_cache(maxsize=65536)
def _default_seconds(recipe: Recipe) -> float:
    return token_seconds(recipe, load_model(DEFAULT_MODEL), load_chip(DEFAULT_CHIP), SEQUENCES, CONTEXT)


@lru_cache(maxsize=4096)
def _layers(fprop: Fprop, model: Model, chip: Chip, gemm: GemmChoice, rows: int) -> float:
    x, w = (unlabelled(q.canonical()) for q in (fprop.x, fprop.w))
    unit = product_unit(x, w, chip, gemm)
    bandwidth = chip.bandwidth.value * chip.achieved.bandwidth.value
    kernels = operands.passes([Use("fprop.x", x, None if x.is_plain and w.is_plain else fprop.rotation, unit)], chip)
    per_element = sum(sum(operands.seconds(kernel, chip).values()) for kernel in kernels) * chip.passes
    launches = 1 + sum(kernel.per_step for kernel in kernels)
    total = 0.0
    for linear in model.linears:
        weights, own = linear.inputs * linear.outputs, rows * linear.tokens
        read = weights * (1 - (1 - min(1.0, linear.tokens)) ** rows)
        moved = read * _stored(w) + own * (linear.inputs * _stored(x) + linear.outputs * 2)
        formed = max(2 * own * weights * x.encodings * w.encodings / chip.flops(unit), moved / bandwidth)
        total += (
            linear.count * (formed + per_element * own * linear.inputs) + linear.launches * launches * chip.launch.value
        )
    return total


def memory_bytes(recipe: Recipe, model: Model, sequences: int, context: int) -> float:
    """Bytes of weights, as they are stored, and of the keys and values of so many sequences of `context` tokens."""
    weights = sum(
        linear.count * linear.inputs * linear.outputs * _stored(r.fprop.w.canonical())
        for r, part in layers_by_recipe(recipe.sampling(), model)
        for linear in part.linears
    )
    each = _of_cache(recipe)
    return weights + sum(
        core.count * sequences * context * 2 * (core.kv or core.width) * each for core in model.attention
    )


def _of_cache(recipe: Recipe) -> float:
    """Bytes of an element of a key or value."""
    rollout = recipe.training.rollout
    return 2.0 if rollout is None else _stored(rollout.kv_cache.canonical())


def _stored(q: Quantizer) -> float:
    """Bytes of an element, in all its encodings."""
    return 2.0 if q.is_plain else q.bits_per_element / 8


@lru_cache(maxsize=256)
def _rest(model: Model, chip: Chip, rows: int, context: float, of_cache: float) -> float:
    bandwidth = chip.bandwidth.value * chip.achieved.bandwidth.value
    total = 0.0
    for core in model.attention:
        read = rows * context * 2 * (core.kv or core.width) * of_cache / bandwidth
        multiplied = 4 * rows * context * core.width / chip.attention_flops("bf16")
        total += core.count * (max(read, multiplied) + chip.launch.value)
    for item in model.traffic:
        moved = 2 * FORWARD_SHARE * item.passes * item.width * rows
        total += item.count * (moved / bandwidth + chip.launch.value)
    return total
