"""Heads of attention, whose queries and keys are turned by rotary position embedding (RoPE, 2104.09864).

Pairs (x_i, x_{i + d/2}) are turned by the angle t · base^(-2i/d), or a slower one (`Rope`).
Computed in FP32 and rounded once, to the dtype that came in.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch
from torch import Tensor

from fp4dse.kernels.autograd import Function
from fp4dse.kernels.dispatch import Operation

_ROPE = Operation(__name__)


class Rope(msgspec.Struct, frozen=True):
    """Frequencies of the angles. With a factor above 1, as in Llama 3.1 (2407.21783, and Meta's code): a frequency that
    turns less than `low` times within `length` positions is divided by it, one of more than `high` turns stays, and
    between these it goes linearly from one to the other."""

    base: float = 10_000.0
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    length: float = 8192.0

    def frequencies(self, size: int) -> Tensor:
        """Angle from one position to the next of each pair of a head of this size, float64 [size / 2]."""
        usual = self.base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
        if self.factor == 1.0:
            return usual
        turns = usual * self.length / (2 * math.pi)
        share = ((turns - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return usual * (share + (1.0 - share) / self.factor)


USUAL = Rope()


def rope_tables(length: int, size: int, device: torch.device | str = "cpu", of: Rope = USUAL) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles, float32 [length, size / 2] each, made on the CPU so that devices agree."""
    frequency = of.frequencies(size)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    return angle.cos().to(torch.float32).to(device), angle.sin().to(torch.float32).to(device)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, T, d] with its positions turned into angles; tables of at least T positions."""
    a, b = x.to(torch.float32).chunk(2, dim=-1)
    cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class _HeadsApart(Function[tuple[Tensor, Tensor, Tensor]]):
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
    q, k, v = (x.reshape(-1, *cut.shape[-2:]) for x in cut.unbind(0))  # apart: what keeps v keeps no more
    return rope(q, cos, sin), rope(k, cos, sin), v
