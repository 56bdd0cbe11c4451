"""Checks of the cost model: beside what others measured, and under other assumptions.

`published.toml` holds the measured numbers in two parts that share none. Single kernels and some throughputs are what
shares of peaks and scenarios were chosen from (`fits`). Ratios of two runs of one source, of whole models or of a layer
alone, were used for nothing (`ratios`): how far the model is from them is its error. The BF16 runs of some are among
the throughputs, and what is beside a modelled step follows from these (`over_is_fitted`). A run is priced as it was
made: its own sequences, micro-batches and blocks made again stand in its row where they are not the shape's. To see if
the order of recipes depends on assumed numbers, one assumption at a time is changed, and the shipped recipes are priced
again on the default model and chip.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec

from fp4dse.dse.cost import operands
from fp4dse.dse.cost.chip import Chip, Number, load_chip
from fp4dse.dse.cost.memory import at_share, forward_of_layers
from fp4dse.dse.cost.model import Linear, Model, load_model
from fp4dse.dse.cost.operands import TECHNIQUES, Use
from fp4dse.dse.cost.products import product
from fp4dse.dse.cost.scenario import ENDS, MID, under
from fp4dse.dse.cost.step import DEFAULT_CHIP, DEFAULT_MODEL, UNMODELLED, is_bf16, step_cost
from fp4dse.dse.layers.precision import Precise
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.reading.library import recipe_files, recipe_from_dict
from fp4dse.dse.reading.shorthand import NAMES, read
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.scale import TensorScale
from fp4dse.dse.stages import Hadamard

ELEMENTS = 8192 * 8192


class Comparison(msgspec.Struct, frozen=True):
    """One row: a ratio, tokens/s, µs or ms; error is modelled / measured - 1.

    band   with the worst software and with the best, where a row has one
    chip   by name
    shape  of the model by name, or of the layer that was measured alone; empty where `what` says it
    over_is_fitted  of a ratio: the run that it is relative to is one of those that were used to fit
    """

    what: str
    measured: float
    modelled: float
    source: str = ""
    band: tuple[float, ...] = ()
    chip: str = ""
    shape: str = ""
    over_is_fitted: bool = False

    @property
    def error(self) -> float:
        return self.modelled / self.measured - 1

    @property
    def within(self) -> bool:
        """True if what was measured lies in the band."""
        return min(self.band) <= self.measured <= max(self.band)


@cache
def ratios() -> tuple[Comparison, ...]:
    """Published throughputs of whole training runs, or of a layer alone, relative to another run of the same source."""
    out = []
    for row in published()["ratio"]:
        over = {**row, **row["over"]}
        measured = row["published"] / over["published"]
        found = {name: tokens_per_second(row, name) / tokens_per_second(over, name) for name in (MID, *ENDS)}
        band = tuple(sorted(found[end] for end in ENDS))
        fitted = row["over"].get("fitted", False)
        out.append(Comparison(row["what"], measured, found[MID], row["source"], band, row["chip"], _shape(row), fitted))
    return tuple(out)


@cache
def fits() -> tuple[Comparison, ...]:
    """Measurements that shares of peaks and scenarios were chosen from: products (µs), quantizing (ms), BF16
    throughputs (tokens/s)."""
    out = []
    for row in published()["product"]:
        chip = load_chip(row["chip"])
        modelled = sum(_product_us(row["quantizer"], shape, chip) for shape in row["shapes"])
        out.append(Comparison(row["what"], row["measured"], modelled, row["source"], chip=row["chip"]))
    for row in published()["quantizing"]:
        seconds = step_cost(_recipe(row), _layer(row), load_chip(row["chip"]), row["scenario"]).seconds
        modelled = 1e3 * sum(seconds[name] for name in TECHNIQUES)
        out.append(Comparison(row["what"], row["measured"], modelled, row["source"], chip=row["chip"]))
    for row in published()["throughput"]:
        modelled = tokens_per_second(row, row["scenario"])
        out.append(Comparison(row["what"], row["published"], modelled, row["source"], (), row["chip"], row["model"]))
    return tuple(out)


def median_error(rows: Iterable[Comparison]) -> float:
    """The median of the errors without their signs."""
    return statistics.median(abs(row.error) for row in rows)


@cache
def kernels() -> tuple[Comparison, ...]:
    """This project's kernels on an H200: µs for 2^26 elements of BF16."""
    return tuple(Comparison(row["what"], row["measured"], _kernel_us(row)) for row in published()["kernel"])


def tokens_per_second(row: Mapping[str, Any], scenario: str) -> float:
    """Modelled tokens/s of the run of a row. A layer alone is not a step: nothing is unmodelled."""
    recipe, chip = _recipe(row), load_chip(row["chip"])
    if "layers" in row:
        model = _layer(row)
        parts = step_cost(recipe, model, chip, scenario).seconds
        return model.tokens / sum(seconds for part, seconds in parts.items() if part != UNMODELLED)
    model = _as_run(row)
    total = at_share(recipe, model, chip, row.get("recomputed", 0.0), scenario).seconds
    for r, once in forward_of_layers(recipe, model, under(chip, scenario)) if "products_again" in row else []:
        total += row["products_again"]["bf16" if is_bf16(r) else "scaled"] * once
    return model.tokens / total


