"""How long this project's quantized layers take on a device, at a model's shapes, beside what the cost model says.

A layer's forward and backward pass, made by the code that training runs: on a GPU the fused kernels and the fastest
exact products, on a CPU the compiled reference. These emulate FP4, so compare them with a chip that does, too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import msgspec
import torch

from fp4dse.dse import Recipe
from fp4dse.dse.cost import Chip, Model
from fp4dse.dse.cost.model import Linear
from fp4dse.dse.cost.report import layer_overhead
from fp4dse.kernels.lanes import LaneNumerics
from fp4dse.kernels.layers import QuantLinear

LANES, REPEATS = 2, 5
"""A population has two lanes at least; times are of one."""


class LayerTime(msgspec.Struct, frozen=True):
    """One kind of layer of a model: µs of one lane's forward and backward pass with the recipe and with BF16 operands,
    their ratio, the ratio that is modelled for the chip, and what quantized."""

    layer: str
    rows: int
    inputs: int
    outputs: int
    us: float
    bf16_us: float
    measured: float
    modelled: float
    backend: str


def layer_times(recipe: Recipe, model: Model, chip: Chip, device: str) -> Iterator[LayerTime]:
    """Every kind of quantized layer of the model. Seconds to minutes, the first time compilation."""
    for linear in model.quantized:
        us, backend = _layer_us(recipe, linear, model.tokens, device)
        bf16_us, _ = _layer_us(Recipe.named("bf16"), linear, model.tokens, device)
        yield LayerTime(
            layer=linear.name,
            rows=model.tokens,
            inputs=linear.inputs,
            outputs=linear.outputs,
            us=us,
            bf16_us=bf16_us,
            measured=us / bf16_us,
            modelled=layer_overhead(recipe, linear, model, chip),
            backend=backend,
        )


def _layer_us(recipe: Recipe, linear: Linear, tokens: int, device: str) -> tuple[float, str]:
    """Median µs of a pass for one lane, and what quantized."""
    numerics = LaneNumerics([recipe] * LANES, range(LANES), device)
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(LANES, rows, columns, generator=generator, device=device)

    layer = QuantLinear(normal(linear.outputs, linear.inputs), None, numerics, 0)
    x, g = normal(tokens, linear.inputs).requires_grad_(), normal(tokens, linear.outputs)

    def step() -> None:
        x.grad = layer.weight.grad = None
        layer(x).backward(g)

    return _median_us(step, device) / LANES, numerics.backend.name


def _median_us(call: Callable[[], None], device: str) -> float:
    """Median time of a call, after two that may compile."""
    times = []
    for _ in range(2 + REPEATS):
        start = time.perf_counter()
        call()
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[2:])
