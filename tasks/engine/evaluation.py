"""Evaluation of a population: held-out losses and metrics, and the results of each lane that leaves it.

Held-out data go through a model in two ways, both without chance:

    quantized  as an inference engine would compute it: the recipe's forward pass, with rounding to nearest where
               training rounds by chance (`Recipe.evaluated`). Random signs of a forward rotation stay: a seed's are
               always the same
    bf16       with BF16 in place of every quantizer: the model that training has found, without what FP4 does to it
               when it is used

Where weights have factors beside them (kernels/factors.py), they go through once more, quantized, with weights that the
factors have been added to.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import Tensor

from fp4dse.dse import STAGES
from fp4dse.kernels import lane_mean
from fp4dse.kernels.factors import has_factors, merged
from fp4dse.kernels.lanes import Evaluation
from fp4dse.tasks.backward import outputs
from fp4dse.tasks.device_memory import total_memory
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.job import LaneResult, number
from fp4dse.tasks.task import Finish


def evaluating(population: Population, way: Evaluation = "quantized") -> AbstractContextManager[None]:
    """In a `with` block the model computes as in evaluation, and no state changes."""
    return population.numerics.temporarily(training=False, evaluation=way)


@torch.no_grad()
def evaluate(population: Population, way: Evaluation = "quantized") -> tuple[Tensor, dict[str, Tensor]]:
    """Mean loss and metrics on the held-out data, [L] each. State from step to step (held maxima, averages) is used and
    does not change."""
    p, task = population, population.task
    losses: list[Tensor] = []
    metrics: dict[str, list[Tensor]] = {}
    p.make_room()
    with evaluating(p, way):
        for start in range(0, p.problem.val_x.shape[1], task.eval_rows):
            loss, found = _pass(p, start)
            losses.append(loss)
            for name, value in found.items():
                metrics.setdefault(name, []).append(value)
    return _sum(losses), {name: _sum(parts) for name, parts in metrics.items()}


def _pass(p: Population, start: int) -> tuple[Tensor, dict[str, Tensor]]:
    """One pass over the held-out samples from `start` on: its share in the mean loss and metrics, [L] each."""
    task, n = p.task, p.problem.val_x.shape[1]
    p.numerics.step.fill_(task.steps + start)  # fresh random bits for every pass
    x = p.problem.val_x[p.data_index, start : start + task.eval_rows]
    y = p.problem.val_y[p.data_index, start : start + task.eval_rows]
    weight = x.shape[1] / n
    if p.experience:
        loss, found = p.experience.examine(x, y)
    else:
        inputs, targets = p.prepared(x, y)
        out = outputs(p.model, inputs, task.takes_bf16)
        loss, found = task.loss(out, targets), {name: metric(out, targets) for name, metric in task.metrics.items()}
    return lane_mean(loss) * weight, {name: lane_mean(metric) * weight for name, metric in found.items()}


@torch.no_grad()
def rehearse(population: Population) -> None:
    """Run one pass of the evaluation early if it might not fit into memory beside the training: running out of memory
    then costs a few steps and not the whole training. Nothing that later steps depend on changes."""
    if is_tight(population):
        population.make_room()
        with evaluating(population):
            _pass(population, 0)


def is_tight(population: Population) -> bool:
    """True if a pass might not fit into a GPU's memory, assuming it takes as much for a sample as training does."""
    p = population
    if p.graphs is None:
        return False
    rows = p.task.eval_rows * p.optimizer.accumulate / p.task.batch
    return torch.cuda.max_memory_reserved(p.device) * (1 + rows) > total_memory(p.device)


@torch.no_grad()
def finish(population: Population, val_loss: Tensor) -> Finish:
    """Run the task's `finish` on the trained models."""
    p, task = population, population.task
    if task.finish is None:
        return Finish()
    p.numerics.step.fill_(task.steps)
    with evaluating(p):
        return task.finish(p.model, p.problem, p.draws, val_loss)


def is_bf16_forward(population: Population) -> bool:
    """True if both evaluations are one, to the bit: no forward product of any lane is quantized."""
    rollouts = [recipe.training.rollout for recipe in population.numerics.recipes]
    if population.task.rolls_out and not all(of is None or of.kv_cache.is_plain for of in rollouts):
        return False
    if any(recipe.training.inject for recipe in population.numerics.recipes):
        return False
    recipes = [recipe.sampling() if population.task.rolls_out else recipe for recipe in population.numerics.recipes]
    plain = all(recipe.slot(f"fprop.{x}").element == "bf16" for recipe in recipes for x in STAGES["fprop"])
    plain = plain and not any(recipe.layers or recipe.attention.layout for recipe in recipes)
    return plain and all(recipe.gemm == "exact" for recipe in recipes)


def final_results(population: Population) -> list[LaneResult]:
    """Results of all lanes after the last step."""
    p, steps = population, population.task.steps
    p.fetch(steps)
    val_loss, metrics = evaluate(p)
    in_bf16 = val_loss if is_bf16_forward(p) else evaluate(p, "bf16")[0]
    of_merged = _loss_merged(p) if has_factors(p.model) else None
    finished = finish(p, val_loss)
    metrics |= finished.metrics
    p.diverged.copy_(torch.where((p.diverged < 0) & ~torch.isfinite(val_loss), steps, p.diverged))
    out = []
    for position, at in enumerate(p.diverged.tolist()):
        if at >= 0:
            out.append(diverged_result(p, position, at))
            continue
        result = pruned_result(p, position, steps, val_loss, metrics)
        result.status, result.pruned_step = "done", None
        result.val_loss_bf16 = number(in_bf16[position].item())
        result.val_loss_merged = None if of_merged is None else number(of_merged[position].item())
        result.train_loss_final = p.record.last[position].item() / p.record.tail
        result.pictures = {name: of[position] for name, of in finished.pictures.items()}
        out.append(result)
    return out


def _loss_merged(population: Population) -> Tensor:
    with merged(population.model, population.numerics):
        return evaluate(population)[0]


def pruned_result(
    population: Population, position: int, done: int, val_loss: Tensor, metrics: dict[str, Tensor]
) -> LaneResult:
    """Result of a lane that is dropped after `done` steps, with its held-out loss [L] and metrics [L] there."""
    result = _result("pruned", population, position, done)
    result.pruned_step, result.val_loss = done, number(val_loss[position].item())
    result.metrics = {name: number(of[position].item()) for name, of in metrics.items()}
    return result


def diverged_result(population: Population, position: int, step: int) -> LaneResult:
    """Result of a lane whose loss or gradient became NaN or Inf at a step."""
    result = _result("diverged", population, position, step)
    result.diverged_step = step
    return result


def _result(status: Literal["pruned", "diverged"], population: Population, position: int, steps: int) -> LaneResult:
    """Result of a lane with what was recorded of its first `steps` steps."""
    record, recorder = population.record, population.recorder
    curve = [(point + 1, loss) for point, loss in zip(record.points, record.curve[position].tolist(), strict=True)]
    shown = [(step, loss) for step, loss in curve if step <= steps]
    return LaneResult(
        status,
        diverged_step=None,
        train_loss_final=None,
        val_loss=None,
        metrics={},
        train_loss_min=number(record.least[position].item()),
        curve_step=[step for step, _ in shown],
        curve_loss=[loss for _, loss in shown],
        recorded=recorder.of_lane(position, steps) if recorder else {},
    )


def _sum(parts: list[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])
