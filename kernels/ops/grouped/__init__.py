"""Products of groups of rows of different number, as experts have tokens: one launch for all groups of all lanes.

    out[g, r, s] = Σ_k a[g, r, k] · b[g, s, k]        a: [G, R, K], b: [G, S, K], out: float32 [G, R, S]

All groups have the same room. Of group g only the first `count[g]` rows of a are filled, or, where the rows of both
operands' origin are what is contracted (the gradient of a weight), the first `count[g]` numbers along K. All after them
are zeros: they are in the operands, and add nothing. So the definition multiplies everything; the kernel loads and
multiplies what is filled, along K up to a whole piece of up to 128, and a group that has nothing is zeros.

Operands with factors for each segment of 128 along K are multiplied as in `products.in_segments`, and skipped alike.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.products import in_segments, multiply

_GROUPED = Operation(__name__)


def grouped(a: Tensor, b: Tensor, count: Tensor, contracted: bool = False, fp32: str = "ieee") -> Tensor:
    """a [G, R, K] · b [G, S, K]ᵀ, float32 [G, R, S]; a, b: float32, on a GPU also bfloat16; any strides.

    count: int64 [G], of filled rows of a or, if contracted, of filled numbers along K; what is beyond must be zeros.
    fp32: products of FP32 numbers on a GPU, `ieee` or `tf32`.
    """
    if kernels := _GROUPED.kernels(a):
        return kernels.grouped(a, b, count, contracted, fp32)
    return multiply(a, b, fp32)


def grouped_in_segments(
    a: Tensor,
    b: Tensor,
    factor_a: Tensor | None,
    factor_b: Tensor | None,
    count: Tensor,
    contracted: bool,
    run: Callable[[Tensor, Tensor], Tensor],
    fp32: str = "ieee",
) -> Tensor:
    """`products.in_segments` of a [G, R, K] and b [G, S, K], float32 [G, R, S]; count, contracted: as in `grouped`, and
    the other arguments as there. Factors of what is empty are finite numbers."""
    if kernels := _GROUPED.kernels(a):
        return kernels.grouped_in_segments(a, b, factor_a, factor_b, count, contracted, fp32)
    return in_segments(a, b, factor_a, factor_b, run, fp32)
