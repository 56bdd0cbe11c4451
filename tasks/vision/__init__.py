"""Vision: images and their classes, for three kinds of models.

Data: the 1,797 real 8×8 digits that scikit-learn ships, a fixed fifth held out, a path (tasks/data/images.py), or
procedural images (tasks/data/shapes.py), whose classes a teacher gives in one preset (teacher_student.py). Pixels are
centred and divided by their standard deviation, per channel, as a batch is prepared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from fp4dse.tasks.data.images import Images
from fp4dse.tasks.data.shapes import COLOURED, GREY, HIDDEN, LARGE, MANY, NAME, Shapes
from fp4dse.tasks.draws import Draws
from fp4dse.tasks.image_preset import ImagePreset, Model, needed
from fp4dse.tasks.losses import correct, cross_entropy
from fp4dse.tasks.task import Task
from fp4dse.tasks.vision.cnn import cnn
from fp4dse.tasks.vision.resnet import resnet
from fp4dse.tasks.vision.teacher_student import taught
from fp4dse.tasks.vision.vit import vit

REV = 5
REV_OF = {"quickstart": 6, "cnn-small": 6, "cnn-medium": 6}
"""Of presets that changed where others did not, so that their rows are compared with none of before: they had no weight
decay and no clip."""


def _paper(model: Model, images: int, data: str, size: int | None = None, drawn: Shapes = COLOURED) -> ImagePreset:
    """2509.17791: Adam at 1e-3, 20 epochs in batches of 512, no augmentation."""
    return ImagePreset(model, 512, 1e-3, 0, 20, images, 0.0, (0.9, 0.999), needed(data), size, drawn=drawn)


CIFAR = "the files of CIFAR-10"
SIZES = {
    "smoke": ImagePreset(vit(4, 16, 1, 2), 32, 1e-2, 60),
    "quickstart": ImagePreset(vit(4, 32, 1, 2), 32, 5e-3, 240, weight_decay=0.3, clip=1.0),
    "small": ImagePreset(vit(4, 64, 2, 4), 64, 3e-3, 400),
    "medium": ImagePreset(vit(4, 128, 4, 4), 256, 2e-3, 2000, drawn=HIDDEN),
    "vit-paper": _paper(vit(4, 256, 6, 4), 50_000, CIFAR),
    "teacher": ImagePreset(vit(8, 64, 1, 4), 64, 4e-3, 240, weight_decay=0.1, clip=1.0, drawn=MANY).on(
        NAME, "vision:teacher"
    ),
    "resnet-smoke": ImagePreset(resnet((8, 16), (1, 1)), 32, 1e-2, 40),
    "resnet-small": ImagePreset(resnet((16, 32, 32), (1, 1, 1)), 64, 5e-3, 300),
    "resnet-medium": ImagePreset(resnet((32, 64, 128), (1, 1, 1)), 128, 2e-3, 1500, drawn=HIDDEN),
    "resnet-cifar": _paper(resnet((64, 128, 256, 512), (2, 2, 2, 2)), 50_000, CIFAR),
    "resnet-paper": _paper(
        resnet((64, 128, 256, 512), (2, 2, 2, 2), photos=True, least_classes=1000),
        126_689,
        "ImageNet-100 as folders or Parquet",
        224,
        LARGE,
    ),
    "cnn-smoke": ImagePreset(cnn((8, 16), (32,), False), 32, 5e-3, 40),
    "cnn-small": ImagePreset(cnn((32, 64), (128,), False), 64, 2e-3, 300, weight_decay=0.3, clip=1.0),
    "cnn-medium": ImagePreset(cnn((32, 64), (128,), True), 256, 2e-3, 2000, weight_decay=0.3, clip=1.0, drawn=HIDDEN),
    "cnn-mnist-paper": _paper(cnn((32, 64), (128,), False), 60_000, "the files of MNIST", drawn=GREY),
    "cnn-paper": _paper(cnn((32, 64), (512, 128), True), 50_000, CIFAR),
}
"""`smoke`, `quickstart` and `small` are the transformer. The paper's own are cnn-mnist-paper (MNIST), cnn-paper
(CIFAR-10) and resnet-paper (ImageNet-100, torchvision's ResNet-18 with its 1,000 outputs)."""

TAUGHT = {"teacher": 0.5}
"""Presets whose classes a teacher gives, and the noise of their start (teacher_student.py)."""


def standardized(data: Callable[[], Images], x: Tensor, y: Tensor, _draws: Draws) -> tuple[Tensor, Tensor]:
    """Pixels uint8 [L, B, H, W, C] as float32 of mean 0 and variance 1 over the data set, and the labels."""
    mean, std = _moments(data, x.device)
    return (x.to(torch.float32) - mean) / std, y


@cache
def _moments(data: Callable[[], Images], device: torch.device) -> tuple[Tensor, Tensor]:
    images = data()
    return torch.tensor(images.mean, device=device), torch.tensor(images.std, device=device)


def on_data(preset: str, path: str) -> Task:
    """The preset on the images at `path`. ConfigError for data that cannot be read or that the model cannot take."""
    return _task(preset, SIZES[preset].on(path, f"vision:{preset}", classes=2))


def _task(preset: str, size: ImagePreset) -> Task:
    task = size.task(
        name="vision",
        preset=preset,
        rev=REV_OF.get(preset, REV),
        summary=f"{size.source}, {size.model.name}",
        prepare=partial(standardized, size.data),
        loss=cross_entropy,
        metrics={"accuracy": correct},
        better="higher",
    )
    return taught(task, size.model, size.data, TAUGHT[preset]) if preset in TAUGHT else task


PRESETS = {name: _task(name, size) for name, size in SIZES.items()}
