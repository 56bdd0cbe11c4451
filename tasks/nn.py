"""Parts that image models share: their layers, and what no recipe quantizes, attention core, resizing, pooling.

Images stand channels last, [L, B, H, W, C]. Sums that a gradient needs are lane sums, because a library's reduction
over several axes chooses its order by the number of lanes. Norms are in `norms`.

Whatever dtype comes in, they compute in FP32 and round what leaves once, to that dtype; so do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4dse.dse.layers.place import Kind, Place, Role, conv_role
from fp4dse.kernels import LaneNumerics, QuantConv2d, QuantLinear, lane_sum
from fp4dse.kernels.autograd import Function, contraction
from fp4dse.kernels.ops.philox import STREAMS, normal
from fp4dse.kernels.ops.sums import divided
from fp4dse.tasks.draws import seed_keys

ROLES: dict[str, Role] = {"qkv": "qkv", "out": "attention-out", "up": "up", "down": "down"}
"""Last word of a layer's name -> its role within its kind."""
KINDS: dict[str, Kind] = {
    "embed": "embedding",
    "stem": "embedding",
    "time1": "embedding",
    "qkv": "attention",
    "out": "attention",
    "up": "mlp",
    "down": "mlp",
    "head": "head",
}
"""Last word of a layer's name -> its kind, by which recipes choose layers. Others are `conv` or `linear`."""

Shapes = dict[str, tuple[int, ...]]
"""Layer name -> shape of its weight: (out, in), or (out, kh, kw, in) of a convolution."""


def initial_weights(
    seeds: Sequence[int], shapes: Shapes, gains: Mapping[str, float], biased: Container[str] | None = None
) -> dict[str, Tensor]:
    """`name.w` N(0, gain²/fan_in) for each seed, [S, *shape], and `name.b` of zeros [S, out].

    gains, biased: by the last word of a name; a gain is 1 and a bias is there unless said otherwise.
    """
    keys = seed_keys(seeds)
    made = {}
    for site, (name, shape) in enumerate(shapes.items()):
        last = name.rpartition(".")[2]
        fan_in = torch.Size(shape[1:]).numel()
        weight = normal(keys, STREAMS["init"], 0, site, shape[0] * fan_in).view(-1, *shape)
        made[f"{name}.w"] = weight * (gains.get(last, 1.0) / fan_in**0.5)
        if biased is None or last in biased:
            made[f"{name}.b"] = torch.zeros(len(keys), shape[0])
    return made


def make_layers(
    parameters: Mapping[str, Tensor],
    numerics: LaneNumerics,
    blocks: int = 0,
    strides: Mapping[str, int] | None = None,
    kinds: Mapping[str, Kind] | None = None,
) -> nn.ModuleDict:
    """A quantized layer for every `name.w`, under its name with _ for a dot: a linear one for a weight [L, out, in], a
    convolution for [L, out, kh, kw, in], whose output has the size of its input divided by the stride.

    Names are `block3.qkv` within blocks, else one word; the last word has its kind in KINDS, to which `kinds` adds.
    Layers are numbered in the order of `parameters`.
    """
    kind_of = {**KINDS, **(kinds or {})}
    made: dict[str, nn.Module] = {}
    for i, name in enumerate(name.removesuffix(".w") for name in parameters if name.endswith(".w")):
        weight, bias = parameters[f"{name}.w"], parameters.get(f"{name}.b")
        block, _, last = name.rpartition(".")
        kind = kind_of.get(last, "conv" if weight.dim() == 5 else "linear")
        number = int(block.removeprefix("block")) if block else None
        place = Place(kind, number, blocks, ROLES.get(last) or conv_role(kind, weight.shape[2:-1]), name=name)
        key = name.replace(".", "_")
        if weight.dim() == 5:
            stride, padding = (strides or {}).get(name, 1), weight.shape[2] // 2
            made[key] = QuantConv2d(weight, bias, numerics, i, place, stride, padding)
        else:
            made[key] = QuantLinear(weight, bias, numerics, i, place)
    return nn.ModuleDict(made)


