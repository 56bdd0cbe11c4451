"""Compares the model with what others measured, and with this project's own kernels. Nothing is fitted to these.

`published.toml` holds the numbers. A throughput relative to another of the same source is compared with the modelled
one; the one absolute row says how much of a real step is not modelled at all.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse.cost import operands
from fp4dse.dse.cost.chip import load_chip
from fp4dse.dse.cost.model import load_model
from fp4dse.dse.cost.operands import Use
from fp4dse.dse.cost.step import step_cost
from fp4dse.dse.library import NAMES, read, recipe_from_dict
from fp4dse.dse.precision import Precise
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.stages import Hadamard

ELEMENTS = 8192 * 8192


class Comparison(msgspec.Struct, frozen=True):
    """One row: a ratio, tokens/s or µs; error is modelled / measured - 1."""

    what: str
    measured: float
    modelled: float
    source: str = ""

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1


@cache
def throughputs() -> tuple[Comparison, ...]:
    """The published throughputs of paper.md's section 5: the first absolute, in tokens/s, the others relative."""
    out = []
    for row in _data()["throughput"]:
        against = row.get("against")
        modelled, measured = _throughput(row, row), float(row["published"])
        if against:
            modelled, measured = modelled / _throughput(against, row), measured / against["published"]
        out.append(Comparison(row["what"], measured, modelled, row["source"]))
    return tuple(out)


@cache
def kernels() -> tuple[Comparison, ...]:
    """This project's kernels on an H200: µs for 2^26 elements of BF16."""
    return tuple(Comparison(row["what"], row["measured"], _kernel_us(row)) for row in _data()["kernel"])


def _throughput(row: dict[str, Any], where: dict[str, Any]) -> float:
    """Modelled tokens/s."""
    recipe = row["recipe"]
    found = Recipe.named(recipe) if isinstance(recipe, str) else recipe_from_dict(recipe, "published.toml")
    if "precise" in row:
        found = msgspec.structs.replace(found, precise=read(row["precise"], Precise, "published.toml"))
    model = load_model(where["model"])
    return model.tokens / step_cost(found, model, load_chip(where["chip"])).total


def _kernel_us(row: dict[str, Any]) -> float:
    q = read(row["quantizer"], Quantizer, "published.toml")
    if q.tensor_scale and not row.get("current"):
        q = msgspec.structs.replace(q, tensor_scale=TensorScale(target=q.tensor_scale.target, amax="held", steps=1e9))
    chip = load_chip("h200")
    turned: Hadamard | None = NAMES[Hadamard | None][row["rotation"]] if "rotation" in row else None
    use = Use("fprop.x", q.canonical(), turned, "fp4" if row.get("packed") else "bf16")
    uses = [use, use] if row.get("both") else [use]
    return 1e6 * ELEMENTS * sum(sum(operands.seconds(kernel, chip).values()) for kernel in operands.passes(uses, chip))


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))
