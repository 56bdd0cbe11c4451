"""Stored bits of an operand's element, and bits that are kept for the backward pass."""

from __future__ import annotations

import math
from functools import lru_cache

from fp4dse.dse.channels import Corrected
from fp4dse.dse.cost.work import cut_share, per_block
from fp4dse.dse.estimator import STE, Clipped, Through, Trust
from fp4dse.dse.quantizer import Quantizer, block_elements
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.stages import SLOTS


def bits_per_element(recipe: Recipe) -> float:
    """Mean stored bits per operand element over the six slots."""
    return sum(_of_slot(recipe, s) for s in SLOTS) / len(SLOTS)


def activation_bits(recipe: Recipe) -> float:
    """Bits kept for the backward pass per element of a linear layer's input; 16 in BF16 training.

    It is the copy that the weight gradient multiplies, made in the forward pass, or the forward's own copy where the
    recipe re-quantizes that. To it come what the estimator of x needs (a bit of a mask, the place of a block's maximum,
    or x in BF16; 16 bits a block for the rounding of the scale), and for elements that are compensated apart their
    value and place, 32 bits each.
    """
    forward, backward = recipe.fprop.x, recipe.wgrad.x
    slot = "fprop.x" if recipe.copies("wgrad") and forward.element != "none" else "wgrad.x"
    kept = forward if slot == "fprop.x" else backward
    bits = _of_slot(recipe, slot) + 32 * cut_share(kept.canonical())
    through = Through() if forward.is_plain else recipe.estimator.x.canonical(forward.scale)
    if through == Through():
        return bits
    bits += 16 * per_block(forward) * (through.scale_rounding != STE())
    mask = 1.0 if isinstance(through.element, Clipped | Trust) else 0.0
    position = math.log2(block_elements(forward.block) or 1) * per_block(forward)
    if through.scale == "diagonal" and isinstance(through.element, STE | Clipped | Trust):
        return bits + mask + position
    if through.scale == "none" and mask:
        return bits + mask
    return bits if kept.is_plain else bits + 16


def _of_slot(recipe: Recipe, slot: str) -> float:
    """Stored bits of a slot's element; where channels are treated apart, those of their format, or of their error too.
    The gradient of which a part of the product is in another format is stored in both."""
    bits, channels = _bits(recipe.slot(slot)), recipe.fprop.channels
    if channels is None or recipe.slot(slot).is_plain:
        return bits
    if isinstance(channels, Corrected):
        return (
            bits * (1 + channels.share) if slot == "fprop.x" or (slot == "fprop.w" and channels.of == "both") else bits
        )
    if slot == "wgrad.g":
        return bits + _bits(channels.format) * channels.wgrad
    if slot in ("fprop.x", "fprop.w") or (slot == "wgrad.x" and channels.wgrad):
        return bits + channels.share * (_bits(channels.format) - bits)
    return bits


@lru_cache(maxsize=4096)
def _bits(quantizer: Quantizer) -> float:
    return quantizer.canonical().bits_per_element
