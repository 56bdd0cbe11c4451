"""Checks of the cost model: beside what others measured, and under other assumptions. Nothing is fitted to these.

`published.toml` holds the measured numbers. A throughput relative to another of the same source is compared with the
modelled one; the one absolute row says how much of a real step is not modelled at all. To see if the order of recipes
depends on assumed numbers, one assumption at a time is changed, and the shipped recipes are priced again on the default
model and chip.
"""

from __future__ import annotations

import tomllib
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse.cost import operands
from fp4dse.dse.cost.chip import Chip, Number, load_chip
from fp4dse.dse.cost.model import Model, load_model
from fp4dse.dse.cost.operands import Use
from fp4dse.dse.cost.step import DEFAULT_CHIP, DEFAULT_MODEL, step_cost
from fp4dse.dse.library import NAMES, read, recipe_files, recipe_from_dict
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


CHANGES: dict[str, tuple[float, ...]] = {
    "achieved.matrix": (0.5, 0.9),
    "achieved.vector": (0.4, 0.9),
    "achieved.bandwidth": (0.7, 0.95),
    "convert": (4.7e12, 75e12),
    "launch": (0.5e-6, 8e-6),
}
"""Assumed number of a chip -> other values that it might have."""

APART = 0.01
"""Recipes whose overheads differ by less are not called ordered."""


class Effect(msgspec.Struct, frozen=True):
    """The effect of a change: the largest relative change of an overhead, and the pairs of recipes that swap places."""

    what: str
    largest: float
    swapped: int
    pairs: int


def effects() -> list[Effect]:
    """Every change of CHANGES, then other models and chips."""
    model, chip = load_model(DEFAULT_MODEL), load_chip(DEFAULT_CHIP)
    before = _overheads(model, chip)
    cases = {
        f"{path} {value:g}": (model, _with(chip, path, value)) for path, values in CHANGES.items() for value in values
    }
    cases |= {f"model {name}": (load_model(name), chip) for name in ("llama-350m", "llama-8b", "vit-b")}
    cases |= {f"chip {name}": (model, load_chip(name)) for name in ("gb300", "generic")}
    return [_effect(what, before, _overheads(*case)) for what, case in cases.items()]


def _with(chip: Chip, path: str, value: float) -> Chip:
    """The chip with one number changed."""
    outer, _, inner = path.partition(".")
    number: object = Number(value, "changed")
    if inner:
        number = msgspec.structs.replace(chip.achieved, **{inner: number})
    return msgspec.structs.replace(chip, **{outer: number})


def _overheads(model: Model, chip: Chip) -> list[float]:
    bf16 = step_cost(Recipe.named("bf16"), model, chip).total
    return [step_cost(file.recipe, model, chip).total / bf16 for file in recipe_files().values()]


def _effect(what: str, before: list[float], after: list[float]) -> Effect:
    largest = max(abs(b / a - 1) for a, b in zip(before, after, strict=True))
    pairs = [(i, j) for i, j in combinations(range(len(before)), 2) if abs(before[i] - before[j]) > APART]
    swapped = sum((before[i] - before[j]) * (after[i] - after[j]) < 0 for i, j in pairs)
    return Effect(what, largest, swapped, len(pairs))
