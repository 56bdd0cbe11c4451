"""The convolutional networks of 2509.17791: two 3×3 convolutions with 2×2 maxima, then linear layers, ReLU between.

For MNIST 32 and 64 channels and 3136-128-10; for CIFAR-10 the same convolutions, a layer normalisation (here without a
learned gain) and 4096-512-128-10. All layers are quantized.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.ops.layer_norm import layer_norm
from fp4dse.tasks.data.images import Images
from fp4dse.tasks.image_preset import Model
from fp4dse.tasks.nn import initial_weights, make_layers, max_pool


def cnn(channels: tuple[int, int], hidden: Sequence[int], norm: bool) -> Model:
    """norm: whether the pixels' features are normalised before the first linear layer."""
    name = f"CNN {'-'.join(map(str, (*channels, *hidden)))}"
    return Model(name, partial(_init, channels, tuple(hidden)), partial(Cnn, norm), multiple=4)


class Cnn(nn.Module):
    """Images [L, B, H, W, C] -> [L, B, classes]."""

    def __init__(self, norm: bool, parameters: dict[str, Tensor], numerics: LaneNumerics) -> None:
        super().__init__()
        self.norm = norm
        self.layer = make_layers(parameters, numerics, kinds={"conv1": "embedding"})

    def forward(self, x: Tensor) -> Tensor:
        for name in ("conv1", "conv2"):
            x = max_pool(torch.relu(self.layer[name](x)))
        h = x.flatten(2)
        h = layer_norm(h) if self.norm else h
        for name in self.layer:
            if name.startswith("hidden"):
                h = torch.relu(self.layer[name](h))
        logits: Tensor = self.layer["head"](h)
        return logits


def _init(
    channels: tuple[int, int], hidden: tuple[int, ...], images: Images, seeds: Sequence[int]
) -> dict[str, Tensor]:
    """Weights N(0, 2/fan_in), the head's smaller."""
    height, width, colours = images.shape
    first, second = channels
    shapes: dict[str, tuple[int, ...]] = {"conv1": (first, 3, 3, colours), "conv2": (second, 3, 3, first)}
    fan_in = height // 4 * (width // 4) * second
    for i, fan_out in enumerate(hidden):
        shapes[f"hidden{i}"] = (fan_out, fan_in)
        fan_in = fan_out
    shapes["head"] = (images.classes, fan_in)
    return initial_weights(seeds, shapes, dict.fromkeys(shapes, 2**0.5) | {"head": 3**-0.5})
