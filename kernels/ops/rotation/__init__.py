"""Block Hadamard along the contraction axis of a GEMM, as an FP32 butterfly.

H is the Sylvester matrix, x ↦ (x · signs) H / sqrt(n) on consecutive groups of n. H/sqrt(n) is symmetric and its own
inverse, both operands of a GEMM get the same signs, so the rotation cancels in the product. The definition is the
butterfly with strides 1, 2, 4 … then one multiplication by FP32(1/sqrt(n)): a dot product would round differently.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from fp4dse.dse.stages import Hadamard


def hadamard(x: Tensor, size: int, dim: int) -> Tensor:
    """Rotate consecutive groups of `size` along `dim`, whose length must be a multiple of `size`. FP32, no autograd."""
    dim %= x.ndim
    before, length, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    stride = 1
    while stride < size:
        x = x.reshape(*before, length // (2 * stride), 2, stride, *after)
        a, b = x.select(dim + 1, 0), x.select(dim + 1, 1)
        out = torch.empty_like(x)
        torch.add(a, b, out=out.select(dim + 1, 0))
        torch.sub(a, b, out=out.select(dim + 1, 1))
        x, stride = out, 2 * stride
    return x.reshape(*before, length, *after) * _f32(1 / math.sqrt(size))


FIXED_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The vector that NVIDIA's Transformer Engine flips its inputs by, repeated where the rotation is longer."""


def rotate(x: Tensor, size: int, dim: int, signs: Tensor | None, order: str = "sylvester") -> Tensor:
    """(x · signs) H / sqrt(size) along `dim`. x: [L, …]; signs: [L, size] of ±1, repeated for every group, or None.

    order: `sylvester`, or `sequency`: the columns of H by the number of their sign changes.
    """
    return ORDERS[order](hadamard(x if signs is None else x * _along(signs, x, dim), size, dim), size, dim)


def rotate_back(x: Tensor, size: int, dim: int, signs: Tensor | None, order: str = "sylvester") -> Tensor:
    """The inverse of `rotate`, up to rounding. With its columns by sequency, too, H is symmetric."""
    x = rotate(x, size, dim, None, order)
    return x if signs is None else x * _along(signs, x, dim)


def signs_of(rotation: Hadamard, device: torch.device, draw: Callable[[], Tensor]) -> Tensor | None:
    """[L, size] of ±1, or [1, size] for all lanes, or None. draw: what makes the random ones."""
    return SIGNS[rotation.signs](rotation.size, device, draw)


@cache
def fixed_signs(size: int, device: torch.device) -> Tensor:
    """float32 [1, size]."""
    return torch.tensor(FIXED_SIGNS, dtype=torch.float32, device=device).repeat(size // 16)[None, :]


SIGNS: dict[str, Callable[[int, torch.device, Callable[[], Tensor]], Tensor | None]] = {
    "none": lambda *_: None,
    "fixed": lambda size, device, _: fixed_signs(size, device),
    "random": lambda _size, _device, draw: draw(),
}
"""Kind of signs -> what they are."""


@cache
def sequency_order(size: int) -> tuple[int, ...]:
    """Columns of the Sylvester matrix by the number of their sign changes, 0 … size-1."""
    bit = [[(row & column).bit_count() % 2 for row in range(size)] for column in range(size)]
    return tuple(sorted(range(size), key=lambda column: sum(a != b for a, b in pairwise(bit[column]))))


def _in_sequency(x: Tensor, size: int, dim: int) -> Tensor:
    index = _sequency_index(size, x.device)
    groups = torch.arange(0, x.shape[dim], size, device=x.device)
    return x.index_select(dim, (groups[:, None] + index[None, :]).flatten())


ORDERS: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "sylvester": lambda x, *_: x,
    "sequency": _in_sequency,
}
"""Order of H's columns -> what brings those of the Sylvester matrix into it; H stays symmetric."""


@cache
def _sequency_index(size: int, device: torch.device) -> Tensor:
    return torch.tensor(sequency_order(size), device=device)


def _along(signs: Tensor, x: Tensor, dim: int) -> Tensor:
    lanes, size = signs.shape
    shape = [1] * x.ndim
    shape[0], shape[dim] = lanes, x.shape[dim]
    return signs.repeat(1, x.shape[dim] // size).view(shape)


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
