"""The bytes and operations that a training step cannot avoid, and the time that a GPU needs for them at least.

Of a lane's step, from shapes alone, each product by itself:

    parameters  weight and both moments read and written in FP32, the gradient written and read: 32 bytes. The whole
                gradient is needed before the update, because a lane that diverges keeps its weights
    copies      of weights of products in BF16, written once and read forward and backward: 6 bytes
    activations what one product leaves for the next, in BF16: written, read forward and backward, and its gradient
                written and read: 10 bytes. Of the last product's result only the gradient: 4. Norms, SiLU, residuals
                and the loss are taken to be done on the way; input data and targets are left out
    operations  2 · rows · inputs · outputs for each of three products, two where the input is data; 7 · T · width for a
                token in a causal attention core, twice that in one that is not

The limit is the longer of bytes / bandwidth and operations / rate, as if they overlapped wholly. It is the same for
FP4: these GPUs multiply decoded operands in BF16, and what codes would save in activations is not counted. Quantizers'
instructions are not in it either.

`python -m fp4dse.tasks.bench.roofline docs/speed.md` writes the table of that page, between its marks.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

from fp4dse.dse.cost.cost_page import markdown
from fp4dse.tasks import get_task
from fp4dse.tasks.language.decoder import Shape
from fp4dse.tasks.task import Task

BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes a second of the SXM cards, NVIDIA's data sheets."""
RATE = {"BF16": 989e12, "FP8": 1979e12}
"""Dense operations a second of either."""
OF_PARAMETER, OF_COPY, OF_ACTIVATION, OF_RESULT = 32, 6, 10, 4


class Work(NamedTuple):
    """Bytes, and operations by the unit that multiplies."""

    bytes: float
    operations: dict[str, float]

    def seconds(self, card: str) -> float:
        """The least time that it takes."""
        return max(self.bytes / BANDWIDTH[card], sum(count / RATE[unit] for unit, count in self.operations.items()))


class Measured(NamedTuple):
    """Microseconds on a card, as docs/log.md has them, and a remark."""

    card: str
    us: float
    note: str = ""


class Row(NamedTuple):
    what: str
    work: Work
    measured: Measured | None = None


class Product(NamedTuple):
    """A product with a weight [outputs, inputs], of so many rows."""

    name: str
    outputs: int
    inputs: int
    rows: int


class Model(NamedTuple):
    """parameters of a lane; products in their order; attention: operations of all cores; mixed: numbers that they
    leave; embeds: the first product's input is looked up and learns, else it is data."""

    parameters: int
    products: list[Product]
    attention: int = 0
    mixed: int = 0
    embeds: bool = False


def model_of(task: Task) -> Model:
    """Of regression, a vision transformer or a decoder without experts."""
    if task.name == "language":
        assert isinstance(task.model, partial)
        return _decoder(task, task.model.args[0])
    shapes = {name: tuple(of.shape[1:]) for name, of in (task.preview or task.problem)([0]).init.items()}
    weights, parameters = {name: of for name, of in shapes.items() if len(of) == 2}, sum(map(prod, shapes.values()))
    if task.name == "regression":
        return Model(parameters, [Product(name, *of, task.batch) for name, of in weights.items()])
    width = shapes["embed.w"][0]
    length = shapes["position"][0] // width
    rows = task.batch * length
    products = [Product(name, *of, task.batch if name == "head.w" else rows) for name, of in weights.items()]
    depth = sum(name.endswith("qkv.w") for name in weights)
    return Model(parameters, products, depth * 14 * rows * length * width, depth * rows * width)


def _decoder(task: Task, shape: Shape) -> Model:
    assert task.parameters is not None
    assert not shape.experts
    vocabulary, rows = (task.size - task.parameters) // (2 * shape.width), task.batch * shape.context
    found = shape.parameters(vocabulary)
    products = [Product(name, *of, rows) for name, of in found.items() if len(of) == 2 and name != "embed"]
    cores = shape.depth * rows * shape.width
    return Model(sum(map(prod, found.values())), products, 7 * shape.context * cores, cores, embeds=True)


