"""The modelled time of attention cores, in BF16 or with operands that a recipe quantizes (docs/numerics.md).

Forward and backward are a kernel each, which makes the matrix of weights P, and dS, tile by tile and never writes them:

    a kernel   max( products, exponentials and the quantizers of P and dS ) + launch
    products   2 forward, S and o; 5 backward, S once more, dP, dv, dq, dk: each at the rate that layers reach in its
               unit, times what attention reaches of theirs in BF16; a stochastic rounding of n samples makes n
    before     q, k, v and do are quantized by the passes of operands.py, for both of their products at once; the mean
               key is taken first where keys are smoothed

Quantizing P takes the maximum of a whole row before the first tile is quantized, so S is computed twice; normalized,
its sum as well, so the exponentials are, too. Backward, scales of whole rows, and current ones of the whole of dS, take
S and P once more, those of dS dP as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import NamedTuple

import msgspec

from fp4dse.dse.attention import ATTENTION_PRODUCTS, Attention, stages_of
from fp4dse.dse.cost import operands, work
from fp4dse.dse.cost.chip import Chip
from fp4dse.dse.cost.model import Model
from fp4dse.dse.cost.operands import Use
from fp4dse.dse.cost.products import IN_LOOP
from fp4dse.dse.cost.units import but_fp8, product_unit, scales_partial_sums
from fp4dse.dse.cost.work import Work
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import GemmChoice, Recipe
from fp4dse.dse.record import unlabelled
from fp4dse.dse.rounding import samples_of

PLAIN = Attention()
TENSORS = {"q": ("scores.q", "dk.q"), "k": ("scores.k", "dq.k"), "v": ("context.v", "dp.v"), "g": ("dv.g", "dp.g")}
"""Tensor -> its two slots; g is do. k and v have the channels of keys, which heads may share."""
IN_TILES = {"forward": ("context.p",), "backward": ("dv.p", "dq.s", "dk.s")}
"""Kernel -> the operands that it makes and quantizes itself."""


def core(recipe: Recipe, model: Model, chip: Chip) -> float:
    """Seconds of all attention cores of a micro-batch, forward and backward; the mean over the training."""
    if recipe.attention.is_plain or recipe.finish is None:
        return _core(recipe.attention, model, chip, recipe.gemm)
    end, stages = recipe.finish.share, (*recipe.finish.stages, *recipe.finish.stages_but_weights)
    finished = _finished(recipe.attention, stages)
    before = _core(recipe.attention, model, chip, recipe.gemm)
    return (1 - end) * before + end * _core(finished, model, chip, recipe.gemm)


def _finished(attention: Attention, stages: Iterable[str]) -> Attention:
    """The core in the last steps."""
    plain = [name for name in ATTENTION_PRODUCTS if stages_of(name) <= set(stages)]
    return msgspec.structs.replace(attention, **{name: getattr(PLAIN, name) for name in plain})


@lru_cache(maxsize=4096)
def _core(attention: Attention, model: Model, chip: Chip, gemm: GemmChoice) -> float:
    a = attention.canonical()
    total = 0.0
    for part in model.attention:
        scores = model.tokens * part.context / (2 if part.causal else 1)
        flops, weights = 2 * scores * part.width, scores * part.width / part.head
        once = 0.0
        for kernel in _kernels(a, chip, gemm):
            formed, tile = 0.0, kernel.tile
            for name, runs in kernel.products.items():
                of, unit = _operands(a, name), _unit(a, name, chip, gemm)
                samples = prod(samples_of(q.rounding) for q in of)
                formed += runs * samples * flops / chip.attention_flops(unit)
                factors = any(scales_partial_sums(q, unit, chip) for q in of)
                tile += Work(vector=factors * runs * samples * part.head * IN_LOOP)
            once += max(formed, tile.seconds(chip) * weights) + kernel.launches * chip.launch.value
        keys = part.kv or part.width
        widths = {"q": part.width, "k": keys, "v": keys, "g": part.width}
        for tensor, width in widths.items():
            seconds, launches = _before(a, tensor, chip, gemm)
            once += seconds * model.tokens * width + launches * chip.launch.value
        total += part.count * once
    return total


class _Kernel(NamedTuple):
    """products: how often each is formed; tile: the work for an element of P."""

    products: dict[str, float]
    tile: Work
    launches: float


def _kernels(a: Attention, chip: Chip, gemm: GemmChoice) -> list[_Kernel]:
    """Forward and backward."""
    looked = 0.0 if a.context.p.is_plain else 1.0
    of_p = _of_rows(a.dv.p)
    of_ds = max(_of_rows(q) or operands.current(q) for q in (a.dq.s, a.dk.s))
    first = max(of_p, of_ds)
    forward = {"scores": 1 + looked, "context": 1.0}
    backward = {"scores": 1 + first, "dp": 1 + of_ds, "dv": 1.0, "dq": 1.0, "dk": 1.0}
    exponentials = {"forward": 1 + looked * (a.weights == "normalized"), "backward": 1 + first}
    tiles = {name: Work(special=exponentials[name]) for name in IN_TILES}
    for name, slots in IN_TILES.items():
        for slot in slots:
            use = _use(a, slot, chip, gemm)
            if not use.quantizer.is_plain:
                tiles[name] += operands.in_registers(use, chip) * chip.passes
    return [_Kernel(forward, tiles["forward"], 1 + looked), _Kernel(backward, tiles["backward"], 1 + first)]


def _of_rows(q: Quantizer) -> float:
    """1 where a scale is that of a whole row, of which the first tile must know."""
    rows = q.block == "row" or (q.tensor_scale is not None and q.tensor_scale.over == "row")
    return float(rows and not q.is_plain)


def _before(a: Attention, tensor: str, chip: Chip, gemm: GemmChoice) -> tuple[float, float]:
    """Seconds per element of q, k, v or do and kernels, of the passes that quantize it for both of its products."""
    kernels = operands.passes([_use(a, slot, chip, gemm) for slot in TENSORS[tensor]], chip)
    seconds = sum(sum(operands.seconds(kernel, chip).values()) for kernel in kernels)
    launches = sum(kernel.per_step for kernel in kernels)
    if tensor == "k" and a.smooth_k:
        seconds, launches = seconds + work.MEAN_PASS.seconds(chip), launches + 1
    return seconds * chip.passes, launches


def _use(a: Attention, slot: str, chip: Chip, gemm: GemmChoice) -> Use:
    return Use(slot, unlabelled(a.operand(slot).canonical()), None, _unit(a, slot.partition(".")[0], chip, gemm))


def _unit(a: Attention, product: str, chip: Chip, gemm: GemmChoice) -> str:
    first, second = _operands(a, product)
    return product_unit(first, second, chip, but_fp8(gemm))


def _operands(a: Attention, product: str) -> list[Quantizer]:
    return [a.operand(f"{product}.{name}").canonical() for name in ATTENTION_PRODUCTS[product]]
