"""The bytes that a block of a decoder keeps for the backward pass, by saved-tensor hooks.

A block's are the difference between a decoder and one with a block more, so that embedding, head and loss are not in
them. A tensor that several operations keep counts once, and parameters do not count. What counts is a forward pass, as
it stands when the backward pass begins.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from fp4dse.dse import Recipe
from fp4dse.kernels import LaneNumerics
from fp4dse.tasks import get_task
from fp4dse.tasks.language.decoder import Decoder, Shape
from fp4dse.tasks.task import Task

LANES = 2
"""A CPU computes a product of one lane twice, and keeps both results."""


class Kept(NamedTuple):
    """Bytes a token: of a block, and of all that is not in a block."""

    block: float
    rest: float


def kept_for_backward(preset: str, recipe: Recipe, batch: int = 2) -> Kept:
    """Of a preset of language, `+bf16` and the like included, trained by this recipe with so many windows a batch."""
    task = get_task("language", preset)
    assert isinstance(task.model, partial)
    [shape] = task.model.args
    tokens = LANES * batch * shape.context
    one, two = (_kept(task, replace(shape, depth=depth), recipe, batch) / tokens for depth in (1, 2))
    return Kept(two - one, one - (two - one))


def _kept(task: Task, shape: Shape, recipe: Recipe, batch: int) -> int:
    """Bytes that a forward pass of the lanes keeps."""
    vocabulary, seeds = 256, range(LANES)
    parameters = shape.initial(vocabulary, seeds)
    numerics = LaneNumerics([recipe] * LANES, seeds, dtype=getattr(torch, task.dtype))
    numerics.recompute = task.recompute
    model = Decoder(shape, parameters, numerics)
    tokens = torch.arange(batch * shape.context).view(1, batch, -1).expand(LANES, -1, -1) % vocabulary
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        task.loss(model(tokens), tokens)
    return sum(storage.nbytes() for storage in kept.values())