def of_step(task: Task, units: str = "BF16") -> Work:
    """One step of one lane. units: of products within blocks; the head's and those of attention are BF16's."""
    model = model_of(task)
    *_, last = model.products
    weights = sum(of.outputs * of.inputs for of in model.products)
    left = sum(of.rows * of.outputs for of in model.products if of is not last) + model.mixed
    moved = OF_PARAMETER * model.parameters + OF_COPY * weights
    moved += OF_ACTIVATION * left + OF_RESULT * last.rows * last.outputs
    operations = dict.fromkeys(RATE, 0.0)
    operations["BF16"] = model.attention
    for number, of in enumerate(model.products):
        products = 3 if number or model.embeds else 2
        unit = units if "block" in of.name else "BF16"
        operations[unit] += products * 2 * of.rows * of.outputs * of.inputs
    return Work(moved, operations)


def of_quantizer(size: int, written: float) -> Work:
    """A quantizer that reads size × size numbers in BF16 and writes so many bytes for each."""
    return Work(size * size * (2 + written), {})


def table_rows() -> list[Row]:
    """Those of `bench train` and `bench kernels` that say how fast the engine is."""

    def step(task: str, units: str = "BF16") -> Work:
        return of_step(get_task(*task.split(":")), units)

    mlp, small, ten, large = "regression:mlp", "vision:small", "language:10M", "language:350M"
    before = "before the fused step"
    return [
        Row(f"{mlp}+bf16, L = 64, BF16", step(mlp), Measured("H100", 9.2)),
        Row("the same, NVFP4 held", step(mlp), Measured("H100", 13.9)),
        Row(f"{small}+bf16, L = 64, BF16", step(small), Measured("H100", 9.25)),
        Row("the same, NVFP4 held", step(small), Measured("H100", 12.7)),
        Row(f"{ten}+bf16, L = 16, BF16", step(ten), Measured("H100", 87e3 / 16, before)),
        Row("the same, NVFP4 held", step(ten), Measured("H100", 6613)),
        Row(f"{large}+bf16, BF16", step(large), Measured("H100", 80.3e3)),
        Row("the same, `nvidia-nvfp4` held", step(large), Measured("H200", 94.5e3)),
        Row("the same, `nvfp4-sr-rht` in all blocks", step(large), Measured("H100", 120.5e3)),
        Row("the same, `mxfp4`, BF16 products", step(large), Measured("H100", 105.6e3)),
        Row("the same, `mxfp4` through FP8 units", step(large, "FP8"), Measured("H100", 80.6e3)),
        Row("language:3M, ten populations of 4 lanes", step("language:3M"), Measured("H100", 16_384 / 3.01)),
        Row("NVFP4 stochastic, 8192², decoded", of_quantizer(8192, 2), Measured("H100", 94.5)),
        Row("NVFP4 packed, 8192², rows and columns", of_quantizer(8192, 2 * 4.5 / 8), Measured("H100", 106.2)),
    ]


def table() -> str:
    """Limits and what was measured, of a lane's step or a call, as markdown."""
    head = ["row", "MB", "GFLOP", "limit, H100, µs", "limit, H200, µs", "measured, µs", "share reached"]
    lines = []
    for what, work, measured in table_rows():
        limits = [_short(1e6 * work.seconds(card)) for card in BANDWIDTH]
        operations = sum(work.operations.values()) / 1e9
        cells = [what, _short(work.bytes / 1e6), _short(operations) if operations else "", *limits]
        if measured is None:
            lines.append([*cells, "", ""])
            continue
        note = f" ({measured.note})" if measured.note else ""
        share = 1e6 * work.seconds(measured.card) / measured.us
        lines.append([*cells, f"{_short(measured.us)}, {measured.card}{note}", f"{100 * share:.0f} %"])
    return markdown(head, lines)


def _short(value: float) -> str:
    """Three digits, thousands whole."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fill(page: str) -> str:
    """The page with the table as it is now."""
    marks = "<!-- roofline -->", "<!-- /roofline -->"
    return re.sub(f"{marks[0]}.*?{marks[1]}", lambda _: f"{marks[0]}\n{table()}\n{marks[1]}", page, flags=re.DOTALL)


if __name__ == "__main__":
    for file in map(Path, sys.argv[1:]):
        file.write_text(fill(file.read_text(encoding="utf-8")), encoding="utf-8")
