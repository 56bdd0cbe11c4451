"""Diffusion: models that predict the noise in images, by a UNet and by a transformer.

Data: the digits that scikit-learn ships, a path (tasks/data/images.py), or procedural images (tasks/data/shapes.py). In
one preset a teacher predicts the noise (teacher_student.py).
After training each lane draws samples: their Fréchet distance is the metric `fid` (lower is better; frechet.py), and 64
of them the picture `samples`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from fp4dse.kernels.ops.squared_error import mean_squared_error
from fp4dse.tasks.data.shapes import COLOURED, LARGE
from fp4dse.tasks.diffusion.dit import dit
from fp4dse.tasks.diffusion.frechet import frechet_distance, reference, sample_sheet
from fp4dse.tasks.diffusion.process import noised, sample
from fp4dse.tasks.diffusion.teacher_student import taught
from fp4dse.tasks.diffusion.unet import unet
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.image_preset import ImagePreset, Model, needed
from fp4dse.tasks.task import Finish, Problem, Task

REV = 4
SHOWN = 64


class Preset(ImagePreset, frozen=True):
    """samples: of each lane, in `sampler` steps of a deterministic sampler."""

    betas: tuple[float, float] = (0.9, 0.99)
    samples: int = 256
    sampler: int = 25


def _epochs(model: Model, batch: int, lr: float, sampler: int = 50, **numbers: Any) -> Preset:
    """20 epochs of CIFAR-10."""
    data = needed("the files of CIFAR-10")
    return Preset(
        model, batch, lr, epochs=20, images=50_000, data=data, samples=1024, sampler=sampler, drawn=COLOURED, **numbers
    )


FFHQ = "FFHQ at 128×128 as a folder of images"
ADAM = (0.9, 0.999)
SIZES = {
    "smoke": Preset(unet(8, (1, 2), 1, (), 16), 16, 8e-3, 40, samples=64, sampler=4),
    "small": Preset(unet(16, (1, 2), 1, (1,), 64), 64, 4e-3, 800),
    "cifar": _epochs(unet(64, (1, 2, 2), 1, (1,), 256), 128, 5e-4),
    "paper": _epochs(unet(128, (1, 2, 2), 2, (1,), 256), 512, 1e-3, sampler=100, decay=0.7, betas=ADAM),
    "ffhq-paper": Preset(
        unet(64, (1, 2, 4), 2, (1, 2), 256),
        20,
        1e-4,
        epochs=3,
        images=66_500,
        decay=0.0,
        betas=ADAM,
        data=needed(FFHQ),
        size=128,
        drawn=LARGE,
        eval_rows=64,
        samples=1024,
        sampler=100,
    ),
    "dit-smoke": Preset(dit(4, 32, 1, 2), 32, 5e-3, 60, samples=64, sampler=4),
    "dit-small": Preset(dit(2, 64, 3, 4), 64, 2e-3, 1200),
    "teacher": Preset(dit(4, 64, 1, 4), 64, 4e-3, 480, weight_decay=0.1, clip=1.0, samples=128, sampler=10),
    "dit-cifar": _epochs(dit(4, 256, 6, 4), 128, 5e-4),
}
"""`smoke`, `small`, `cifar` and 2509.17791's two, `paper` (CIFAR-10) and `ffhq-paper`, are UNets. What it does not
say of them (multiples, blocks a level) is DDPM's. The one-cycle schedule of `paper` is here its falling part."""

TAUGHT = {"teacher": 0.5}
"""Presets in which a teacher predicts the noise, and the noise of their start (teacher_student.py)."""


def _finish(size: Preset, model: nn.Module, _problem: Problem, draws: Draws, _val_loss: torch.Tensor) -> Finish:
    images = sample(model, draws, size.data().shape, size.samples, size.sampler).cpu()
    against = reference(size.data)
    distances = torch.tensor([frechet_distance(against, lane) for lane in images], dtype=torch.float64)
    return Finish({"fid": distances}, {"samples": [sample_sheet(lane[:SHOWN]) for lane in images]})


def on_data(preset: str, path: str) -> Task:
    """The preset on the images at `path`. ConfigError for data that cannot be read or that the model cannot take."""
    return _task(preset, SIZES[preset].on(path, f"diffusion:{preset}"))


def _task(preset: str, size: Preset) -> Task:
    task = size.task(
        name="diffusion",
        preset=preset,
        rev=REV,
        summary=f"noise in {size.source}, {size.model.name}",
        prepare=partial(noised, size.data),
        loss=mean_squared_error,
        takes_bf16=True,
        finish=partial(_finish, size),
        shown="fid",
        better="lower",
    )
    return taught(task, size.model, size.data, TAUGHT[preset]) if preset in TAUGHT else task


PRESETS = {name: _task(name, size) for name, size in SIZES.items()}
