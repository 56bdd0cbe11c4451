"""Block Hadamard along the contraction axis of a GEMM, as an FP32 butterfly.

H is the Sylvester matrix, x ↦ (x · signs) H / sqrt(n) on consecutive groups of n. H/sqrt(n) is symmetric and its own
inverse, both operands of a GEMM get the same signs, so the rotation cancels in the product. The definition is the
butterfly with strides 1, 2, 4 … then one multiplication by FP32(1/sqrt(n)): a dot product would round differently.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


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


def rotate(x: Tensor, size: int, dim: int, signs: Tensor | None) -> Tensor:
    """(x · signs) H / sqrt(size) along `dim`. x: [L, …]; signs: [L, size] of ±1, repeated for every group, or None."""
    return hadamard(x if signs is None else x * _along(signs, x, dim), size, dim)


def rotate_back(x: Tensor, size: int, dim: int, signs: Tensor | None) -> Tensor:
    """The inverse of `rotate`, up to rounding."""
    x = hadamard(x, size, dim)
    return x if signs is None else x * _along(signs, x, dim)


def _along(signs: Tensor, x: Tensor, dim: int) -> Tensor:
    lanes, size = signs.shape
    shape = [1] * x.ndim
    shape[0], shape[dim] = lanes, x.shape[dim]
    return signs.repeat(1, x.shape[dim] // size).view(shape)


def _f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
