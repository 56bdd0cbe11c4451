"""Parts that image models share and that no recipe quantizes: norms, attention core, resizing, pooling.

Images stand channels last, [L, B, H, W, C]. Sums that a gradient needs are lane sums, because a library's reduction
over several axes chooses its order by the number of lanes. So are the sums of norms, whose roots are rounded once.

Whatever dtype comes in, they compute in FP32 and round what leaves once, to that dtype; so do their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4dse.dse.place import Kind, Place
from fp4dse.kernels import LaneNumerics, QuantConv2d, QuantLinear, lane_sum, silu
from fp4dse.kernels.arithmetic.grid import sqrt
from fp4dse.kernels.arithmetic.philox import STREAMS, normal
from fp4dse.tasks.attention import attention

Shapes = dict[str, tuple[int, ...]]
"""Layer name -> shape of its weight: (out, in), or (out, kh, kw, in) of a convolution."""


def seed_keys(seeds: Sequence[int]) -> Tensor:
    """int64 [S], as counters take them."""
    return torch.tensor(list(seeds), dtype=torch.int64)


def drawn(
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


def layers(
    parameters: Mapping[str, Tensor],
    numerics: LaneNumerics,
    kinds: Mapping[str, Kind],
    blocks: int,
    strides: Mapping[str, int] | None = None,
) -> nn.ModuleDict:
    """A quantized layer for every `name.w`, under its name with _ for a dot: linear for [L, out, in], a convolution
    that keeps the size of the image, or divides it by its stride, for [L, out, kh, kw, in].

    Names are `block3.qkv` within blocks, else one word; the last word has its kind in `kinds`, without which it is
    `conv` or `linear`. Layers are numbered in the order of `parameters`.
    """
    made: dict[str, nn.Module] = {}
    for i, name in enumerate(name.removesuffix(".w") for name in parameters if name.endswith(".w")):
        weight, bias = parameters[f"{name}.w"], parameters.get(f"{name}.b")
        block, _, last = name.rpartition(".")
        kind = kinds.get(last, "conv" if weight.dim() == 5 else "linear")
        place = Place(kind, int(block.removeprefix("block")), blocks) if block else Place(kind, None, blocks)
        key = name.replace(".", "_")
        if weight.dim() == 5:
            stride, padding = (strides or {}).get(name, 1), weight.shape[2] // 2
            made[key] = QuantConv2d(weight, bias, numerics, i, place, stride, padding)
        else:
            made[key] = QuantLinear(weight, bias, numerics, i, place)
    return nn.ModuleDict(made)


class _Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return (x.to(torch.float32) * gain[:, None] + shift[:, None]).to(x.dtype)

    @staticmethod
    def backward(ctx, g: Tensor):
        x, gain = ctx.saved_tensors
        g, dtype = g.to(torch.float32), gain.dtype
        return (g * gain[:, None]).to(x.dtype), lane_sum(g * x, 1).to(dtype), lane_sum(g, 1).to(dtype)


def affine(x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
    """x [N, M, C] · gain [N, C] + shift [N, C]."""
    return _Affine.apply(x, gain, shift)


def _standard(x: Tensor, dim: int, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x - mean) / sqrt(variance + eps) along a dimension of x, float32; mean, variance and 1/sqrt(variance + eps), of
    length 1 there. In single IEEE operations: a library's norms have other bits on another device."""
    mean = _mean(x, dim)
    centred = x - mean
    variance = _mean(centred * centred, dim)
    inverse = 1.0 / sqrt(variance + eps)
    return centred * inverse, mean, variance, inverse


def _through_moments(g: Tensor, out: Tensor, inverse: Tensor, dim: int) -> Tensor:
    """The gradient of `_standard`'s x from g, that of its `out`."""
    return (g - _mean(g, dim) - out * _mean(g * out, dim)) * inverse


def _mean(x: Tensor, dim: int) -> Tensor:
    total = lane_sum(x, dim).unsqueeze(dim)
    return total / torch.full_like(total, x.shape[dim])  # by a number, a GPU would multiply with its inverse


