"""Loss and gradients of a batch, with the recipe's loss scale and in as many parts as it asks for.

A batch in k parts is the same batch: its parts go through the model one after the other, each with random bits of its
own and a tensor scale of its own, and the gradients add up to the mean's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics, lane_mean
from fp4dse.tasks.optimizers import LaneOptimizer

if TYPE_CHECKING:
    from fp4dse.tasks.task import Task


def backward(
    task: Task, model: nn.Module, numerics: LaneNumerics, optimizer: LaneOptimizer, inputs: Any, targets: Any
) -> Tensor:
    """Mean loss [L], detached. The gradients are in the model's parameters: those of loss scale · mean loss."""
    parts, losses = optimizer.accumulate, []
    for part in range(parts):
        numerics.part = part
        x, y = (piece(data, part, parts) for data in (inputs, targets)) if parts > 1 else (inputs, targets)
        loss = lane_mean(task.loss(model(x), y))
        scaled = loss if optimizer.loss_scale is None else loss * optimizer.loss_scale
        (scaled * (1 / parts)).sum().backward()  # a power of two: exact
        losses.append(loss.detach())
    numerics.part = 0
    return sum(losses[1:], losses[0]) * (1 / parts)


def piece(data: Any, part: int, parts: int) -> Any:
    """Part `part` of `parts` along the batch, the second axis of every tensor in data."""
    if isinstance(data, Tensor):
        return data.chunk(parts, dim=1)[part]
    if isinstance(data, dict):
        return {key: piece(value, part, parts) for key, value in data.items()}
    pieces = [piece(value, part, parts) for value in data]
    return type(data)(*pieces) if hasattr(data, "_fields") else type(data)(pieces)
