"""One entry of a library's list of settings."""

from __future__ import annotations

import msgspec

from fp4dse.dse.quantizer import BF16
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.rounding import Stochastic
from fp4dse.dse.stages import STAGES, Dgrad, Fprop, Source, Wgrad


class Settings(msgspec.Struct, frozen=True):
    """text: Python that makes the settings, YAML or JSON; recipe: what they compute; environment: variables that do the
    same for code that cannot be changed; notes: what is different all the same; apply: Python that converts the layers
    of `model` for which `fits(module, name)` holds, where the library can convert some."""

    text: str
    recipe: Recipe
    environment: dict[str, str] = {}
    notes: tuple[str, ...] = ()
    apply: str = ""


def bf16_backward(fprop: Fprop, from_copies: bool) -> Recipe:
    """Quantized forward, BF16 backward: of the operands themselves, or of the forward's decoded copies."""
    source: Source = "forward" if from_copies else "master"
    dgrad, wgrad = Dgrad(g=BF16, w=BF16, source=source), Wgrad(g=BF16, x=BF16, source=source)
    return Recipe(fprop=fprop, dgrad=dgrad, wgrad=wgrad).canonical()


def any_bits(recipe: Recipe) -> Recipe:
    """The recipe with the usual number of random bits: it is the library's and the chip's choice, and not compared."""
    stages = {}
    for name in STAGES:
        stage = getattr(recipe, name)
        drawn = {o: getattr(stage, o) for o in STAGES[name] if isinstance(getattr(stage, o).rounding, Stochastic)}
        bits = Stochastic().bits
        changes = {
            o: msgspec.structs.replace(q, rounding=msgspec.structs.replace(q.rounding, bits=bits))
            for o, q in drawn.items()
        }
        stages[name] = msgspec.structs.replace(stage, **changes)
    return msgspec.structs.replace(recipe, **stages)


def of_layer(recipe: Recipe) -> Recipe:
    """The part of a recipe that a layer has, canonical: its products, and no optimizer, schedule or finish.

    A BF16 copy of a BF16 copy is the copy itself, so that its source is not compared.
    """
    r = any_bits(recipe)
    dgrad, wgrad = r.dgrad, r.wgrad
    if r.fprop.w == dgrad.w == BF16:
        dgrad = msgspec.structs.replace(dgrad, source="master")
    if r.fprop.x == wgrad.x == BF16:
        wgrad = msgspec.structs.replace(wgrad, source="master")
    return Recipe(fprop=r.fprop, dgrad=dgrad, wgrad=wgrad, estimator=r.estimator, gemm=r.gemm).canonical()


def call(name: str, **arguments: object) -> str:
    """`name(a=1, b=True)`."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"
