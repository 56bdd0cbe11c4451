"""The UNet of DDPM (2006.11239): residual blocks that see the time, on halved and again doubled images.

    h = x + conv(silu(norm(conv(silu(norm(x)))) · (1 + scale(t)) + shift(t)))

Every convolution is quantized, and so are the projections of attention and of the time; the attention core and the
group norms are not. The time scales and shifts the second norm of a block, so norms have no gain of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fp4dse.kernels import LaneNumerics
from fp4dse.kernels.ops.group_norm import group_norm, smooth_group_norm
from fp4dse.tasks.data.images import Images
from fp4dse.tasks.diffusion.time import time_embedding, time_shapes
from fp4dse.tasks.image_preset import Model
from fp4dse.tasks.nn import initial_weights, make_layers, self_attention, upsampled


class _Block(NamedTuple):
    name: str
    fan_in: int
    fan_out: int
    attends: bool
    resize: str | None = None  # after it: `down` or `up`
    kept: bool = False  # its output is joined to the input of its partner on the way up
    joins: bool = False


def unet(base: int, multiples: Sequence[int], blocks: int, attends: Sequence[int], time: int, groups: int = 8) -> Model:
    """Levels of base·multiple channels, each but the last halving the image; `blocks` residual blocks a level on the
    way down and on the way up, with attention at the levels `attends` and in the middle. `time`: its embedding."""
    plan = tuple(_plan(base, multiples, blocks, attends))
    widths = "-".join(str(base * m) for m in multiples)
    name = f"UNet of {widths} channels, blocks a level: {blocks}"
    init, build = partial(_init, plan, base, time), partial(UNet, plan, groups, base)
    return Model(name, init, build, 2 ** (len(multiples) - 1))


def _plan(base: int, multiples: Sequence[int], blocks: int, attends: Sequence[int]) -> Iterator[_Block]:
    numbers = iter(range(2 * blocks * len(multiples) + 2))
    channels, stack = base, []
    levels = range(len(multiples))
    for level in levels:
        for i in range(blocks):
            width = base * multiples[level]
            last = i == blocks - 1 and level < levels[-1]
            yield _Block(
                f"block{next(numbers)}", channels, width, level in attends, "down" if last else None, kept=True
            )
            channels = width
            stack.append(width)
    yield _Block(f"block{next(numbers)}", channels, channels, True)
    yield _Block(f"block{next(numbers)}", channels, channels, False)
    for level in reversed(levels):
        for i in range(blocks):
            width = base * multiples[level]
            last = i == blocks - 1 and level > 0
            fan_in = channels + stack.pop()
            yield _Block(f"block{next(numbers)}", fan_in, width, level in attends, "up" if last else None, joins=True)
            channels = width


class UNet(nn.Module):
    """(x_t [L, B, H, W, C], t int64 [L, B]) -> predicted noise [L, B, H, W, C]."""

    def __init__(
        self, plan: Sequence[_Block], groups: int, base: int, parameters: dict[str, Tensor], numerics: LaneNumerics
    ) -> None:
        super().__init__()
        self.plan, self.groups, self.base = plan, groups, base
        strides = {f"{block.name}.resize": 2 for block in plan if block.resize == "down"}
        self.layer = make_layers(parameters, numerics, len(plan), strides)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> Tensor:
        x, times = inputs
        c = time_embedding(times, self.layer, self.base)  # [L, B, time]
        stack: list[Tensor] = []
        h = self.layer["stem"](x)
        for block in self.plan:
            h = self._block(block, torch.cat([h, stack.pop()], dim=-1) if block.joins else h, c)
            if block.kept:
                stack.append(h)
            if block.resize:
                h = self.layer[f"{block.name}_resize"](upsampled(h) if block.resize == "up" else h)
        noise: Tensor = self.layer["head"](self._active(h))
        return noise

    def _block(self, block: _Block, x: Tensor, c: Tensor) -> Tensor:
        part = {name: f"{block.name}_{name}" for name in ("conv1", "conv2", "time", "skip", "qkv", "out")}
        h: Tensor = self.layer[part["conv1"]](self._active(x))
        scale, shift = self.layer[part["time"]](c).chunk(2, dim=-1)  # [L, B, C]
        h = self.layer[part["conv2"]](smooth_group_norm(h, self.groups, 1.0 + scale, shift))
        h = h + (self.layer[part["skip"]](x) if part["skip"] in self.layer else x)
        if block.attends:
            tokens = group_norm(h, self.groups).flatten(2, 3)
            heads = max(1, h.shape[-1] // 64)
            h = h + self.layer[part["out"]](self_attention(self.layer[part["qkv"]], tokens, heads)).view_as(h)
        return h

    def _active(self, x: Tensor) -> Tensor:
        return smooth_group_norm(x, self.groups)


def _init(plan: Sequence[_Block], base: int, time: int, images: Images, seeds: Sequence[int]) -> dict[str, Tensor]:
    """Weights N(0, 1/fan_in), those that end a branch and the head a tenth of that: a block begins near identity."""
    channels = images.shape[2]
    shapes: dict[str, tuple[int, ...]] = {"stem": (base, 3, 3, channels)} | time_shapes(base, time)
    for name, fan_in, fan_out, attends, resize, *_ in plan:
        shapes |= {
            f"{name}.conv1": (fan_out, 3, 3, fan_in),
            f"{name}.time": (2 * fan_out, time),
            f"{name}.conv2": (fan_out, 3, 3, fan_out),
        }
        if fan_in != fan_out:
            shapes[f"{name}.skip"] = (fan_out, 1, 1, fan_in)
        if attends:
            shapes |= {f"{name}.qkv": (3 * fan_out, fan_out), f"{name}.out": (fan_out, fan_out)}
        if resize:
            shapes[f"{name}.resize"] = (fan_out, 3, 3, fan_out)
    shapes["head"] = (channels, 3, 3, plan[-1].fan_out)
    return initial_weights(seeds, shapes, {"conv2": 0.1, "out": 0.1, "time": 0.1, "head": 0.1})