def self_attention(projection: Any, x: Tensor, heads: int) -> Tensor:
    """The attention core of each sample, of queries, keys and values that a QuantLinear makes of x [L, B, T, D]:
    [L, B, T, D]."""
    qkv = projection(x)
    lanes, batch, tokens, width = qkv.shape
    size = width // 3 // heads
    cut = qkv.view(lanes * batch, tokens, 3, heads, size)
    q, k, v = cut.permute(2, 0, 3, 1, 4).reshape(3, -1, tokens, size).unbind(0)
    mixed: Tensor = projection.numerics.attention(projection.layer, q, k, v, heads=heads)
    return mixed.view(lanes, batch, tokens, width // 3)


class _Recomputed(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return torch.autograd.grad(contraction([y], [g]), x)[0], None


def max_pool(x: Tensor) -> Tensor:
    """The largest of each 2×2 pixels, without a last odd row or column. Two equal ones share the gradient. What it
    keeps for the backward pass is x."""
    return _Recomputed.apply(x, _largest_of_two)


def _largest_of_two(x: Tensor) -> Tensor:
    x = x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    rows = torch.maximum(x[:, :, 0::2], x[:, :, 1::2])
    return torch.maximum(rows[:, :, :, 0::2], rows[:, :, :, 1::2])


def max_pool_overlapping(x: Tensor) -> Tensor:
    """The largest of each 3×3 pixels in steps of 2, zeros around the image; x is not negative. What it keeps for the
    backward pass is x."""
    return _Recomputed.apply(x, _largest_of_three)


def _largest_of_three(x: Tensor) -> Tensor:
    for dim in (2, 3):
        size = (x.shape[dim] + 1) // 2
        padded = F.pad(x, (0, 0, 0, 0, 1, 1) if dim == 2 else (0, 0, 1, 1))
        before = (slice(None),) * dim
        first, second, third = (padded[(*before, slice(i, i + 2 * size - 1, 2))] for i in range(3))
        x = torch.maximum(torch.maximum(first, second), third)
    return x


def mean_pool(x: Tensor) -> Tensor:
    """Mean over the pixels or tokens: [L, B, …, C] -> [L, B, C]."""
    rows = x.reshape(*x.shape[:2], -1, x.shape[-1])
    return divided(lane_sum(rows.to(torch.float32), 2), rows.shape[2]).to(x.dtype)


class _Upsampled(Function[Tensor]):
    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    @staticmethod
    def backward(_ctx: Any, g: Tensor) -> Tensor:
        wide = g.to(torch.float32)
        rows = wide[:, :, 0::2] + wide[:, :, 1::2]
        return (rows[:, :, :, 0::2] + rows[:, :, :, 1::2]).to(g.dtype)


def upsampled(x: Tensor) -> Tensor:
    """Every pixel four times: [L, B, H, W, C] -> [L, B, 2H, 2W, C]."""
    return _Upsampled.apply(x)


def patches(x: Tensor, size: int) -> Tensor:
    """[L, B, H, W, C] -> tokens [L, B, H/size · W/size, size·size·C]."""
    lanes, batch, height, width, channels = x.shape
    cut = x.view(lanes, batch, height // size, size, width // size, size, channels)
    return cut.transpose(3, 4).reshape(lanes, batch, -1, size * size * channels)


def unpatched(tokens: Tensor, size: int, shape: tuple[int, int, int]) -> Tensor:
    """The inverse of `patches`: tokens [L, B, T, size·size·C] -> [L, B, *shape]."""
    height, width, channels = shape
    cut = tokens.view(*tokens.shape[:2], height // size, width // size, size, size, channels)
    return cut.transpose(3, 4).reshape(*tokens.shape[:2], height, width, channels)
