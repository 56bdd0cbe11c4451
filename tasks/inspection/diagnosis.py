"""Measurements that say why a recipe loses: one lane is trained beside BF16, and at some steps looked at closely.

At such a step, for the weights and the batch of the lane:

    operands   of each layer and slot: what is clipped and flushed, the squared error that this makes, and that of the
               whole operand, all relative to Σx²
    backward   the error of the gradient that the backward quantizers make (gradient_error.py): g_i, of a pass with
               random bits of its own, against t_i, of the same forward pass with the backward stages of BF16, as in
               recorder.py
    forward    the error that the forward quantizers make: t_i against the gradient of BF16 in both passes

The n passes are lanes of one population with the same weights and batch, each with another seed of its random bits.
Where the forward pass rounds by chance, too, t_i has the same bits as g_i, so that the difference is the backward
pass's alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
from torch import Tensor

from fp4dse.dse import SHARED, ConfigError
from fp4dse.kernels.inspection.watch import SeenOperand, watching
from fp4dse.tasks.backward import backward
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.engine.run import Run
from fp4dse.tasks.facts import rate_of
from fp4dse.tasks.inspection.gradient_error import BLOCKS, GradientError, GradientErrors
from fp4dse.tasks.job import Lane, LaneResult
from fp4dse.tasks.task import Task

AT = (0.1, 0.5, 1.0)
"""Shares of the training at which a lane is looked at, if nobody says otherwise."""
PASSES = 64

Way = Literal["recipe", "forward", "bf16"]
"""The passes of a gradient: as the recipe says; forward as it says, BF16 backward; BF16 in both."""


class OperandLoss(msgspec.Struct, frozen=True):
    """Losses of an operand with a block scale. Shares of its elements, then sums of squares relative to Σx²; None for
    an operand of zeros.

    clipped, flushed              elements beyond the largest value of their block; those that became zero
    clipped_error, flushed_error  squared error of these elements
    mse                           Σ(x̂ − x)², of all
    gain                          Σx·x̂, which is 1 for a quantizer that shrinks nothing on average
    """

    layer: str
    slot: str
    clipped: float | None
    flushed: float | None
    clipped_error: float | None
    flushed_error: float | None
    mse: float | None
    gain: float | None


class PassError(msgspec.Struct, frozen=True):
    """Error of the gradient of all parameters, and name of each layer -> error of its weight's gradient."""

    whole: GradientError
    layers: dict[str, GradientError]


class Moment(msgspec.Struct, frozen=True):
    """A close look at a step, counted from one, before its update."""

    step: int
    operands: list[OperandLoss]
    backward: PassError
    forward: PassError


class Divergence(msgspec.Struct, frozen=True):
    """The step, counted from one, at which a loss or a gradient was not finite, and the first operand that was not;
    made: by its quantizer, of finite numbers. layer, slot: None if all operands of that step are finite."""

    step: int
    layer: str | None = None
    slot: str | None = None
    made: bool = False


class Diagnosis(msgspec.Struct, frozen=True):
    """A recipe and BF16 on a task: losses as in LaneResult, and what was seen of the recipe's lane.

    apart   the first step of the curve from which on the training loss is above BF16's, None if it is not at the end
    """

    recipe: str
    config_id: str
    task: str
    preset: str
    seed: int
    steps: int
    lr: float
    baseline_lr: float
    val_loss: float | None
    val_loss_bf16: float | None
    baseline_val_loss: float | None
    curve_step: list[int]
    curve_loss: list[float]
    baseline_curve_loss: list[float]
    apart: int | None
    diverged: Divergence | None
    moments: list[Moment]


def diagnose_lane(
    task: Task, lane: Lane, device: str = "cpu", at: Sequence[float] = AT, passes: int = PASSES
) -> Diagnosis:
    """Train the lane, and BF16 with the same seed, and look at the lane at shares `at` of its steps.

    passes: backward passes a look, a power of two and BLOCKS or more. Raises ConfigError for other numbers, and for a
    recipe that quantizes nothing.
    """
    if lane.recipe.is_plain:
        raise ConfigError("recipe", lane.recipe.label(), "one that quantizes")
    if passes < BLOCKS or passes & (passes - 1):
        raise ConfigError("passes", passes, f"a power of two, {BLOCKS} or more")
    if not at or not all(0 < share <= 1 for share in at):
        raise ConfigError("at", list(at), "shares of the training, above 0 and up to 1")
    base = lane.recipe.baseline()
    baseline_lr = rate_of(task, base)
    baseline, *_ = _train(task, Lane(base, baseline_lr, lane.seed), device, set(), passes)
    looks = {max(1, round(share * task.steps)) - 1 for share in at}
    result, moments, diverged = _train(task, lane, device, looks, passes)
    return Diagnosis(
        recipe=lane.recipe.label(),
        config_id=lane.recipe.config_id,
        task=task.name,
        preset=task.preset,
        seed=lane.seed,
        steps=task.steps,
        lr=lane.lr,
        baseline_lr=baseline_lr,
        val_loss=result.val_loss,
        val_loss_bf16=result.val_loss_bf16,
        baseline_val_loss=baseline.val_loss,
        curve_step=result.curve_step,
        curve_loss=result.curve_loss,
        baseline_curve_loss=baseline.curve_loss[: len(result.curve_loss)],
        apart=parted(result.curve_step, result.curve_loss, baseline.curve_loss),
        diverged=diverged,
        moments=moments,
    )


