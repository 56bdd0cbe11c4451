"""The recipes of NVIDIA Transformer Engine (transformer_engine.common.recipe, as of 2026).

    NVFP4BlockScaling     E2M1 in blocks of 16 under E4M3 and a tensor scale; weights in 16×16 tiles, gradients
                          stochastic in the full range, a Hadamard of 16 with fixed signs on the weight gradient.
                          Activations may have a factor for each row, with a BF16 backward pass
    MXFP8BlockScaling     E4M3 (gradients E5M2 under HYBRID) in blocks of 32 under E8M0, rounded up
    Float8CurrentScaling  the same elements under one FP32 scale a tensor

`backward_override` leaves the backward products in BF16, of the operands or of their decoded copies. Four-over-six is
not built together with the Hadamard there, so that neither is listed with the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec

from fp4dse.dse.export.listed import Settings, bf16_backward, call
from fp4dse.dse.quantizer import BF16, Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.scale import E8M0, TensorScale
from fp4dse.dse.stages import Dgrad, Fprop, Hadamard, Wgrad

NOTES = (
    "te.Linear and the like take it; layers that stay in BF16 are left outside of te.autocast",
    "random bits of stochastic rounding, and how many there are, are Transformer Engine's own",
)
OLDER = "FP8 is scaled in another order of operations: fp8-current is that of Transformer Engine, bit for bit"
OVERRIDES = (None, "dequantized", "high_precision")
SCOPES = ("none", "weights", "activations", "all")


def settings() -> Iterator[Settings]:
    """All of them, defaults first."""
    yield Settings("recipe = None  # te.autocast(enabled=False)", Recipe.uniform(BF16).canonical())
    yield from _nvfp4()
    for override, hybrid in product(OVERRIDES, (False, True)):
        yield from _fp8("MXFP8BlockScaling", "E4M3", Quantizer(block=32, scale=E8M0(rule="rceil")), hybrid, override)
        yield from _fp8("Float8CurrentScaling", "HYBRID", QUANTIZERS["fp8-current"], hybrid, override)
    for override, hybrid in product(OVERRIDES, (False, True)):
        for found in _fp8("Float8CurrentScaling", "HYBRID", QUANTIZERS["fp8"], hybrid, override):
            yield msgspec.structs.replace(found, notes=(*found.notes, OLDER))


def _nvfp4() -> Iterator[Settings]:
    seen: set[Recipe] = set()
    switches = ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")
    sixes = product(SCOPES, ("all", "none", "weights", "activations"), ("MAE", "MSE"))
    offs = list(product((False, True), repeat=len(switches)))
    for by_row, override, six, off in product((False, True), OVERRIDES, sixes, offs):
        if by_row and (not override or off != (True, False, True)):
            continue  # rows with a factor of their own are of the forward pass, without Hadamard and tiles
        arguments: dict[str, object] = {name: True for name, is_off in zip(switches, off, strict=True) if is_off}
        scope, bounded, error = six
        if scope != "none" and "disable_rht" not in arguments:
            continue
        variables = {f"NVTE_NVFP4_{name.upper()}": "1" for name in arguments}
        choices = {"nvfp4_4over6": scope, "nvfp4_4over6_e4m3_use_256": bounded, "nvfp4_4over6_err_mode": error}
        for (name, value), default in zip(choices.items(), ("none", "all", "MAE"), strict=True):
            if value != default:
                arguments[name] = repr(value)
                variables[f"NVTE_{name.upper()}"] = value
        if by_row:
            arguments["row_scaled_activation"] = True
            variables["NVTE_NVFP4_ROW_SCALED_ACTIVATION"] = "1"
        if override:
            arguments["backward_override"] = repr(override)
            variables["NVTE_BACKWARD_OVERRIDE"] = override
        recipe = _nvfp4_recipe(off, six, override, by_row)
        if recipe not in seen:
            seen.add(recipe)
            yield Settings(_text("NVFP4BlockScaling", arguments), recipe, variables, NOTES)


def _nvfp4_recipe(off: tuple[bool, ...], six: tuple[str, str, str], override: str | None, by_row: bool) -> Recipe:
    no_rotation, no_stochastic, no_tiles = off
    scope, bounded, error = six
    nvfp4 = QUANTIZERS["nvfp4"]

    def chosen(operand: str, q: Quantizer) -> Quantizer:
        if scope not in (operand, "all"):
            return q
        target = 256.0 if bounded in (operand, "all") else 448.0
        adapt = f"4over6-{error.lower()}"
        return msgspec.structs.replace(q, adapt=adapt, tensor_scale=TensorScale(target=target))

    x = chosen("activations", nvfp4)
    if by_row:
        target = x.tensor_scale.target if x.tensor_scale else None
        x = msgspec.structs.replace(x, tensor_scale=TensorScale(target=target, over="row"))
    w = chosen("weights", nvfp4 if no_tiles else QUANTIZERS["nvfp4-2d"])
    if override:
        return bf16_backward(Fprop(x=x, w=w), from_copies=override == "dequantized")
    g = nvfp4 if no_stochastic else msgspec.structs.replace(nvfp4, rounding=Stochastic())
    rotation = None if no_rotation else Hadamard(size=16, signs="fixed")
    return Recipe(Fprop(x=x, w=w), Dgrad(g=g, w=w), Wgrad(g=g, x=x, rotation=rotation)).canonical()


def _fp8(name: str, default: str, q: Quantizer, hybrid: bool, override: str | None) -> Iterator[Settings]:
    x = msgspec.structs.replace(q, element="e4m3")
    g = msgspec.structs.replace(q, element="e5m2" if hybrid else "e4m3")
    form = "HYBRID" if hybrid else "E4M3"
    arguments: dict[str, object] = {} if form == default else {"fp8_format": f"Format.{form}"}
    if override:
        if hybrid:
            return  # gradients are not quantized
        arguments["backward_override"] = repr(override)
        recipe = bf16_backward(Fprop(x=x, w=x), from_copies=override == "dequantized")
    else:
        recipe = Recipe(Fprop(x=x, w=x), Dgrad(g=g, w=x), Wgrad(g=g, x=x)).canonical()
    variables = {"NVTE_BACKWARD_OVERRIDE": override} if override else {}
    yield Settings(_text(name, arguments), recipe, variables, NOTES[:1])


def _text(name: str, arguments: dict[str, object]) -> str:
    names = ", ".join(["Format"] * ("fp8_format" in arguments) + [name])
    return (
        f"import transformer_engine.pytorch as te\n"
        f"from transformer_engine.common.recipe import {names}\n\n"
        f"recipe = {call(name, **arguments)}\n"
        f"with te.autocast(enabled=True, recipe=recipe):\n"
        f"    ...  # forward pass of a model of te.Linear"
    )
