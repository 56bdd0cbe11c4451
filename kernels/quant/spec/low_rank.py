"""The largest singular components of an operand X [R, C], by iterating a subspace from random signs (2509.00404).

    V ← ±1; then, so many times:    U = orthonormal(X V)     Gram–Schmidt, column after column
                                    W = Uᵀ X
                                    s = lengths of the rows of W,  V = (rows of W / s)ᵀ

U s Vᵀ = U Uᵀ X is what is taken off, and nothing of what is left lies in U. This is the iteration of the authors'
code, which begins with the last step's V and, before there is one, with a randomized SVD. With each iteration the
columns of U and V come nearer to singular vectors, those far above the others first.

Products with X are products of lanes, in FP32 (ops/products); all else is summed in the fixed order of ops/sums, in
float64. So a lane has the same bits, whatever other lanes there are. Nothing is decided by the host, and numbers that
are not finite give NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.kernels.ops.products import multiply
from fp4dse.kernels.ops.sums import lane_sum

DEPENDENT = 2.0**-40
"""A column of which less than this share is left, in squares, depends on those before it, and becomes zero."""
AT_ONCE = 1 << 22
"""Products of numbers that are held at a time, for sums over them."""


class Components(NamedTuple):
    """r components of an operand [L, R, C], float32: u [L, r, R] and v [L, r, C], of length one or zero; s [L, r]."""

    u: Tensor
    s: Tensor
    v: Tensor

    def product(self) -> Tensor:
        """U s Vᵀ, float32 [L, R, C]."""
        return multiply((self.u * self.s[:, :, None]).mT.contiguous(), self.v.mT.contiguous())


def orthonormal(rows: Tensor) -> Tensor:
    """The rows of p, float32 [L, r, n], made orthonormal one after the other; zero where one depends on those before.

    Gram–Schmidt on the rows' products with each other, so that sums over n are taken once: eliminating what lies below
    the diagonal of G = p pᵀ makes T with T p orthogonal and their squared lengths on the diagonal.
    """
    p, count = rows.double(), rows.shape[1]
    gram = _products(p, p)
    both = torch.cat([gram, torch.eye(count, dtype=p.dtype, device=p.device).expand_as(gram)], 2)  # to be D … | T
    least = gram.diagonal(dim1=1, dim2=2) * DEPENDENT
    for j in range(count - 1):
        row, below = both[:, j : j + 1, j:], both[:, j + 1 :, j:]
        square = row[:, :, :1]
        inverse = torch.where(square > least[:, j, None, None], square.reciprocal(), 0.0)
        below -= below[:, :, :1] * inverse * row
    square = both.diagonal(dim1=1, dim2=2)
    length = _root(torch.where(square > least, square, 0.0))[:, :, None]
    out = _products(both[:, :, count:], p.mT)
    return torch.where(length > 0, out / length, 0.0).to(torch.float32)


def components(
    x: Tensor, start: Tensor, iterations: int, orthonormal: Callable[[Tensor], Tensor] = orthonormal
) -> Components:
    """The largest components of x, float32 [L, R, C], as many as start [L, r, C] has rows.

    orthonormal: an implementation of the function of that name.
    """
    v, across = start, x.mT.contiguous()
    for _ in range(iterations):
        u = orthonormal(multiply(v, x))
        w = multiply(u, across)
        length = _root(lane_sum(w.double().square(), 2))
        v = torch.where(length[:, :, None] > 0, w / length[:, :, None], 0.0).to(torch.float32)
    return Components(u, length, v)


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a [L, R, K] · b [L, S, K]ᵀ in float64, [L, R, S], every sum in one order; so many rows at a time as memory
    allows, which changes no bits."""
    some = a.split(max(1, AT_ONCE // b.numel()), 1)
    return torch.cat([lane_sum(rows[:, :, None] * b[:, None], 3) for rows in some], 1)


def _root(x: Tensor) -> Tensor:
    """The square root of float64 x, rounded to float32, whatever PyTorch's own does with the last bit."""
    return torch.sqrt(x).to(torch.float32)
