"""ResNet (1512.03385) with basic blocks: every convolution and the head are quantized.

    y = relu(bn(conv(relu(bn(conv(x))))) + skip(x)),   skip: identity, or bn of a 1×1 convolution where sizes change

Batch normalisation is what these networks were published with and what 2509.17791 trained. Its statistics are each
lane's own, by sums of a fixed order, so that a lane needs nothing of its neighbours; the running ones are state of the
model, by lane like all else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.ops.affine import affine
from fp4dse.kernels.ops.elementary import sqrt
from fp4dse.kernels.ops.group_norm import batch_norm
from fp4dse.kernels.ops.layer_norm import EPS
from fp4dse.tasks.data.images import Images
from fp4dse.tasks.image_preset import Model
from fp4dse.tasks.nn import initial_weights, make_layers, max_pool_overlapping, mean_pool


class _Block(NamedTuple):
    name: str
    fan_in: int
    fan_out: int
    stride: int

    @property
    def projects(self) -> bool:
        return self.stride != 1 or self.fan_in != self.fan_out


def resnet(widths: Sequence[int], blocks: Sequence[int], photos: bool = False, least_classes: int = 0) -> Model:
    """Stages of `blocks` basic blocks of `widths` channels, each but the first halving the image.

    photos: the stem is a 7×7 convolution of stride 2 and a 3×3 maximum of stride 2, else a 3×3 convolution.
    least_classes: outputs of the head, if the data have fewer classes.
    """
    plan = tuple(_plan(widths, blocks))
    name = f"ResNet-{2 * sum(blocks) + 2} of {'-'.join(map(str, widths))} channels"
    return Model(name, partial(_init, plan, photos, least_classes), partial(ResNet, plan, photos))


def _plan(widths: Sequence[int], blocks: Sequence[int]) -> Iterator[_Block]:
    number, channels = 0, widths[0]
    for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
        for i in range(count):
            yield _Block(f"block{number}", channels, width, 2 if stage and not i else 1)
            number, channels = number + 1, width


class ResNet(nn.Module):
    """Images [L, B, H, W, C] -> [L, B, classes]."""

    def __init__(
        self, plan: Sequence[_Block], photos: bool, parameters: dict[str, Tensor], numerics: LaneNumerics
    ) -> None:
        super().__init__()
        self.plan, self.photos = plan, photos
        strides = {f"{b.name}.{part}": b.stride for b in plan for part in ("conv1", "skip")}
        strides["stem"] = 2 if photos else 1
        self.layer = make_layers(parameters, numerics, len(plan), strides)
        gains = {name.removesuffix(".gain"): value for name, value in parameters.items() if name.endswith(".gain")}
        self.norm = nn.ModuleDict(
            {
                name.replace(".", "_"): BatchNorm(gain, parameters[f"{name}.shift"], numerics)
                for name, gain in gains.items()
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self._convolved("stem", x))
        if self.photos:
            h = max_pool_overlapping(h)
        for block in self.plan:
            hidden = torch.relu(self._convolved(f"{block.name}_conv1", h))
            skip = self._convolved(f"{block.name}_skip", h) if block.projects else h
            h = torch.relu(self._convolved(f"{block.name}_conv2", hidden) + skip)
        logits: Tensor = self.layer["head"](mean_pool(h))
        return logits

    def _convolved(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = self.norm[name](self.layer[name](x))
        return out


def _init(
    plan: Sequence[_Block], photos: bool, least_classes: int, images: Images, seeds: Sequence[int]
) -> dict[str, Tensor]:
    """Convolutions N(0, 2/fan_in), the head N(0, 1/(3 fan_in)), norms the identity."""
    edge = 7 if photos else 3
    shapes: dict[str, tuple[int, ...]] = {"stem": (plan[0].fan_in, edge, edge, images.shape[2])}
    for name, fan_in, fan_out, _ in plan:
        shapes |= {f"{name}.conv1": (fan_out, 3, 3, fan_in), f"{name}.conv2": (fan_out, 3, 3, fan_out)}
    shapes |= {f"{b.name}.skip": (b.fan_out, 1, 1, b.fan_in) for b in plan if b.projects}
    shapes["head"] = (max(images.classes, least_classes), plan[-1].fan_out)
    convolutions = [name for name in shapes if name != "head"]
    gains = dict.fromkeys((name.rpartition(".")[2] for name in convolutions), 2**0.5) | {"head": 3**-0.5}
    made = initial_weights(seeds, shapes, gains, biased=("head",))
    for name in convolutions:
        made[f"{name}.gain"] = torch.ones(len(seeds), shapes[name][0])
        made[f"{name}.shift"] = torch.zeros(len(seeds), shapes[name][0])
    return made


MOMENTUM = 0.1
"""The share of a batch in the running mean and variance of BatchNorm."""


class BatchNorm(nn.Module):
    """Batch normalisation of each lane by itself: x [L, …, C], statistics over all between, gain and shift [L, C].

    Running mean and (unbiased) variance [L, C] are state; with them it evaluates, while `numerics.training` is False.
    """

    def __init__(self, gain: Tensor, shift: Tensor, numerics: LaneNumerics) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(gain), nn.Parameter(shift)
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros_like(gain))
        self.register_buffer("variance", torch.ones_like(gain))
        self.numerics = numerics

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(x), -1, x.shape[-1])
        if self.numerics.training:
            out, mean, variance = batch_norm(rows, self.gain, self.shift)
            n = rows.shape[1]
            new = torch._foreach_mul([mean, variance * (n / max(1, n - 1))], MOMENTUM)
            running = [self.mean, self.variance]  # together: on a GPU these are launches, and little else
            torch._foreach_mul_(running, 1 - MOMENTUM)
            torch._foreach_add_(running, new)
        else:
            out = (rows - self.mean[:, None]) * (1.0 / sqrt(self.variance + EPS))[:, None]
            out = affine(out, self.gain, self.shift).to(x.dtype)
        return out.view_as(x)