def parted(steps: Sequence[int], losses: Sequence[float], baseline: Sequence[float]) -> int | None:
    """The first of the steps from which on all losses are above the baseline's; None if the last is not."""
    first = None
    for step, loss, other in zip(steps, losses, baseline, strict=False):  # a curve ends where its lane diverged
        first = (first if first is not None else step) if loss > other else None
    return first


def _train(
    task: Task, lane: Lane, device: str, looks: set[int], passes: int
) -> tuple[LaneResult, list[Moment], Divergence | None]:
    """The result of the lane, the looks before the steps of these indices, and where it diverged."""
    run = Run(task, [lane], device)
    moments = []
    while not run.over:
        if run.progress.done in looks and bool(run.population.alive[0]):
            moments.append(look(run.population, run.progress.done, passes))
        run.advance()
    population = run.population
    [result] = run.results()
    at = result.diverged_step
    if at is None:
        return result, moments, None
    return result, moments, _where_diverged(population, at) if at < task.steps else Divergence(at)


def look(population: Population, step: int, passes: int) -> Moment:
    """A look at the first lane of a population, `step` steps of which are done."""
    sizes, weights = population.optimizer.sizes, _weights(population)
    groups = [range(len(sizes)), *weights.values()]
    errors = {name: GradientErrors(sizes, groups) for name in ("backward", "forward")}
    size = passes // BLOCKS
    copies = population.copies(0, range(size))
    for first in range(0, passes, size):
        copies.numerics.reseed(range(first, first + size))
        used, forward, plain = (gradients(copies, step, way) for way in ("recipe", "forward", "bf16"))
        errors["backward"].add(used, forward)
        errors["forward"].add(forward, plain)
    names = _layer_names(population)
    operands = _losses([seen for seen in _seen(population, step) if seen.scaled], names)
    found = {}
    for name, of in errors.items():
        whole, *layers = of.found()
        found[name] = PassError(whole, dict(zip(weights, layers, strict=True)))
    return Moment(step + 1, operands, **found)


def gradients(population: Population, step: int, way: Way) -> Tensor:
    """Gradients of all lanes, float64 [L, P], at a step; no state changes."""
    p, numerics = population, population.numerics
    batch = p.batch_of(step)
    batch = p.experience.in_bf16() if way == "bf16" and p.experience else batch
    precise = numerics.precise_stages | (set(SHARED) if way == "forward" else set())
    evaluation = "bf16" if way == "bf16" else ""
    with numerics.temporarily(training=False, precise_stages=precise, evaluation=evaluation):
        backward(p.task, p.model, numerics, p.optimizer, *batch)
    return p.optimizer.gradient().double()


def _seen(population: Population, step: int) -> list[SeenOperand]:
    """The operands of the step that the first lane is about to take, in the order in which they are quantized."""
    alone = population.copies(0, [population.lanes[0].seed])
    with alone.numerics.temporarily(counting=True), watching(alone.numerics) as seen:
        gradients(alone, step, "recipe")
    return seen


def _losses(seen: Sequence[SeenOperand], names: dict[int, str]) -> list[OperandLoss]:
    """A line for each layer and slot; what a slot quantized in several parts of the batch is added up."""
    parts: dict[tuple[int, str], list[SeenOperand]] = {}
    for one in seen:
        parts.setdefault((one.layer, one.slot), []).append(one)
    out = []
    for (layer, slot), of in parts.items():
        energy = sum(one.energy for one in of)
        counts = {key: sum(one.counts[key] for one in of) for key in of[0].counts}
        sums = {
            "clipped_error": counts["clipped_error"],
            "flushed_error": counts["flushed_error"],
            "mse": sum(one.error for one in of),
            "gain": sum(one.gain for one in of),
        }
        shares = {name: counts[name] / counts["elements"] for name in ("clipped", "flushed")}
        relative = {name: value / energy if energy else None for name, value in sums.items()}
        out.append(OperandLoss(names[layer], slot, **shares, **relative))
    return out


def _where_diverged(population: Population, at: int) -> Divergence:
    """The first operand that is not finite in the step at which the lane diverged: its weights are those before it."""
    for one in _seen(population, at):
        before, after = one.finite
        if not (before and after):
            return Divergence(at + 1, _layer_names(population)[one.layer], one.slot, before)
    return Divergence(at + 1)


def _weights(population: Population) -> dict[str, list[int]]:
    """Name of each layer -> the index of its weight among the model's parameters."""
    numbers = {name: i for i, (name, _) in enumerate(population.model.named_parameters())}
    layers = {name: module for name, module in population.model.named_modules() if hasattr(module, "place")}
    return {
        module.place.name or name: [numbers[f"{name}.weight"]]
        for name, module in layers.items()
        if f"{name}.weight" in numbers
    }


def _layer_names(population: Population) -> dict[int, str]:
    """Number of each layer -> its name."""
    modules = population.model.named_modules()
    paths = {module.layer: name for name, module in modules if hasattr(module, "place") and hasattr(module, "layer")}
    places = population.numerics.places
    return {number: place.name or paths.get(number, str(number)) for number, place in places.items()}
