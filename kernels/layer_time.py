"""How long this project's quantized layers take on a device, at a model's shapes, beside what the cost model says.

A layer's forward and backward pass, made by the code that training runs: on a GPU the fused kernels and the fastest
exact products, on a CPU the compiled reference. These **emulate** FP4, so their times say what an experiment costs here
and what a technique adds to it, and nothing about FP4 hardware.

Recipe and BF16 take turns, and the fastest of all turns counts: whatever else the machine does only makes them longer.
Turns go on until the five fastest agree; where they never do, the times are not steady, and say so.

    measured = Σ (n_q · t + n_p · t_BF16) / Σ (n_q + n_p) · t_BF16        over the kinds of layers with weights

n_q layers of a kind are quantized, n_p are kept precise by the recipe. What is no layer with weights (attention core,
norms, optimizer) is not in it, and weights are quantized at every pass, not once an optimizer step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch

from fp4dse.dse import Recipe
from fp4dse.dse.cost import Chip, Model
from fp4dse.dse.cost.model import Linear, by_precision
from fp4dse.dse.cost.report import layer_overhead
from fp4dse.dse.cost.step import BF16, finished
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.layers import QuantLinear

LANES = 2
"""Times are of one: a small product of a single lane would count twice (batched.py)."""
ALIKE, STEADY = 5, 0.05
"""How many of the fastest turns must agree, and how far apart they may be, relatively."""
FEWEST, LEAST_S, MOST_S = 16, 1.0, 10.0
"""Turns and seconds at least, and seconds after which no more turns are begun."""


class LayerTime(msgspec.Struct, frozen=True):
    """One kind of layer of a model: how many of its layers are quantized and how many precise, µs of one lane's forward
    and backward pass where it is quantized and with BF16 operands, and what quantized."""

    linear: Linear
    quantized: int
    precise: int
    us: float
    bf16_us: float
    steady: bool
    backend: str


def layer_times(recipe: Recipe, model: Model, device: str) -> Iterator[LayerTime]:
    """Every kind of layer with weights. Seconds to minutes, the first time compilation."""
    for linear in model.linears:
        alone = msgspec.structs.replace(model, linears=[linear])
        quantized, precise = (sum(n.count for n in part.linears) for part in by_precision(alone, recipe.precise))
        yield LayerTime(linear, quantized, precise, *_layer_us(recipe if quantized else BF16, linear, model, device))


def measured_overhead(times: Iterable[LayerTime]) -> float:
    """The time of all layers with weights relative to BF16's: see above. NaN where a time is not steady."""
    times = list(times)
    if not all(line.steady for line in times):
        return math.nan
    mine = sum(line.quantized * line.us + line.precise * line.bf16_us for line in times)
    return mine / sum((line.quantized + line.precise) * line.bf16_us for line in times)


def layer_rows(times: Iterable[LayerTime], recipe: Recipe, model: Model, chip: Chip) -> list[dict[str, object]]:
    """The times as lines of a table, each beside the ratio that is modelled for the chip."""
    return [
        {
            "layer": line.linear.name,
            "rows": model.tokens,
            "inputs": line.linear.inputs,
            "outputs": line.linear.outputs,
            "quantized": line.quantized,
            "precise": line.precise,
            "us": line.us,
            "bf16_us": line.bf16_us,
            "measured": line.us / line.bf16_us,
            "modelled": layer_overhead(recipe, line.linear, model, chip) if line.quantized else 1.0,
            "steady": line.steady,
            "backend": line.backend,
        }
        for line in times
    ]


def _layer_us(recipe: Recipe, linear: Linear, model: Model, device: str) -> tuple[float, float, bool, str]:
    """µs of a pass for one lane and of a BF16 one, whether they are steady, and what quantized. A finish counts for its
    share of the steps."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(LANES, rows, columns, generator=generator, device=device)

    weight, x, g = (normal(*shape) for shape in _shapes(linear, model.tokens))
    x.requires_grad_()

    def step(computed: Recipe) -> tuple[Callable[[], None], str]:
        numerics = LaneNumerics([computed] * LANES, range(LANES), device)
        layer = QuantLinear(weight.clone(), None, numerics, 0)

        def run() -> None:
            x.grad = layer.weight.grad = None
            layer(x).backward(g)

        return run, numerics.backend.name

    end = recipe.finish.share if recipe.finish else 0.0
    calls = {r: step(r) for r in (recipe, finished(recipe), BF16)}  # equal ones are timed once
    times, steady = _fastest_us([call for call, _ in calls.values()], device)
    us = {r: found / LANES for r, found in zip(calls, times, strict=True)}
    return (1 - end) * us[recipe] + end * us[finished(recipe)], us[BF16], steady, calls[recipe][1]


def _shapes(linear: Linear, tokens: int) -> tuple[tuple[int, int], ...]:
    """Of the weight, the input and the gradient of the output."""
    return (linear.outputs, linear.inputs), (tokens, linear.inputs), (tokens, linear.outputs)


def _fastest_us(calls: list[Callable[[], None]], device: str) -> tuple[list[float], bool]:
    """Fastest time of each of several calls that take turns, and whether it is steady, after two turns that may
    compile."""
    times: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    while True:
        for taken, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            call()
            if torch.device(device).type == "cuda":
                torch.cuda.synchronize(device)
            taken.append(1e6 * (time.perf_counter() - start))
        if len(times[0]) == 2:
            begin = time.perf_counter()
        spent = time.perf_counter() - begin
        if len(times[0]) >= 2 + FEWEST and spent > LEAST_S:
            fastest = [sorted(taken[2:])[:ALIKE] for taken in times]
            steady = all(few[-1] < few[0] * (1 + STEADY) for few in fastest)
            if steady or spent > MOST_S:
                return [few[0] for few in fastest], steady
