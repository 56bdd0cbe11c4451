"""Loss and gradients of a batch, with the recipe's loss scale and in as many parts as it asks for.

A batch in k parts is the same batch: its parts go through the model one after the other, each with random bits of its
own and a tensor scale of its own, and the gradients add up to the mean's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.autograd import contraction
from fp4dse.tasks.distance import mean_losses
from fp4dse.tasks.optimizers import LaneOptimizer
from fp4dse.tasks.own import one_by_one

if TYPE_CHECKING:
    from fp4dse.tasks.task import Task


def backward(
    task: Task,
    model: nn.Module,
    numerics: LaneNumerics,
    optimizer: LaneOptimizer,
    inputs: Any,
    targets: Any,
    around: AbstractContextManager[Any] | None = None,
    look: Callable[[Any, Any], None] | None = None,
) -> Tensor:
    """The task's mean loss [L], detached. The gradients are the optimizer's (`gradient`): those of loss scale · mean
    loss, of which a teacher's distance may be a part. around: entered for the first part's forward pass. look: called
    with the outputs and targets of each part, but for plain torch modules."""
    if isinstance(model, one_by_one.SequentialLanes):
        return one_by_one.backward(task, model, numerics, optimizer, inputs, targets)
    parts, losses = optimizer.accumulate, []
    if parts == 1:  # of several each sums the uses of a weight by itself, as autograd does, and then all are added up
        optimizer.gradients.open()
    for part in range(parts):
        x, y = (batch_part(data, part, parts) for data in (inputs, targets)) if parts > 1 else (inputs, targets)
        with numerics.temporarily(part=part):
            with around if around and not part else nullcontext():
                out = outputs(model, x, task.takes_bf16)
                loss, own = mean_losses(task, out, y)
            if look:
                look(out, y)
            del out
            scaled = loss if optimizer.loss_scale is None else loss * optimizer.loss_scale
            contraction([scaled], [torch.full_like(scaled, 1 / parts)]).backward()  # a power of two: exact
        losses.append(own.detach())
    return mean_of_parts(losses)


def mean_of_parts(values: Sequence[Tensor]) -> Tensor:
    """The mean of one or more tensors of the same shape, of a power of two of them exact but for the sum."""
    return values[0] if len(values) == 1 else sum(values[1:], values[0]) * (1 / len(values))


def outputs(model: nn.Module, inputs: Any, as_they_are: bool = False) -> Any:
    """Outputs of the model for a batch. BF16 outputs become FP32, in which losses are computed, unless they are taken
    as they are."""
    if as_they_are:
        return model(inputs)
    return map_tensors(lambda x: x.to(torch.float32) if x.dtype == torch.bfloat16 else x, model(inputs))


def batch_part(data: Any, part: int, parts: int) -> Any:
    """Part `part` of `parts` along the batch, the second axis of every tensor in data."""
    return map_tensors(lambda x: x.chunk(parts, dim=1)[part], data)


def map_tensors(function: Callable[[Tensor], Tensor], data: Any) -> Any:
    """Apply the function to every tensor in nested dicts, tuples and lists; other values stay as they are."""
    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, dict):
        return {key: map_tensors(function, value) for key, value in data.items()}
    if not isinstance(data, (list, tuple)):
        return data
    made = [map_tensors(function, value) for value in data]
    return type(data)(*made) if hasattr(data, "_fields") else type(data)(made)
