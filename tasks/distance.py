"""The loss of a batch, and how far outputs are from a teacher's: QAD (LLM-QAT, 2305.17888; 2601.20088)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.kernels import lane_mean, lane_sum

if TYPE_CHECKING:
    from fp4dse.tasks.task import Task


class Taught(NamedTuple):
    """Targets of a batch, with a teacher's logits [L, B, …, classes] for it; weight and temperature of its distance,
    [L, B] each, the weight zero in lanes that learn from none."""

    targets: Any
    logits: Tensor
    weight: Tensor
    temperature: Tensor


def mean_losses(task: Task, out: Any, targets: Any) -> tuple[Tensor, Tensor]:
    """Mean loss that each lane descends, [L], and the task's own, by which lanes are compared; of outputs and
    targets."""
    if not isinstance(targets, Taught):
        loss = lane_mean(task.loss(out, targets))
        return loss, loss
    assert task.logits is not None
    away = lane_mean(distance(targets.logits, task.logits(out), targets.temperature))
    own, weight = lane_mean(task.loss(out, targets.targets)), targets.weight[:, 0]
    return (1 - weight) * own + weight * away, own


def distance(teacher: Tensor, student: Tensor, temperature: Tensor) -> Tensor:
    """temperature² · KL(teacher, student) in nats, [L, B, …], of logits [L, B, …, classes], temperature [L, B]."""
    each = temperature.view(*temperature.shape, *[1] * (teacher.dim() - 2))
    log_p, log_q = (F.log_softmax(logits / each, dim=-1) for logits in (teacher, student))
    return lane_sum(torch.exp(log_p) * (log_p - log_q), -1) * (each * each)[..., 0]
