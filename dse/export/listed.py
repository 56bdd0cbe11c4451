"""One entry of a library's list of settings."""

from __future__ import annotations

import msgspec

from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.stages import Dgrad, Fprop, Source, Wgrad


class Settings(msgspec.Struct, frozen=True):
    """text: Python that makes the settings, or JSON; recipe: what they compute; environment: variables that do the same
    for code that cannot be changed; notes: what is different all the same."""

    text: str
    recipe: Recipe
    environment: dict[str, str] = {}
    notes: tuple[str, ...] = ()


BF16 = Quantizer(element="bf16")


def bf16_backward(fprop: Fprop, from_copies: bool) -> Recipe:
    """Quantized forward, BF16 backward: of the operands themselves, or of the forward's decoded copies."""
    source: Source = "forward" if from_copies else "master"
    dgrad, wgrad = Dgrad(g=BF16, w=BF16, source=source), Wgrad(g=BF16, x=BF16, source=source)
    return Recipe(fprop=fprop, dgrad=dgrad, wgrad=wgrad).canonical()


def call(name: str, **arguments: object) -> str:
    """`name(a=1, b=True)`."""
    return f"{name}({', '.join(f'{key}={value}' for key, value in arguments.items())})"
