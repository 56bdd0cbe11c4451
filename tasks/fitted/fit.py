"""The weights that a task starts from, fitted to the forward quantizers of a recipe, layer by layer or block by block.

Layers are taken in the order of the model. Each is fitted to the inputs that reach it through those before it, fitted
and quantized already; only its own outputs are looked at. Calibration data are the task's first batches of training
samples, without labels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.stages import Hadamard, rotation_name
from fp4dse.dse.training import Training
from fp4dse.kernels import QuantConv2d, QuantLinear
from fp4dse.kernels.factors import has_factors, with_whole_weights
from fp4dse.kernels.ops.rotation import rotate, rotate_back, signs_of
from fp4dse.tasks.backward import outputs
from fp4dse.tasks.engine.evaluation import evaluate, evaluating
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.fitted.block_ap import block_ap
from fp4dse.tasks.fitted.grid import padded
from fp4dse.tasks.fitted.methods import METHODS, output_error
from fp4dse.tasks.job import Lane
from fp4dse.tasks.task import Task

REV = 1
"""Revision of what is computed here."""
BLOCKWISE = {"block-ap": block_ap}
"""Methods that train all of a block: name -> (population, batches of inputs, rate); weights move in place."""
ACCEPTED = (*METHODS, *BLOCKWISE)


class Fitted(NamedTuple):
    """weights: name -> tensor of one lane, on the CPU, as `make_weights` returns them. losses: held out, of the start
    in `bf16`, rounded to `nearest`, and `fitted`. errors: layer -> relative error of its outputs on the calibration
    data, rounded to nearest and fitted; empty where blocks are trained."""

    weights: dict[str, Tensor]
    losses: dict[str, float]
    errors: dict[str, tuple[float, float]]

    @property
    def recovered(self) -> float:
        """Share of what rounding to nearest loses that is given back; NaN where it loses nothing."""
        lost = self.losses["nearest"] - self.losses["bf16"]
        return (self.losses["nearest"] - self.losses["fitted"]) / lost if lost > 0 else math.nan


def fit_weights(
    task: Task,
    lane: Lane,
    method: str,
    samples: int,
    device: str = "cpu",
    report: Callable[[int, int], None] = lambda *_: None,
) -> Fitted:
    """Fit the weights that a lane starts from. lane: its recipe's forward quantizers, its seed, and for methods that
    train its rate. samples: of calibration, whole batches. ConfigError for a method, a recipe or a model that cannot be
    fitted. report: called with how many layers are done, and of how many."""
    if method not in ACCEPTED:
        raise ConfigError("--method", method, ", ".join(ACCEPTED))
    if task.rolls_out or task.one_by_one:
        raise ConfigError("task", task.name, "one whose models are those of lanes, with data to read")
    if task.pretrain is None and task.start is None:
        raise ConfigError("--from", None, f"trained weights (finetune has some of its own, {task.name} has none)")
    count = -(-samples // task.batch)
    if not 0 < count <= task.steps:
        accepted = f"1 to {task.steps * task.batch}, the samples of {task.name}:{task.preset}"
        raise ConfigError("--samples", samples, accepted)
    recipe = forward_alone(lane.recipe)
    population = Population(task, [msgspec.structs.replace(lane, recipe=recipe)], device)
    if has_factors(population.model):
        raise ConfigError("fprop.w.outliers", "factors", "others (weights in factors are not fitted)")
    losses = {"bf16": _loss(population, "bf16"), "nearest": _loss(population, "quantized")}
    batches = [population.batch_of(step)[0] for step in range(count)]
    errors: dict[str, tuple[float, float]] = {}
    if method in METHODS:
        layers = quantized_layers(population)
        for number, (name, layer) in enumerate(layers.items()):
            report(number, len(layers))
            errors[name] = fit_layer(population, layer, method, batches)
    else:
        BLOCKWISE[method](population, batches, lane.lr)
    losses["fitted"] = _loss(population, "quantized")
    state = with_whole_weights(population.model.state_dict())
    return Fitted({name: value[0].to("cpu", copy=True) for name, value in state.items()}, losses, errors)


def forward_alone(recipe: Recipe) -> Recipe:
    """The recipe's forward pass as in evaluation, with gradients in BF16 of the quantized operands."""
    bf16 = Recipe.named("bf16")
    sides = {side: msgspec.structs.replace(getattr(bf16, side), source="forward") for side in ("dgrad", "wgrad")}
    return msgspec.structs.replace(recipe, **sides, estimator=bf16.estimator, training=Training()).evaluated()


