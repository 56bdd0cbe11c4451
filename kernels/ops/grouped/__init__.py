"""Products of groups of rows of different number, as experts have tokens: one launch for all groups of all lanes.

    out[g, r, s] = Σ_k a[g, r, k] · b[g, s, k]        a: [G, R, K], b: [G, S, K], out: float32 [G, R, S]

All groups have the same room. Of group g only the first `count[g]` rows of a are filled, or, where the rows of both
operands' origin are what is contracted (the gradient of a weight), the first `count[g]` numbers along K. All after them
are zeros: they are in the operands, and add nothing. So the definition multiplies everything; the kernel loads and
multiplies what is filled, and a group that has nothing is zeros.
"""

from __future__ import annotations

from torch import Tensor

from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.ops.products import multiply

_GROUPED = Operation(__name__)


def grouped(a: Tensor, b: Tensor, count: Tensor, contracted: bool = False, fp32: str = "ieee") -> Tensor:
    """a [G, R, K] · b [G, S, K]ᵀ, float32 [G, R, S]; a, b: float32, on a GPU also bfloat16; any strides.

    count: int64 [G], of filled rows of a or, if contracted, of filled numbers along K; what is beyond must be zeros.
    fp32: products of FP32 numbers on a GPU, `ieee` or `tf32`.
    """
    if kernels := _GROUPED.kernels(a):
        return kernels.grouped(a, b, count, contracted, fp32)
    return multiply(a, b, fp32)
