"""Noise as a teacher predicts it: a transformer of the student's own shape, drawn once, whose head was fitted.

The teacher's weights are drawn as any, but those of the head: these are the least squares of its features against the
noise ε in the images, so that it is the best denoiser with that body. A student starts at the teacher's weights plus
noise · weights drawn by its seed, and learns what the teacher predicts, ε*(x_t, t); its loss is (ε̂ - ε*)², which is
zero for who has the teacher's weights. Each x_t is met once, and so is each that is held out; all seeds share them.

Why: in the ordinary loss most is noise that nothing can predict, beside which the gap of a recipe is small, and a model
that learns from nothing ends as far apart on two seeds as recipes do. The teacher has no training whose bits a machine
could change. Vision has the like of it (tasks/vision/teacher_student.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from fp4dse.tasks.data.images import Images
from fp4dse.tasks.diffusion.dit import DiT
from fp4dse.tasks.diffusion.process import noised
from fp4dse.tasks.draws import Draws, seed_keys
from fp4dse.tasks.image_preset import Model
from fp4dse.tasks.nn import patches
from fp4dse.tasks.task import Problem, Task

SEED = (1 << 31) - 1
"""Of the teacher and of the noise in its images, and of no lane."""
TRAIN, HELD_OUT = 0, 1
"""Splits, whose times and noise come of different random numbers."""
HELD = 4096
"""Noisy images that are held out."""
RIDGE = 1e-3
"""Of the mean square of a feature, added to each one's square: without it a direction in which features hardly vary
would have large weights, and these the rounding errors of the machine."""
AT_ONCE = 2048
"""Images that pass through the teacher together."""


class Noisy(NamedTuple):
    """n noisy images of a split: x_t [n, H, W, C], times int64 [n], and the noise in them [n, H, W, C]."""

    x: Tensor
    times: Tensor
    noise: Tensor


def taught(task: Task, model: Model, data: Callable[[], Images], noise: float) -> Task:
    """A task of diffusion as one in which a teacher predicts the noise. model: a DiT; noise: of the students' start."""
    count = task.steps * task.batch
    words = f"teacher {model.name} {noise} of {count} and {HELD} on "
    return msgspec.structs.replace(
        task,
        summary=f"{task.summary}, as another one of its shape predicts it",
        problem=partial(teacher_student, model, data, count, noise),
        prepare=taken_apart,
        digest_of=lambda: hashlib.sha256((words + task.digest_of()).encode()).hexdigest()[:16],
    )


def taken_apart(x: Tensor, y: Tensor, _draws: Draws) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """x [L, B, H·W·C + 1], pixels and their time; y [L, B, H, W, C], the prediction -> ((x_t, t), the prediction)."""
    return (x[..., :-1].reshape(y.shape), x[..., -1].to(torch.int64)), y


def teacher_student(
    model: Model, data: Callable[[], Images], count: int, noise: float, seeds: Sequence[int]
) -> Problem:
    """`count` noisy images and the teacher's predictions for them, shared by all seeds; the start of each seed."""
    images = data()
    model.check(images)
    weights, (train, predicted), (held_out, wanted) = _teacher(model, data, count)
    drawn = model.init(images, seeds)  # biases are not: they begin at the teacher's
    start = {name: weights[name] + (0.0 if name.endswith(".b") else noise) * value for name, value in drawn.items()}
    return Problem(train[None], predicted[None], held_out[None], wanted[None], start)


def noisy(data: Callable[[], Images], split: int, count: int) -> Noisy:
    """Noisy image number i is of image i of the split, from the first one on again where there are fewer."""
    images = data().held_out if split else data().train
    chosen = images[torch.arange(count) % len(images)]
    (x, times), noise = noised(data, chosen[None], chosen, Draws(seed_keys([SEED]), torch.tensor(split)))
    return Noisy(x[0], times[0], noise[0])


@cache
def _teacher(
    model: Model, data: Callable[[], Images], count: int
) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Weights [1, …] of the teacher; x and y, as of `taken_apart`, to train on and held out."""
    weights = model.init(data(), [SEED])
    train, held_out = noisy(data, TRAIN, count), noisy(data, HELD_OUT, HELD)
    weights |= fitted_head(model, weights, train)
    sets = [(_joined(part), predict(model, weights, part.x, part.times)) for part in (train, held_out)]
    return weights, sets[0], sets[1]


def _joined(part: Noisy) -> Tensor:
    return torch.cat([part.x.flatten(1), part.times[:, None].to(torch.float32)], 1)


@torch.no_grad()
def fitted_head(model: Model, weights: dict[str, Tensor], train: Noisy) -> dict[str, Tensor]:
    """Weight and bias of the head, [1, …], that predict the noise of `train` with the least squared error, in float64,
    but for RIDGE."""
    one = _alone(model, weights)
    squares, products = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    for x, times, noise in zip(*(part.split(AT_ONCE) for part in train), strict=True):
        features = one.features((x[None], times[None])).flatten(0, 2).double()  # [B·T, D]
        features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
        squares = squares + features.T @ features
        products = products + features.T @ patches(noise[None], one.patch).flatten(0, 2).double()
    ridge = RIDGE * squares.diagonal().mean() * torch.eye(len(squares), dtype=torch.float64)
    found = torch.linalg.solve(squares + ridge, products).float()
    return {"head.w": found[:-1].T.contiguous()[None], "head.b": found[-1:]}


@torch.no_grad()
def predict(model: Model, weights: dict[str, Tensor], x: Tensor, times: Tensor) -> Tensor:
    """The noise that one lane in BF16 sees in x_t [n, H, W, C] at times int64 [n]."""
    one = _alone(model, weights)
    parts = zip(x.split(AT_ONCE), times.split(AT_ONCE), strict=True)
    return torch.cat([one((of_x[None], of_times[None]))[0] for of_x, of_times in parts])


def _alone(model: Model, weights: dict[str, Tensor]) -> DiT:
    one = model.in_bf16(weights)
    assert isinstance(one, DiT)
    return one