def quantized_layers(population: Population) -> dict[str, QuantLinear]:
    """Name -> layer whose weight is quantized, in the order of the model. ConfigError for convolutions, for a head
    that is tied to the embedding, and where there is none."""
    recipe, found = population.numerics.recipes[0], {}
    uses = Counter(id(p) for _, p in population.model.named_parameters(remove_duplicate=False))
    for name, layer in population.model.named_modules():
        if not isinstance(layer, QuantLinear) or recipe.at(layer.place).fprop.w.is_plain:
            continue
        if isinstance(layer, QuantConv2d):
            raise ConfigError("task", population.task.name, f"one without quantized convolutions ({name})")
        if uses[id(layer.weight)] > 1:
            raise ConfigError("precise.head", False, f"true ({name} has the embedding's weight, which is not rounded)")
        found[name] = layer
    if not found:
        raise ConfigError("--recipe", recipe.label(), "one that quantizes weights in the forward pass")
    return found


def fit_layer(population: Population, layer: QuantLinear, method: str, batches: Sequence[Any]) -> tuple[float, float]:
    """Fit a layer in place; returns the relative error of its outputs, rounded to nearest and fitted."""
    here = population.numerics.recipes[0].at(layer.place).fprop
    rotation = _Rotation(here.rotation, layer)
    if method == "mr-gptq" and here.rotation is None:
        accepted = (
            "for mr-gptq a rotation, whose signs are not drawn: hadamard32 or fixed32, say, in the recipe's fprop; "
        )
        raise ConfigError("fprop.rotation", "none", f"{accepted}--method gptq fits without one")
    with _moments(layer, rotation) as found:
        for inputs in batches:
            with torch.no_grad(), evaluating(population, "quantized"):
                outputs(population.model, inputs)
    if not found:
        raise ConfigError("task", population.task.name, "one without experts (a layer reads tokens that were sent)")
    w = padded(rotation.forth(layer.weight.detach()[0]), here.w)
    more = w.shape[1] - len(found[0])
    h = F.pad(found[0], (0, more, 0, more))
    plain, fitted = (METHODS[name](w, here.w, h) for name in ("nearest", method))
    whole = output_error(w, torch.zeros_like(w), h)
    outputs_, inputs_ = layer.weight.shape[1:]
    with torch.no_grad():
        layer.weight[0] = rotation.back(fitted[:outputs_, :inputs_].to(torch.float32))
    before, after = ((output_error(w, of, h) / whole).item() for of in (plain, fitted))
    return before, after


class _Rotation:
    """A rotation of a layer's contraction axis; none where `rotation` is None."""

    def __init__(self, rotation: Hadamard | None, layer: QuantLinear) -> None:
        self.rotation, inputs = rotation, layer.weight.shape[2]
        self.signs: Tensor | None = None
        if rotation is not None:
            if rotation.signs == "random" or inputs % rotation.size:
                accepted = f"one whose signs are not drawn, and whose size divides {inputs}"
                raise ConfigError("fprop.rotation", rotation_name(rotation), accepted)
            self.signs = signs_of(rotation, layer.weight.device, lambda: torch.empty(0))

    def forth(self, x: Tensor) -> Tensor:
        """x [·, K] rotated."""
        if self.rotation is None:
            return x
        return rotate(x[None], self.rotation.size, 2, self.signs, self.rotation.order)[0]

    def back(self, x: Tensor) -> Tensor:
        """The inverse."""
        if self.rotation is None:
            return x
        return rotate_back(x[None], self.rotation.size, 2, self.signs, self.rotation.order)[0]


@contextmanager
def _moments(layer: QuantLinear, rotation: _Rotation) -> Iterator[list[Tensor]]:
    """In the block, what a layer reads adds up to a list of one: Xᵀ X, float64 [K, K]."""
    found: list[Tensor] = []

    def add(_module: QuantLinear, args: tuple[Tensor]) -> None:
        x = rotation.forth(args[0].detach().to(torch.float32).reshape(-1, args[0].shape[-1])).to(torch.float64)
        found[:] = [x.T @ x + (found[0] if found else 0.0)]

    handle = layer.register_forward_pre_hook(add)
    try:
        yield found
    finally:
        handle.remove()


def _loss(population: Population, way: str) -> float:
    return float(evaluate(population, way)[0][0])  # type: ignore[arg-type]
