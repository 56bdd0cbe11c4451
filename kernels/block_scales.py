"""Scales of a weight's blocks that are trained, the last part of EfficientQAT (end-to-end training of quantization
parameters, 2407.11062).

    Ŵ = Q(m_b · Q(W)_b)                     m [L, N, K / B], one number a block, 1 before the first step

Q is the weight's quantizer, whose scales follow from block maxima. The inner one gives each element its code; the outer
one stores the trained scale s_b · m_b in its format, which moves it by half a step at most, and the codes stay. The
gradient passes the outer one straight:

    dL/dm_b = Σ_{i in b} dL/dŴ_i · Q(W)_i               dL/dW_i = m_b · dL/dŴ_i

With frozen weights (`training.trains = "learned"`) codes are frozen, too, and scales alone are trained. It is part of
the structure: all lanes of a population have such scales in the same layers, or none has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp4dse.dse import Recipe
from fp4dse.dse.errors import ConfigError
from fp4dse.dse.outliers import TrainedScales, outlier_words
from fp4dse.kernels.autograd import Function
from fp4dse.kernels.ops.sums import wide_sum

NAME = "block_scales.m"
"""End of the name of such a parameter."""
BLOCKS = (8, 16, 32, 64, 128, 256)
LEAST, MOST = 1e-4, 1e4
"""Bounds of m (EfficientQAT's of scales)."""


class BlockScales(nn.Module):
    """The parameter m float32 [L, N, ceil(K / block)] of a weight [L, N, K]."""

    def __init__(self, weight: Tensor, block: int) -> None:
        super().__init__()
        lanes, outputs, inputs = weight.shape
        self.block = block
        self.m = nn.Parameter(weight.new_ones(lanes, outputs, -(-inputs // block)))

    def applied(self, weight: Tensor, decoded: Callable[[Tensor], Tensor]) -> Tensor:
        """m · Q(W), [L, N, K]. decoded: W -> Q(W)."""
        return _Applied.apply(weight, self.m.clamp(LEAST, MOST), decoded, self.block)


class _Applied(Function[Tensor]):
    @staticmethod
    def forward(ctx: Any, w: Tensor, m: Tensor, decoded: Callable[[Tensor], Tensor], block: int) -> Tensor:
        on_grid = decoded(w.detach())
        ctx.save_for_backward(on_grid, m)
        ctx.block = block
        return on_grid * spread(m, block, w.shape[2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        on_grid, m = ctx.saved_tensors
        of_elements = F.pad(g * on_grid, (0, -g.shape[2] % ctx.block))
        total = wide_sum(of_elements.unflatten(2, (-1, ctx.block)).flatten(0, 2), 1)
        return g * spread(m, ctx.block, g.shape[2]), total.view(m.shape), None, None


def into_weight(weight: Tensor, m: Tensor) -> Tensor:
    """m · W of a weight [L, N, K]. How many blocks a row has tells their size; one block is the whole row."""
    length = weight.shape[2]
    block = next(size for size in BLOCKS if -(-length // size) == m.shape[2])
    return weight * spread(m.clamp(LEAST, MOST), block, length)


def spread(m: Tensor, block: int, length: int) -> Tensor:
    """A number a block for each of `length` elements, [L, N, length]."""
    return m.repeat_interleave(block, 2)[:, :, :length]


def trained_scales(here: Sequence[Recipe]) -> int | None:
    """The block whose scales lanes with these recipes train; all lanes of a population do, or none does."""
    q = here[0].fprop.w
    return int(q.block) if isinstance(q.outliers, TrainedScales) else None


def refuse_scales(here: Sequence[Recipe], why: str) -> None:
    """ConfigError for weights with trained scales where nothing can hold these."""
    if trained_scales(here) is not None:
        raise ConfigError("fprop.w.outliers", outlier_words(here[0].fprop.w.outliers), f"none ({why})")
