"""A part of low rank that is taken off an operand before it is quantized, and multiplied apart.

It is rows · columns: P Vᵀ with P [L, R, r] and V [L, r, C]. With what is left of both operands quantized to A and B, a
product is

    (A + P Vᵀ) (B + Q Uᵀ)ᵀ = A Bᵀ + P (B V)ᵀ + (A U) Qᵀ + P (Vᵀ U) Qᵀ

of which all but the first are products with few columns, in FP32.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fp4dse.kernels.ops.products import multiply


class Mean(NamedTuple):
    """The mean over tokens, of rank one, float32.

    dense    the part as a whole, neither padded nor rotated: [L, 1, length], or [L, R, 1] where tokens are contracted
    rows     1, or the mean where tokens are contracted: [1, 1, 1] or [L, R, 1]
    columns  the mean, or 1 for each token where these are contracted; padded and rotated as the operand: [L, 1, C]
    """

    dense: Tensor
    rows: Tensor
    columns: Tensor

    def times(self, b: Tensor) -> Tensor:
        """The product with an operand b, float32 [L, S, C]: [L, R, S], or [L, 1, S] where all rows are equal."""
        return self.rows * multiply(self.columns, b)

    def spread(self, t: Tensor) -> Tensor:
        """t [L, S, 1], a product with the columns, times the rows: [L, S, R]."""
        return t * self.rows.mT


class Factors(NamedTuple):
    """The largest singular components, float32, their vectors quantized.

    original  the vectors along the contraction, neither padded nor rotated: [L, r, length]
    rows      the others times the singular values: [L, R, r]
    columns   `original` padded and rotated as the operand: [L, r, C]
    """

    original: Tensor
    rows: Tensor
    columns: Tensor

    @property
    def dense(self) -> Tensor:
        """The part as a whole, [L, R, length]."""
        return self.spread(self.original.mT).mT

    def times(self, b: Tensor) -> Tensor:
        """The product with an operand b, float32 [L, S, C]: [L, R, S]."""
        return multiply(self.rows, multiply(b, self.columns))

    def spread(self, t: Tensor) -> Tensor:
        """t [L, S, r], a product with the columns, times the rows: [L, S, R]."""
        return multiply(t.contiguous(), self.rows)


Part = Mean | Factors


def of_both(a: Part, b: Part) -> Tensor:
    """The product of what was taken off two operands, float32 [L, R, S] or what expands to it."""
    if isinstance(a, Mean) and isinstance(b, Mean):
        return multiply(a.columns, b.columns) * (a.rows * b.rows.mT)
    return b.spread(a.times(b.columns))
