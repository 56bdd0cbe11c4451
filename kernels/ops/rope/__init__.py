"""Heads of attention, whose queries and keys are turned by rotary position embedding (RoPE, 2104.09864).

Pairs (x_i, x_{i + d/2}) are turned by the angle t · base^(-2i/d). Computed in FP32 and rounded once, to the dtype that
came in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation

BASE = 10_000.0
_ROPE = Operation(__name__)


def rope_tables(length: int, size: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, float32 [length, size / 2] each, made on the CPU so that devices agree."""
    frequency = BASE ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(torch.float32).to(device), angle.sin().to(torch.float32).to(device)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, T, d] with its positions turned into angles; tables of at least T positions."""
    a, b = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class _HeadsApart(Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Any, qkv: Tensor, heads: int, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels, ctx.shape = kernels, qkv.shape
        return kernels.heads_apart(qkv, heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.kernels.heads_together(q, k, v, ctx.shape, *ctx.saved_tensors), None, None, None


def heads_apart(qkv: Tensor, heads: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, turned by RoPE, and v of qkv [L, B, T, 3·D]: [L·B·heads, T, D / heads] each, lanes within the batch."""
    if kernels := _ROPE.kernels(qkv):
        return _HeadsApart.apply(kernels, qkv, heads, cos, sin)
    lanes, batch, length, width = qkv.shape
    cut = qkv.view(lanes, batch, length, 3, heads, width // 3 // heads).permute(3, 0, 1, 4, 2, 5)
    q, k, v = cut.reshape(3, -1, *cut.shape[-2:]).unbind(0)
    return rope(q, cos, sin), rope(k, cos, sin), v
