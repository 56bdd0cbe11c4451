"""Quality of samples: a Fréchet distance in the features of a small classifier of the same data, and a picture.

    d² = |μ - μ'|² + tr(Σ + Σ' - 2 (Σ Σ')^½)                                                     (1706.08500)

between the features of samples and those of the training images. Lower is better; 0 is the same mean and covariance.
It is no FID of the literature, whose features are Inception's, and it rises as samples become fewer, so it compares
runs of one preset and data set with each other and nothing else. The classifier is trained here, on the CPU, from the
same seed always and once in a process; where the data are of a single class, it tells the four rotations of an image
apart.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from fp4dse.tasks.data.images import Images

FEATURES = 32
MOST_PIXELS = 32
"""Height and width that the classifier sees, at most: it is trained on the CPU."""
STEPS, BATCH = 300, 128
MOST_REAL = 10_000
"""Training images that samples are compared with, at most."""
GREY = 96
"""Grey between the samples of a picture."""


class Reference(NamedTuple):
    """features: float32 [n, H, W, C] in [-1, 1] -> float64 [n, FEATURES]; mean and covariance of the training
    images."""

    features: Callable[[Tensor], Tensor]
    mean: Tensor
    covariance: Tensor


@cache
def reference(data: Callable[[], Images]) -> Reference:
    """The features of the data's classifier, trained, and what the training images have."""
    images = data()
    features, _ = classifier(images)
    return Reference(features, *_moments(features(_scaled(images.train[:MOST_REAL], images.top))))


def classifier(images: Images) -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    """The features of the classifier, as in Reference, and the head [n, FEATURES] -> [n, classes], in float32. Where
    all images are of one class, the classes are quarter turns."""
    turned = images.classes < 2 and images.shape[0] == images.shape[1]
    classes = 4 if turned else max(2, images.classes)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        body, head = _body(images), nn.Linear(FEATURES, classes)
        parameters = [*body.parameters(), *head.parameters()]
        moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
        for step in range(STEPS):
            at = torch.randint(len(images.train), (BATCH,))
            x, y = images.train[at], images.train_labels[at]
            if turned:
                x, y = _turned(x, at % 4), at % 4
            loss = F.cross_entropy(head(body(_scaled(x, images.top))), y)
            _adam(parameters, torch.autograd.grad(loss, parameters), moments, step + 1, 2e-3 * (1 - step / STEPS))
    for parameter in parameters:
        parameter.requires_grad_(False)

    def features(x: Tensor) -> Tensor:
        return torch.cat([body(part) for part in x.split(500)]).double()

    return features, head


@torch.no_grad()
def _adam(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[tuple[Tensor, Tensor]],
    step: int,
    lr: float,
) -> None:
    """A step of torch.optim.Adam, bit for bit; the first is number 1. That class imports torch's compiler, which takes
    longer than the training."""
    for parameter, gradient, (mean, square) in zip(parameters, gradients, moments, strict=True):
        mean.lerp_(gradient, 1 - 0.9)
        square.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        spread = (square.sqrt() / (1 - 0.999**step) ** 0.5).add_(1e-8)
        parameter.addcdiv_(mean, spread, value=-lr / (1 - 0.9**step))


def frechet_distance(found: Reference, samples: Tensor) -> float:
    """d² of samples float32 [n, H, W, C] in [-1, 1]; NaN if one of them is not finite."""
    if not torch.isfinite(samples).all():
        return float("nan")
    mean, covariance = _moments(found.features(samples))
    root = _root(found.covariance)
    cross = _root(root @ covariance @ root)
    squared = (mean - found.mean).square().sum() + (covariance + found.covariance - 2 * cross).trace()
    return max(0.0, squared.item())


def sample_sheet(samples: Tensor, columns: int = 8, least: int = 200) -> bytes:
    """A PNG file of samples float32 [n, H, W, C] in [-1, 1], in rows of `columns` with grey lines between, enlarged to
    `least` pixels of width or more. What is not finite is black."""
    levels = ((torch.nan_to_num(samples, nan=-1.0).clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    n, height, width, channels = levels.shape
    rows = -(-n // columns)
    sheet = np.full((rows * (height + 1) - 1, columns * (width + 1) - 1, channels), GREY, dtype=np.uint8)
    for i, image in enumerate(levels.numpy()):
        top, left = i // columns * (height + 1), i % columns * (width + 1)
        sheet[top : top + height, left : left + width] = image
    times = -(-least // sheet.shape[1])
    picture = Image.fromarray(sheet[..., 0] if channels == 1 else sheet)
    if times > 1:  # smoothly: few large pixels hide a digit
        picture = picture.resize((times * picture.width, times * picture.height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


class _ChannelsFirst(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 3, 1, 2).contiguous()


def _body(images: Images) -> nn.Module:
    """Convolutions with ReLU, halved until 4 pixels or fewer are left, and a layer of features. Larger images are
    averaged down to MOST_PIXELS pixels first."""
    height, width, channels = images.shape
    parts: list[nn.Module] = [_ChannelsFirst()]
    if max(height, width) > MOST_PIXELS:
        height, width = min(height, MOST_PIXELS), min(width, MOST_PIXELS)
        parts.append(nn.AdaptiveAvgPool2d((height, width)))
    for fan_out in (32, 64, 64, 64):
        parts += [nn.Conv2d(channels, fan_out, 3, padding=1), nn.ReLU()]
        channels = fan_out
        if max(height, width) <= 4:
            break
        parts.append(nn.MaxPool2d(2, ceil_mode=True))
        height, width = (height + 1) // 2, (width + 1) // 2
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(channels * height * width, FEATURES), nn.ReLU())


def _scaled(pixels: Tensor, top: int) -> Tensor:
    return pixels.to(torch.float32) * (2 / top) - 1


def _turned(x: Tensor, quarters: Tensor) -> Tensor:
    """Images [n, H, H, C], each by its number of quarter turns."""
    return torch.stack([image.rot90(int(k)) for image, k in zip(x, quarters, strict=True)])


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    mean = features.mean(0)
    centred = features - mean
    return mean, centred.T @ centred / max(1, len(features) - 1)


def _root(symmetric: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((symmetric + symmetric.T) / 2)
    root: Tensor = vectors * values.clamp(min=0).sqrt() @ vectors.T
    return root
