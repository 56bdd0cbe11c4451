"""The decoder's operations between its quantized products, forward and backward, none of which mixes lanes.

Library reductions choose their order from the whole tensor's shape, and gradients of look-ups are summed in the order
in which threads come. So every sum over values is `lane_sum` here, or a fixed tree, and what is left are element-wise
operations, gathers, batched products with the lanes folded into the batch, and the softmax of single rows.

    RMS norm     y = g x / sqrt(mean x² + eps)                                       (1910.07467)
    RoPE         pairs (x_i, x_{i + d/2}) turned by the angle t · base^(-2i/d)       (2104.09864)
    SwiGLU       silu(gate) ∘ up                                                     (2002.05202)

Whatever dtype comes in, they compute in FP32 and round what leaves once, to that dtype. On a GPU each is one kernel in
either direction (`kernels.fused.norms`, `kernels.fused.decoder`), with the bits of what is written out here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels import lane_sum, silu
from fp4dse.kernels.arithmetic.grid import sqrt
from fp4dse.kernels.devices import has_kernels

EPS = 1e-5
ROPE_BASE = 10_000.0


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        if has_kernels(x):
            from fp4dse.kernels.fused import norms

            _, y, inverse = norms.rms_norm(x, gain, EPS)
            ctx.save_for_backward(x, inverse, gain)
            return y
        wide = x.to(torch.float32)
        inverse = 1.0 / sqrt(_row_mean(wide * wide) + EPS)  # [L, …, 1]
        ctx.save_for_backward(x, inverse, gain)
        return (wide * inverse * _beside(gain, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, inverse, gain = ctx.saved_tensors
        if has_kernels(x):
            from fp4dse.kernels.fused import norms

            return norms.rms_norm_gradient(x, inverse, gain, g)
        normal, g = x.to(torch.float32) * inverse, g.to(torch.float32)
        along = g * normal
        d_gain = lane_sum(along.reshape(len(x), -1, x.shape[-1]), 1)
        g = g * _beside(gain, x)
        return ((g - normal * _row_mean(g * normal)) * inverse).to(x.dtype), d_gain


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """x [L, …, D] with mean square 1 along its rows, times gain [L, D]."""
    return _RmsNorm.apply(x, gain)


class _AddedRmsNorm(torch.autograd.Function):
    """On a GPU: the sum is read while it is there, and its two gradients are added where one is made."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, branch: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
        from fp4dse.kernels.fused import norms

        h, y, inverse = norms.rms_norm(h, gain, EPS, branch)
        ctx.save_for_backward(h, inverse, gain)
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx: Any, passing: Tensor | None, g: Tensor) -> tuple[Tensor | None, ...]:
        from fp4dse.kernels.fused import norms

        h, inverse, gain = ctx.saved_tensors
        dh, d_gain = norms.rms_norm_gradient(h, inverse, gain, g, passing)
        return dh, dh, d_gain


def added_rms_norm(h: Tensor, branch: Tensor | None, gain: Tensor) -> tuple[Tensor, Tensor]:
    """h + branch, or h where there is none, and its RMS norm times gain [L, D]; h, branch [L, …, D]."""
    if branch is not None and has_kernels(h):
        return _AddedRmsNorm.apply(h, branch, gain)
    h = h if branch is None else h + branch
    return h, rms_norm(h, gain)


def _row_mean(x: Tensor) -> Tensor:
    return lane_sum(x, x.dim() - 1)[..., None] * (1.0 / x.shape[-1])


def _beside(gain: Tensor, x: Tensor) -> Tensor:
    return gain.view(len(gain), *[1] * (x.dim() - 2), -1)


def rope_tables(length: int, size: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, float32 [length, size / 2] each, made on the CPU so that devices agree."""
    frequency = ROPE_BASE ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(torch.float32).to(device), angle.sin().to(torch.float32).to(device)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, T, d] with its positions turned into angles; tables of at least T positions."""
    a, b = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class _HeadsApart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from fp4dse.kernels.fused import decoder

        ctx.save_for_backward(cos, sin)
        ctx.shape = qkv.shape
        return decoder.heads_apart(qkv, heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        from fp4dse.kernels.fused import decoder

        return decoder.heads_together(q, k, v, ctx.shape, *ctx.saved_tensors), None, None, None


def heads_apart(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned by RoPE, and v of qkv [L, B, T, 3·D]: [L·B·heads, T, D / heads] each, lanes within the batch."""
    if has_kernels(qkv):
        return _HeadsApart.apply(qkv, heads, cos, sin)
    lanes, batch, length, width = qkv.shape
    cut = qkv.view(lanes, batch, length, 3, heads, width // 3 // heads).permute(3, 0, 1, 4, 2, 5)
    q, k, v = cut.reshape(3, -1, *cut.shape[-2:]).unbind(0)
    return rope(q, cos, sin), rope(k, cos, sin), v


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from fp4dse.kernels.fused import decoder

        ctx.save_for_backward(x)
        return decoder.swiglu(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        from fp4dse.kernels.fused import decoder

        (x,) = ctx.saved_tensors
        return decoder.swiglu_gradient(x, g)


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) ∘ up of x [..., 2·F], gate before up: [..., F]."""
    if has_kernels(x):
        return _SwiGlu.apply(x)
    gate, up = x.chunk(2, dim=-1)
    return silu(gate.contiguous()) * up


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.size = weight.shape[1]
        return _rows(weight, tokens)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return sum_by_token(g, tokens, ctx.size), None


def embedding(weight: Tensor, tokens: Tensor) -> Tensor:
    """Rows of weight [L, V, D] for tokens, int64 [L, B, T]: [L, B, T, D]."""
    flat = tokens.reshape(len(tokens), -1)
    return _Embedding.apply(weight, flat).view(*tokens.shape, weight.shape[-1])


def sum_by_token(g: Tensor, tokens: Tensor, size: int) -> Tensor:
    """Sum of the rows of g [L, M, D] that belong to each token, tokens int64 [L, M] below size: [L, size, D].

    Rows are sorted by token, in the order in which they stand; then every row adds the one 1, 2, 4 … before it as long
    as that is of the same token, so that the last of each token holds all of them. The order of additions is that of
    the token's own rows.
    """
    tokens, order = torch.sort(tokens, dim=1, stable=True)
    every = torch.arange(size, device=tokens.device).expand(len(tokens), size).contiguous()
    after = torch.searchsorted(tokens, every, right=True)  # where the rows of a token end
    if g.dtype == torch.float32 and has_kernels(g):
        from fp4dse.kernels.fused import decoder

        return decoder.sum_by_token(g, order, after)
    sums = _rows(g, order)
    step = 1
    while step < tokens.shape[1]:
        same = (tokens[:, step:] == tokens[:, :-step])[..., None]
        later = torch.where(same, sums[:, step:] + sums[:, :-step], sums[:, step:])
        sums = torch.cat([sums[:, :step], later], dim=1)
        step *= 2
    last = (after - 1).clamp(min=0)
    present = (tokens.gather(1, last) == every)[..., None]
    return torch.where(present, _rows(sums, last), 0.0)


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x [L, R, D] at the rows index [L, S]: [L, S, D]."""
    return x.gather(1, index[..., None].expand(*index.shape, x.shape[-1]))
