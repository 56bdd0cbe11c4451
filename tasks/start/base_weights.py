"""Weights that a task starts from, trained in BF16 by another: once for each seed and kind of device, in the engine,
and remembered in the user's cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial

import msgspec
import torch
from torch import Tensor

from fp4dse.dse import Recipe
from fp4dse.dse.program.cache import cache_folder, keep
from fp4dse.tasks.engine import checkpoint
from fp4dse.tasks.engine.population import Population
from fp4dse.tasks.job import Lane
from fp4dse.tasks.task import Task


def base_weights(task: Task, lr: float, seeds: Sequence[int], device: str) -> dict[str, Tensor]:
    """Weights that a task of a decoder ends with, parameter name -> float32 [S, …] on the CPU, from the cache
    where they are there."""
    lanes = [Lane(Recipe.named("bf16"), lr, seed) for seed in seeds]
    files = [cache_folder() / f"base-{_digest(task, lane, device)}.pt" for lane in lanes]
    missing = [lane for lane, file in zip(lanes, files, strict=True) if not file.exists()]
    made = _train(task, missing, device) if missing else {}
    found = []
    for lane, file in zip(lanes, files, strict=True):
        if lane in missing:
            weights = {name: value[missing.index(lane)].clone() for name, value in made.items()}
            keep(file, partial(torch.save, weights))
        else:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        found.append(weights)
    return {name: torch.stack([weights[name] for weights in found]) for name in found[0]}


def _train(task: Task, lanes: Sequence[Lane], device: str) -> dict[str, Tensor]:
    population = Population(task, lanes, device)
    for step in range(task.steps):
        population.train_step(step)
    return {_short(name): value.detach().cpu() for name, value in population.model.named_parameters()}


def _short(name: str) -> str:
    """The name in `Shape.parameters` of a parameter of the model: `block0.up` for `blocks.0.mlp.up.weight`, and
    `block0.expert3.up` for `blocks.0.experts.mlps.3.up.weight`."""
    name = name.removesuffix(".weight").replace("blocks.", "block").replace("mlp.", "")
    return name.replace("experts.mlps.", "expert").replace("experts.", "")


def _digest(task: Task, lane: Lane, device: str) -> str:
    """Of all that the weights of a lane depend on."""
    identity = checkpoint.identity(task, [lane], device, [], False)
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()[:24]
