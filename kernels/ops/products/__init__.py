"""Products of a batch of matrices in which a matrix has the same bits alone, in any company and at any place.

Libraries choose how to multiply for the batch as a whole. cuBLAS and MKL give a matrix the same bits in every batch of
two or more, but take another algorithm for one matrix, and MKL's depends on where in a line of the cache a matrix
begins. So how a batch is made here is a rule on the shape of its matrices (and on dtype, device and strides, which
follow from it):

    small     as a batch. A single matrix is multiplied twice, which costs little where it is small
    large     on a GPU: matrix by matrix, however many there are. One of these fills a GPU by itself, so that nothing is
              lost by it, and a model that is trained alone pays nothing for a company that it does not have
    narrow    on a GPU: results of a few rows, short contractions, and rows that do not begin at multiples of 16 bytes.
              There cuBLAS's choice depends on how many matrices there are; a kernel of ours (triton.py) has one
              order
    odd       on a CPU: matrices that fill no whole lines of the cache are put where each begins a line

Not mended: where MKL has more than twice as many threads as matrices it shares each among several, and some shapes then
have other bits than in larger batches (docs/log.md). Workers have one thread unless they are asked to have more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.kernels.dispatch import Operation

_PRODUCTS = Operation(__name__)

LINE = 16
"""Numbers in a line of a CPU's cache, in FP32."""
NARROW = 16
"""Rows, columns or numbers along the contraction, below which a product is narrow."""
LARGE_WORK, LARGE_RESULT = 2**34, 2**20
"""Operations, and numbers of the result, from which on a product is large. 2^34 take a GPU of 600 Top/s 30 µs, ten
times what a launch costs. 2^20 are 64 tiles of 128 × 128: cut in two or four along the contraction, as cuBLAS does,
they keep a GPU of 132 processors busy."""
ALIGNED = 16
"""Bytes of which cuBLAS's fastest kernels want addresses to be multiples."""


def multiply(a: Tensor, b: Tensor, fp32: str = "ieee") -> Tensor:
    """a [L, R, K] · b [L, S, K]ᵀ in float32 [L, R, S]. float32 operands, on a GPU also bfloat16.

    fp32: `ieee` or `tf32`, what a GPU does with float32 operands.
    """
    if not a.is_cuda:
        return _in_lines(a, b)
    if is_narrow(a, b) and (kernels := _PRODUCTS.kernels(a)):
        return kernels.multiply(a, b, fp32)
    with _math(fp32):
        if is_large(a, b):
            return one_by_one(a, b)
        if len(a) > 1:
            return _batch(a, b)
        return _batch(twice(a), twice(b))[:1]


def bf16(a: Tensor, b: Tensor) -> Tensor:
    """Operands rounded to BF16, product in FP32. The CPU has no such product, but the same numbers in FP32."""
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    if not a.is_cuda:
        a, b = a.to(torch.float32), b.to(torch.float32)
    return multiply(a, b)


def scaled(product: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """A product [L, R, S] times the factors of its operands, a [L] or [L, R] first, then b [L] or [L, S]; in place."""
    plain = [t for t in (a, b) if t is not None and t.dim() == 1]
    of_lanes = plain and len(plain) == (a is not None) + (b is not None)
    if of_lanes and product.is_contiguous() and (kernels := _PRODUCTS.kernels(product)):
        return kernels.scale(product, plain[0], plain[1] if len(plain) > 1 else None)
    if a is not None:
        product.mul_(a.view(len(product), -1, 1))
    return product if b is None else product.mul_(b.view(len(product), 1, -1))


def is_narrow(a: Tensor, b: Tensor) -> bool:
    """Whether a kernel of ours makes products of matrices of this shape, dtype and strides on a GPU."""
    sizes = a.shape[1], b.shape[1], a.shape[2]
    return min(sizes) < NARROW or b.shape[1] % 4 > 0 or not (_aligned(a) and _aligned(b))


def is_large(a: Tensor, b: Tensor) -> bool:
    """Whether products of matrices of this shape, dtype and strides are made one by one on a GPU."""
    result = a.shape[1] * b.shape[1]
    work = 2 * result * a.shape[2]
    return work >= LARGE_WORK and result >= LARGE_RESULT and not is_narrow(a, b)


def one_by_one(a: Tensor, b: Tensor) -> Tensor:
    """The products, each written where it is to lie."""
    out = a.new_empty(len(a), a.shape[1], b.shape[1], dtype=torch.float32)
    more = {} if a.dtype == torch.float32 else {"out_dtype": torch.float32}
    for x, y, product in zip(a, b, out, strict=True):
        torch.mm(x, y.mT, out=product, **more)
    return out


def twice(x: Tensor) -> Tensor:
    """x [1, R, K] as a batch of two: the same memory where any batch would be aligned like it, else a copy."""
    if _aligned(x):
        return x.expand(2, -1, -1)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x.new_empty_strided((2, *x.shape[1:]), (extent, *x.stride()[1:])).copy_(x)


def _aligned(x: Tensor) -> bool:
    """Whether lanes begin at multiples of ALIGNED bytes and rows (columns, where x lies along them) go on at such."""
    places = x.storage_offset(), x.stride(0), max(x.stride()[1:])
    return all(place * x.element_size() % ALIGNED == 0 for place in places)


def _batch(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.float32:
        return torch.bmm(a, b.mT)
    return torch.bmm(a, b.mT, out_dtype=torch.float32)


def _in_lines(a: Tensor, b: Tensor) -> Tensor:
    """The products on a CPU, of matrices that begin at lines of the cache; zeros that fill them add nothing."""
    if len(a) == 1:
        return _in_lines(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
    (lanes, rows, length), columns = a.shape, b.shape[1]
    if rows * length % LINE or columns * length % LINE:
        a, b = (F.pad(x, (0, -length % LINE)) for x in (a, b))
    size = rows * columns
    if not size % LINE:
        return torch.bmm(a, b.mT)
    out = a.new_empty(lanes, size + -size % LINE)[:, :size].view(lanes, rows, columns)
    return torch.bmm(a, b.mT, out=out).contiguous()


@contextmanager
def _math(fp32: str) -> Iterator[None]:
    """What cuBLAS may do within: `ieee` or `tf32` products of FP32 numbers, and no partial sums in BF16."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    partial, split = (getattr(matmul, f"allow_bf16_reduced_precision_reduction{end}") for end in ("", "_split_k"))
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = fp32, (False, split)
    try:
        yield
    finally:
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = precision, (partial, split)
