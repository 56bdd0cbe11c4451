"""Channels that are treated apart: what their products and passes take beyond those of all channels alike.

held       a product is one of the channels held, in their format, and one of the others: in fprop and, if the weight's
           gradient has them, in wgrad, whose other operand is encoded in both formats
corrected  errors are appended to the contraction: K and the share of it, twice that where both operands have errors
both       norms or maxima of channels are a pass over x in the steps in which they are chosen, errors one over x and
           over w that quantizes them; taking channels in another order is part of the pass that encodes them
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import msgspec

from fp4dse.dse.channels import Held
from fp4dse.dse.cost import work
from fp4dse.dse.cost.chip import Chip
from fp4dse.dse.cost.model import Model, together
from fp4dse.dse.cost.products import Seconds, product
from fp4dse.dse.cost.units import product_unit
from fp4dse.dse.cost.work import Work
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import GemmChoice
from fp4dse.dse.stages import Fprop, Wgrad

SCORE_PASS = Work(read=2, vector=3)
"""The score of every channel: unpack, square, add."""


@lru_cache(maxsize=65536)
def channels_apart(fprop: Fprop, wgrad: Wgrad, model: Model, chip: Chip, gemm: GemmChoice = "exact") -> Seconds:
    """Seconds of a micro-batch beyond those of the same recipe without them; none without such channels."""
    channels = fprop.channels
    if channels is None:
        return ()
    first, last = _widths(model, channels.count), _widths(model, lambda k: k - channels.count(k))
    score = SCORE_PASS.seconds(chip) * _inputs(model) * chip.passes / channels.steps
    if channels.by == "error":
        score = _error_passes(fprop, model, chip) / channels.steps
    if not isinstance(channels, Held):
        errors = "xw" if channels.of == "both" else "x"
        longer = _widths(model, lambda k: k + len(errors) * channels.count(k))
        more = _total(product("fprop", fprop, longer, chip, gemm)) - _total(product("fprop", fprop, model, chip, gemm))
        sizes = {"x": _inputs(first), "w": _weights(first) / model.micro_batches}
        unit = product_unit(fprop.x.canonical(), fprop.w.canonical(), chip, gemm)
        for operand in errors:
            if not (q := getattr(fprop, operand).canonical()).is_plain:
                again = Work(vector=2) + work.quantize(q, chip, unit)
                more += again.seconds(chip) * sizes[operand] * chip.passes
        return (("outliers", score + more),)
    seconds, in_wgrad = score, channels.wgrad and not (wgrad.g.is_plain and wgrad.x.is_plain)
    for name, stage in (("fprop", fprop), ("wgrad", wgrad)):
        if name == "fprop" or in_wgrad:
            held = _in_format(stage, channels.format)
            seconds += _total(product(name, held, first, chip, gemm)) + _total(product(name, stage, last, chip, gemm))
            seconds -= _total(product(name, stage, model, chip, gemm))
    if in_wgrad and not wgrad.g.is_plain:
        unit = product_unit(channels.format, channels.format, chip, gemm)
        outputs = sum(linear.count * linear.outputs * linear.tokens for linear in model.linears) * model.tokens
        seconds += work.quantize(channels.format, chip, unit).seconds(chip) * outputs * chip.passes
    return (("outliers", seconds),)


def _error_passes(fprop: Fprop, model: Model, chip: Chip) -> float:
    """Seconds of the passes that find how much of each channel both operands lose."""
    sizes, seconds = {"x": _inputs(model), "w": _weights(model) / model.micro_batches}, 0.0
    for operand, size in sizes.items():
        if not (q := getattr(fprop, operand).canonical()).is_plain:
            done = SCORE_PASS + work.quantize(q, chip, product_unit(q, q, chip, "exact"))
            seconds += msgspec.structs.replace(done, write=0.0).seconds(chip) * size * chip.passes
    return seconds


def _in_format(stage: Fprop | Wgrad, q: Quantizer) -> Fprop | Wgrad:
    """The stage of channels that are held, without rotation."""
    operands = {name: q for name in "xwg" if hasattr(stage, name) and not getattr(stage, name).is_plain}
    more = {"channels": None} if isinstance(stage, Fprop) else {}
    return msgspec.structs.replace(stage, rotation=None, **operands, **more)


def _widths(model: Model, width: Callable[[int], int]) -> Model:
    """The model with other input widths."""
    wide = [(linear, width(linear.inputs)) for linear in model.linears]
    return together(model, [msgspec.structs.replace(linear, inputs=inputs) for linear, inputs in wide if inputs])


def _inputs(model: Model) -> float:
    """Elements of x in all layers."""
    return sum(linear.count * linear.inputs * linear.tokens for linear in model.linears) * model.tokens


def _weights(model: Model) -> float:
    """Elements of w in all layers."""
    return sum(linear.count * linear.inputs * linear.outputs for linear in model.linears)


def _total(seconds: Seconds) -> float:
    return sum(of for _, of in seconds)