def _as_run(row: Mapping[str, Any]) -> Model:
    """The row's shape with the tokens of a micro-batch, the micro-batches of a step and the sequences of the run, and
    its optimizer's work shared out to as many GPUs as in the run."""
    model = load_model(row["model"])
    own: dict[str, Any] = {name: row[name] for name in ("tokens", "micro_batches") if name in row}
    if "shards" in row:
        own["bytes_per_parameter"] = model.bytes_per_parameter / row["shards"]
    if "context" in row:
        own["attention"] = [msgspec.structs.replace(part, context=row["context"]) for part in model.attention]
    return msgspec.structs.replace(model, **own)


def _shape(row: Mapping[str, Any]) -> str:
    if "model" in row:
        return str(row["model"])
    return ", ".join(f"{row['tokens']} × {outputs} × {inputs}" for outputs, inputs in row["layers"])


def _recipe(row: Mapping[str, Any]) -> Recipe:
    """A shipped recipe or one of the file's, with the row's own precise layers."""
    name, own = row["recipe"], published()["recipes"]
    found = recipe_from_dict(own[name], "published.toml") if name in own else Recipe.named(name)
    if "precise" in row:
        found = msgspec.structs.replace(found, precise=read(row["precise"], Precise, "published.toml"))
    return found


def _layer(row: Mapping[str, Any]) -> Model:
    """Layers [outputs, inputs] alone, for one optimizer step of `tokens`."""
    linears = [Linear(str(i), inputs, outputs) for i, (outputs, inputs) in enumerate(row["layers"])]
    return Model("layer", "", "", row["tokens"], 1, 1, linears, 0)


def _product_us(quantizer: str, shape: list[int], chip: Chip) -> float:
    """One product [M, N, K] with a BF16 output."""
    m, n, k = shape
    fprop = Recipe.uniform(Quantizer.named(quantizer)).fprop
    alone = Model("product", "", "", m, 1, 1, [Linear("one", k, n)], 0)
    return 1e6 * dict(product("fprop", fprop, alone, chip))["products"]


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
def published() -> dict[str, Any]:
    """The tables of published.toml."""
    return tomllib.loads((Path(__file__).parent / "published.toml").read_text(encoding="utf-8"))


CHANGES: dict[str, tuple[float, ...]] = {
    "achieved.matrix": (0.55, 0.75),
    "achieved.formats.fp4": (0.5, 0.8),
    "achieved.attention": (0.3, 0.6),
    "achieved.vector": (0.4, 0.9),
    "achieved.bandwidth": (0.7, 0.95),
    "convert": (4.7e12, 75e12),
    "launch": (0.5e-6, 8e-6),
}
"""Number of a chip -> other values that it might have."""

APART = 0.01
"""Recipes whose overheads differ by less are not called ordered."""


class Effect(msgspec.Struct, frozen=True):
    """The effect of a change: the largest relative change of an overhead, and the pairs of recipes that swap places."""

    what: str
    largest: float
    swapped: int
    pairs: int


def effects() -> list[Effect]:
    """Every change of CHANGES, then other scenarios, models and chips."""
    model, chip = load_model(DEFAULT_MODEL), load_chip(DEFAULT_CHIP)
    before = _overheads(model, chip)
    after = {
        f"{path} {value:g}": _overheads(model, _with(chip, path, value))
        for path, values in CHANGES.items()
        for value in values
    }
    after |= {f"scenario {end}": _overheads(model, chip, end) for end in ENDS}
    after |= {f"model {name}": _overheads(load_model(name), chip) for name in ("llama-350m", "llama-1b", "vit-b")}
    after |= {f"chip {name}": _overheads(model, load_chip(name)) for name in ("b200", "gb300", "generic")}
    return [_effect(what, before, found) for what, found in after.items()]


def _with(chip: Chip, path: str, value: float) -> Chip:
    """The chip with one number changed."""
    number = Number(value, "changed")
    match path.split("."):
        case ["achieved", "formats", unit]:
            changed = msgspec.structs.replace(chip.achieved, formats={**chip.achieved.formats, unit: number})
            return msgspec.structs.replace(chip, achieved=changed)
        case ["achieved", share]:
            return msgspec.structs.replace(chip, achieved=msgspec.structs.replace(chip.achieved, **{share: number}))
    return msgspec.structs.replace(chip, **{path: number})


def _overheads(model: Model, chip: Chip, scenario: str = MID) -> list[float]:
    bf16 = step_cost(Recipe.named("bf16"), model, chip, scenario).total
    return [step_cost(file.recipe, model, chip, scenario).total / bf16 for file in recipe_files().values()]


def _effect(what: str, before: list[float], after: list[float]) -> Effect:
    largest = max(abs(b / a - 1) for a, b in zip(before, after, strict=True))
    pairs = [(i, j) for i, j in combinations(range(len(before)), 2) if abs(before[i] - before[j]) > APART]
    swapped = sum((before[i] - before[j]) * (after[i] - after[j]) < 0 for i, j in pairs)
    return Effect(what, largest, swapped, len(pairs))
