"""Images whose classes a teacher gives: a model of the student's own shape, with weights that were drawn once.

For images x the teacher has logits t(x) of mean zero and standard deviation SCALE over the held-out ones. A student
starts at the teacher's weights plus noise · weights drawn by its seed, learns the teacher's probabilities, and its
loss is KL(softmax t(x), softmax s(x)), in nats. The teacher computes as a student in BF16 does, its head in FP32, so
that who has its weights has a loss of some 1e-5.

Why: where a model learns classes from nothing, a recipe's gap is small beside the chance by which two trainings of a
seed end apart, and beside that of the held-out images. Here every image says something about every logit, and BF16
comes so near to the teacher that what FP4 cannot follow is a large share of the loss. The regression is made in the
same way (tasks/regression.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from fp4dse.tasks.data.images import Images
from fp4dse.tasks.distance import distance
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.image_preset import Model
from fp4dse.tasks.losses import correct
from fp4dse.tasks.task import Problem, Task

SCALE = 2.0
SEED = (1 << 31) - 1
"""Of the teacher, and of no lane."""
AT_ONCE = 2048
"""Images that pass through the teacher together."""

Prepare = Callable[[Tensor, Tensor, Draws], tuple[Any, Any]]
"""Pixels and labels of a batch, as in Task."""


def divergence(out: Tensor, logits: Tensor) -> Tensor:
    """KL(softmax of `logits`, softmax of `out`) in nats, [L, B]; both [L, B, classes]."""
    return distance(logits, out, torch.ones(logits.shape[:2], device=logits.device))


def agrees(out: Tensor, logits: Tensor) -> Tensor:
    """1 where the largest of both is at the same class, else 0; shapes as for `divergence`."""
    return correct(out, logits.argmax(-1))


def taught(task: Task, model: Model, data: Callable[[], Images], noise: float) -> Task:
    """A task on images as one in which a teacher gives the classes. noise: of the students' start."""
    words = f"teacher {model.name} {SCALE} {noise} on "
    prepare = task.prepare
    assert prepare is not None
    return msgspec.structs.replace(
        task,
        summary=f"{task.summary}, which learns what another one of its shape says",
        problem=partial(teacher_student, model, data, prepare, noise),
        loss=divergence,
        metrics={"accuracy": agrees},
        digest_of=lambda: hashlib.sha256((words + task.digest_of()).encode()).hexdigest()[:16],
    )


def teacher_student(
    model: Model, data: Callable[[], Images], prepare: Prepare, noise: float, seeds: Sequence[int]
) -> Problem:
    """Images and the teacher's logits for them, shared by all seeds; the start of each seed."""
    images = data()
    model.check(images)
    weights, train, held_out = _teacher(model, data, prepare)
    drawn = model.init(images, seeds)
    start = {name: weights[name] + noise * value for name, value in drawn.items()}
    return Problem(images.train[None], train[None], images.held_out[None], held_out[None], start)


@cache
def _teacher(model: Model, data: Callable[[], Images], prepare: Prepare) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Weights [1, …] of the teacher; its logits [n, classes] for the images to train on and those held out.

    Its head is drawn as any, less what it says of the mean of the features h, so that without a bias the mean of the
    logits is zero: W - (W m) mᵀ/|m|², m the mean of h; and then times what gives the logits their deviation.
    """
    images = data()
    weights = model.init(images, [SEED])
    head = weights["head.w"][0]
    sees = weights | {"head.w": torch.eye(head.shape[1])[None], "head.b": torch.zeros(1, head.shape[1])}
    held_out, train = (_outputs(model, sees, prepare, x) for x in (images.held_out, images.train))  # features
    mean = held_out.mean(0)
    head = head - torch.outer(head @ mean, mean) / mean.square().sum()
    head = head * (SCALE / (held_out @ head.T).std())
    return weights | {"head.w": head[None]}, train @ head.T, held_out @ head.T


@torch.no_grad()
def _outputs(model: Model, weights: dict[str, Tensor], prepare: Prepare, pixels: Tensor) -> Tensor:
    """Of one lane in BF16 for pixels [n, H, W, C]: [n, outputs]."""
    one = model.in_bf16(weights)
    none = torch.zeros(1, dtype=torch.int64)
    draws = Draws(none, none[0])
    return torch.cat([one(prepare(part[None], none, draws)[0])[0] for part in pixels.split(AT_ONCE)])
