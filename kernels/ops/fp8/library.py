"""Products of FP8 operands by cuBLAS, lane by lane: what is large, so that a lane alone fills the GPU (ops/products).

cuBLAS multiplies a sum by one number of each operand before it rounds it: the operand's power of two, or its factor,
which may be any number. A product of two factors would be rounded in an order that is not known.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.ops.fp8 import E5M2, Fp8
from fp4dse.kernels.ops.products import Finish, is_large

UNIT = 16
"""The contraction and the columns of a result are multiples of it."""


def why_not(a: Fp8, b: Fp8, finish: Finish) -> str | None:
    """The reason why cuBLAS does not take a product, None if it does; the same for any number of lanes."""
    if not is_large(a.values, b.values):
        return "sizes: accepted: large ones (ops/products)"
    if a.values.shape[2] % UNIT or b.values.shape[1] % UNIT:
        return f"sizes: accepted: a contraction and columns that {UNIT} divides"
    if a.values.dtype == b.values.dtype == E5M2:
        return "dtypes: found E5M2 twice; accepted: E4M3 for one"
    if a.factor is not None or b.factor is not None:
        return "factors of segments: accepted: none"
    if finish.bias is not None or finish.dtype not in (torch.float32, torch.bfloat16):
        return "finish: accepted: no bias, float32 or bfloat16"
    factors = [f for f in (finish.factor_a, finish.factor_b) if f is not None]
    if len(factors) > 1 or any(f.dim() > 1 for f in factors):
        return "finish: accepted: a factor of one operand, one a lane"
    pairs = (a.shift, finish.factor_a), (b.shift, finish.factor_b)
    both = any(shift is not None and factor is not None for shift, factor in pairs)
    return "finish: accepted: a factor or a power of two, not both for one operand" if both else None


def multiply(a: Fp8, b: Fp8, finish: Finish) -> Tensor:
    """The product without what is wide, if there is no reason against it; rounded once."""
    scale_a, scale_b = (_scale(x, f) for x, f in ((a, finish.factor_a), (b, finish.factor_b)))
    x, y = a.values.contiguous(), b.values.contiguous()
    out = x.new_empty(len(x), x.shape[1], y.shape[1], dtype=finish.dtype)
    for left, right, product, of_a, of_b in zip(x, y, out, scale_a, scale_b, strict=True):
        torch._scaled_mm(left, right.T, of_a, of_b, out_dtype=finish.dtype, use_fast_accum=False, out=product)
    return out


def _scale(x: Fp8, factor: Tensor | None) -> Tensor:
    """The number that multiplies sums, float32 [L]."""
    if x.shift is not None:
        return x.shift.power
    return x.values.new_ones(len(x.values), dtype=torch.float32) if factor is None else factor
