"""Products of FP8 operands by cuBLAS, lane by lane: each is large, so that a lane alone fills the GPU (ops/products).

cuBLAS multiplies a sum by one number of each operand before it rounds it: the operand's power of two, or the factor of
its tensor. Other factors, and a bias, follow when the sums are there. The second operand is read as [K, S] by columns,
which is how [S, K] lies in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.ops.fp8 import E5M2, UNIT, Fp8, is_taken, spaced
from fp4dse.kernels.ops.products import ALIGNED, Finish, finished


def why_not(a: Fp8, b: Fp8) -> str | None:
    """The reason why cuBLAS does not take a product, None if it does; the same for any number of lanes."""
    rows, length = a.values.shape[1:]
    if not is_taken(rows, columns := b.values.shape[1], length):
        return f"sizes: found {rows} × {columns} × {length}; accepted: large ones, multiples of {UNIT}"
    return "dtypes: found E5M2 twice; accepted: E4M3 for one" if a.values.dtype == b.values.dtype == E5M2 else None


def multiply(a: Fp8, b: Fp8, finish: Finish) -> Tensor:
    """The product without what is wide, finished. ValueError for one that cuBLAS does not take."""
    if reason := why_not(a, b):
        raise ValueError(reason)
    scale_a, rest_a = _scale(a, finish.factor_a)
    scale_b, rest_b = _scale(b, finish.factor_b)
    rest = finish._replace(factor_a=rest_a, factor_b=rest_b)
    dtype = finish.dtype if rest.is_of_dtype_alone and finish.dtype == torch.bfloat16 else torch.float32
    is_last = rest.is_of_dtype_alone and dtype == finish.dtype
    x, y = _aligned(a.values.contiguous()), _aligned(b.values.contiguous())
    if is_last and finish.out is not None and _is_aligned(finish.out):
        out = finish.out
    else:
        out = x.new_empty(len(x), x.shape[1], y.shape[1], dtype=dtype)
    for left, right, product, of_a, of_b in zip(x, y, out, scale_a, scale_b, strict=True):
        torch._scaled_mm(left, right.T, of_a, of_b, out_dtype=dtype, use_fast_accum=False, out=product)
    return out if out is finish.out else finished(out, rest)


def _scale(x: Fp8, factor: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The numbers that multiply sums, float32 [L] as cuBLAS reads them, and the factor that is left for afterwards: a
    power times a factor may be no float32."""
    if x.shift is not None:
        return spaced(x.shift.power), factor
    if factor is not None and factor.dim() == 1:
        return spaced(factor), None
    return spaced(x.values.new_ones(len(x.values), dtype=torch.float32)), factor


def _is_aligned(x: Tensor) -> bool:
    """True if each lane, in one piece, begins at a multiple of ALIGNED bytes."""
    apart = x.stride(0) if len(x) > 1 else 0
    return all(place * x.element_size() % ALIGNED == 0 for place in (x.storage_offset(), apart))


def _aligned(x: Tensor) -> Tensor:
    return x if _is_aligned(x) else x.clone()