class _BatchNorm(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) · gain + shift over dimension 1 of x [L, M, C], gain and shift [L, C], with the
    gradient through both moments."""

    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, shift: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        out, mean, variance, inverse = _standard(x.to(torch.float32), 1, eps)
        ctx.save_for_backward(x, gain, mean, inverse)
        mean, variance = mean[:, 0], variance[:, 0]
        ctx.mark_non_differentiable(mean, variance)
        return (out * gain[:, None] + shift[:, None]).to(x.dtype), mean, variance

    @staticmethod
    def backward(ctx, g: Tensor, *_):
        x, gain, mean, inverse = ctx.saved_tensors
        g = g.to(torch.float32)
        out = (x.to(torch.float32) - mean) * inverse
        dx = _through_moments(g * gain[:, None], out, inverse, 1)
        return dx.to(x.dtype), lane_sum(g * out, 1), lane_sum(g, 1), None


class BatchNorm(nn.Module):
    """Batch normalisation of each lane by itself: x [L, …, C], statistics over all between, gain and shift [L, C].

    Running mean and (unbiased) variance [L, C] are state; with them it evaluates, while `numerics.training` is False.
    """

    def __init__(self, gain: Tensor, shift: Tensor, numerics: LaneNumerics, momentum=0.1, eps=1e-5) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(gain), nn.Parameter(shift)
        self.mean: Tensor
        self.variance: Tensor
        self.register_buffer("mean", torch.zeros_like(gain))
        self.register_buffer("variance", torch.ones_like(gain))
        self.numerics, self.momentum, self.eps = numerics, momentum, eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(len(x), -1, x.shape[-1])
        if self.numerics.training:
            out, mean, variance = _BatchNorm.apply(rows, self.gain, self.shift, self.eps)
            n = rows.shape[1]
            self.mean.copy_(self.mean * (1 - self.momentum) + mean * self.momentum)
            unbiased = variance * (n / max(1, n - 1))
            self.variance.copy_(self.variance * (1 - self.momentum) + unbiased * self.momentum)
        else:
            out = (rows - self.mean[:, None]) * (1.0 / sqrt(self.variance + self.eps))[:, None]
            out = affine(out, self.gain, self.shift).to(x.dtype)
        return out.view_as(x)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor) -> Tensor:
        out, mean, _, inverse = _standard(h.to(torch.float32), h.dim() - 1, 1e-5)
        ctx.save_for_backward(h, mean, inverse)
        return out.to(h.dtype)

    @staticmethod
    def backward(ctx, g: Tensor):
        h, mean, inverse = ctx.saved_tensors
        out = (h.to(torch.float32) - mean) * inverse
        return _through_moments(g.to(torch.float32), out, inverse, h.dim() - 1).to(h.dtype)


def layer_norm(h: Tensor) -> Tensor:
    """Over the last axis, without gain."""
    return _LayerNorm.apply(h)


def group_norm(x: Tensor, groups: int) -> Tensor:
    """x [L, B, H, W, C]: each image's `groups` of neighbouring channels to mean 0 and variance 1, without gain."""
    lanes, batch, height, width, channels = x.shape
    cut = x.view(lanes * batch, height * width, groups, channels // groups).transpose(1, 2)
    rows = cut.reshape(lanes * batch * groups, -1)
    return layer_norm(rows).view(cut.shape).transpose(1, 2).reshape(x.shape)


def smooth(x: Tensor, sigmoid: Callable[[Tensor], Tensor]) -> Tensor:
    """SiLU of x [L, …], as three dimensions: a compiled function is made for few."""
    return silu(x.reshape(len(x), -1, x.shape[-1]), sigmoid).view_as(x)


def self_attention(qkv: Tensor, heads: int) -> Tensor:
    """The attention core of each sample: qkv [L, B, T, 3·D] -> [L, B, T, D]."""
    lanes, batch, tokens, width = qkv.shape
    size = width // 3 // heads
    cut = qkv.view(lanes * batch, tokens, 3, heads, size)
    q, k, v = cut.permute(2, 0, 3, 1, 4).reshape(3, -1, tokens, size).unbind(0)
    mixed = attention(q, k, v).view(lanes, batch, heads, tokens, size)
    return mixed.transpose(2, 3).reshape(lanes, batch, tokens, width // 3)


class _MadeAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, g: Tensor):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        return torch.autograd.grad(y, x, g)[0], None


def max_pool(x: Tensor) -> Tensor:
    """The largest of each 2×2 pixels, without a last odd row or column. Two equal ones share the gradient. What it
    keeps for the backward pass is x."""
    return _MadeAgain.apply(x, _largest_of_two)


def _largest_of_two(x: Tensor) -> Tensor:
    x = x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    rows = torch.maximum(x[:, :, 0::2], x[:, :, 1::2])
    return torch.maximum(rows[:, :, :, 0::2], rows[:, :, :, 1::2])


def max_pool_overlapping(x: Tensor) -> Tensor:
    """The largest of each 3×3 pixels in steps of 2, zeros around the image; x is not negative. What it keeps for the
    backward pass is x."""
    return _MadeAgain.apply(x, _largest_of_three)


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
    return _mean(rows.to(torch.float32), 2)[:, :, 0].to(x.dtype)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)

    @staticmethod
    def backward(ctx, g: Tensor):
        wide = g.to(torch.float32)
        rows = wide[:, :, 0::2] + wide[:, :, 1::2]
        return (rows[:, :, :, 0::2] + rows[:, :, :, 1::2]).to(g.dtype)


def doubled(x: Tensor) -> Tensor:
    """Every pixel four times: [L, B, H, W, C] -> [L, B, 2H, 2W, C]."""
    return _Doubled.apply(x)


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
