"""A score of layers that takes no FP4 training: squared gradients of a BF16 model times squared quantization errors.

    score of a layer = Σ (∂loss/∂x)² (Q(x) - x)² + Σ (∂loss/∂w)² (Q(w) - w)²

over the operands of its forward product, at the end of a BF16 training, mean over batches and seeds. It is what
ModelOpt's AutoQuantize ranks layers by, with the diagonal of the Fisher information in place of the second derivative,
here with errors of the operands where ModelOpt has those of the layer's output. It stands for the loss that quantizing
a trained model adds, so it knows nothing of the backward products and of what training makes of the errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp4dse.dse import ConfigError, Recipe
from fp4dse.dse.layers.place import Place
from fp4dse.kernels import LaneNumerics, lane_mean
from fp4dse.kernels.lanes import Forward
from fp4dse.tasks.backward import outputs
from fp4dse.tasks.catalogue import get_task
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.job import Lane
from fp4dse.tasks.task import Task

BATCHES = 8
"""Of held-out data, that gradients are taken on."""
PLAIN = Recipe.named("bf16")


class Scoring(LaneNumerics):
    """BF16 lanes that sum up squared gradient times squared error of what a recipe would make of the operands.

    scores: layer -> float64 [L], of the backward passes so far.
    """

    groups_experts = False

    def __init__(self, recipe: Recipe, lanes: int, **more: Any) -> None:
        super().__init__([PLAIN] * lanes, list(range(lanes)), **more)
        self.judged = recipe
        self.scores: dict[int, Tensor] = {}
        self._as_judged: dict[Recipe, LaneNumerics] = {}
        self._errors: dict[tuple[str, int], Tensor] = {}

    def forward(self, layer: int, x: Tensor, w: Tensor, *more: Any, **others: Any) -> Forward:
        here = self.judged.at(self.places[layer])
        if any(not here.slot(f"fprop.{operand}").is_plain for operand in "xw"):
            if here not in self._as_judged:
                seeds, device = self.seeds.tolist(), self.seeds.device
                self._as_judged[here] = LaneNumerics([here] * self.lanes, seeds, device, dtype=self.dtype)
            stage, use = self._as_judged[here].stage("fprop", layer), self.use(layer)
            rotation = stage.draw_rotation(use)
            for product, operand, of in (("dgrad", "x", x), ("wgrad", "w", w)):
                taken = stage.operand(operand, of, use, rotation).restored(rotation, of.shape[2])
                self._errors[product, layer] = taken - of.to(torch.float32)
        return super().forward(layer, x, w, *more, **others)

    def common_dtype(self, _operand: str, _layer: int, dtype: torch.dtype) -> torch.dtype:
        """The dtype itself: errors are those of operands before any rounding."""
        return dtype

    def gemm(self, stage: str, layer: int, *operands: Any, **more: Any) -> Tensor:
        gradient = super().gemm(stage, layer, *operands, **more)
        error = self._errors.pop((stage, layer), None)
        if error is not None:
            score = (gradient.double() * error.double()).square().sum(dim=(1, 2))
            self.scores[layer] = self.scores.get(layer, torch.zeros_like(score)) + score
        return gradient


def fisher_scores(
    recipe: Recipe, asked: Sequence[str], lr: float, seeds: Sequence[int], device: str = "cpu"
) -> dict[Place, float]:
    """The score of each layer of a task's model, 0 of those that the recipe leaves alone: one BF16 lane a seed is
    trained in this process, at this learning rate. ConfigError for a task of plain modules."""
    task = get_task(*asked)
    if task.one_by_one:
        raise ConfigError("--fisher", ":".join(asked), "a task whose lanes train in lock-step")
    population = Population(task, [Lane(PLAIN.canonical(), lr, seed) for seed in seeds], device)
    for step in range(task.steps):
        population.train_step(step)
    numerics = Scoring(recipe, len(seeds), device=device, dtype=getattr(torch, task.dtype))
    model = task.model(_parameters(population), numerics)
    model.load_state_dict(population.model.state_dict())
    for batch in range(BATCHES):
        _score(task, population, numerics, model, batch)
    found: dict[Place, float] = {}
    for layer, place in numerics.places.items():
        score = numerics.scores.get(layer)
        found[place] = found.get(place, 0.0) + (0.0 if score is None else float(score.mean()) / BATCHES)
    return found


def _parameters(population: Population) -> dict[str, Tensor]:
    """Tensors of the shapes that the model is built of."""
    lanes = len(population.lanes)
    return {
        name: torch.zeros(lanes, *shape, dtype=dtype, device=population.device)
        for name, (shape, dtype) in population.shapes.items()
    }


def _score(task: Task, population: Population, numerics: Scoring, model: torch.nn.Module, batch: int) -> None:
    """Add the score of a batch of held-out samples."""
    rows, n = min(task.eval_rows, task.batch), population.problem.val_x.shape[1]
    at = torch.arange(batch * rows, (batch + 1) * rows, device=population.device) % n
    x, y = (of[population.data_index][:, at] for of in (population.problem.val_x, population.problem.val_y))
    numerics.step.fill_(task.steps + batch)
    population.numerics.step.fill_(task.steps + batch)  # what a task draws is keyed by it
    inputs, targets = population.prepared(x, y)
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        inputs = inputs.detach().requires_grad_()  # or the first layer's input would have no gradient
    model.zero_grad()
    lane_mean(task.loss(outputs(model, inputs, task.takes_bf16), targets)).sum().backward()
