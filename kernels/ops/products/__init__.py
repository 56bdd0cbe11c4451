"""Products of a batch of matrices, each with the bits that it has alone or in any other batch.

Libraries choose an algorithm for the batch as a whole. cuBLAS and MKL give a matrix the same bits in every batch of two
or more, but use another algorithm for a single matrix, and MKL's depends on where in a cache line a matrix begins. So
the way is chosen here by the shape of the matrices (and by dtype, device and strides, which follow from the layer):

    tiled     on a GPU: BF16 operands whose product has factors or a bias. The kernel in triton.py finishes a tile
              before it is written; what is only rounded, a library writes faster
    small     as a batch; a single matrix is multiplied twice, which costs little where it is small
    large     on a GPU: matrix by matrix, however many there are. Each fills the GPU by itself, so nothing is lost, and
              a model that is trained alone pays nothing extra
    narrow    on a GPU: results of few rows, short contractions, and rows that do not begin at multiples of 16 bytes.
              There cuBLAS's algorithm depends on the number of matrices; the kernel in triton.py has one order
    odd       on a CPU: matrices that do not fill whole cache lines are copied to where each begins a line

A known exception: where MKL has more than twice as many threads as matrices, it shares each among several threads, and
some shapes then have other bits than in larger batches (docs/log.md). Workers have one thread unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.kernels.dispatch import Operation, by_device

_PRODUCTS = Operation(__name__)

LINE = 16
"""FP32 numbers in a line of a CPU's cache."""
NARROW = 16
"""A product with fewer rows, columns or numbers along the contraction is narrow."""
SEGMENT = 128
"""Numbers along the contraction whose partial sum has a factor of its own."""
LARGE_WORK, LARGE_RESULT = 2**34, 2**20
"""A product with at least so many operations and so many numbers in its result is large. 2^34 operations take a GPU of
600 Top/s 30 µs, ten times the cost of a launch. 2^20 numbers are 64 tiles of 128 × 128: split in two or four along the
contraction, as cuBLAS does, they keep a GPU of 132 processors busy."""
LONG = 4096
"""A product with factors and at least so many numbers along the contraction is finished after cuBLAS has multiplied.
That reads and writes a number of the result again, 8 bytes or 2.7 ps on an H100; cuBLAS is ahead of the kernel here by
a third of the 2.9 ps that 1,024 numbers of the contraction take it."""
ALIGNED = 16
"""cuBLAS's fastest kernels want addresses to be multiples of so many bytes."""


class Finish(NamedTuple):
    """The rest of a product [L, R, S], in this order: times the factor of a ([L] or [L, R]), times that of b ([L] or
    [L, S]), plus a bias [L, S], each float32 or None; then rounded to a dtype.

    out: where the result is written, [L, R, S] of that dtype, each lane in one piece; None: a new tensor
    """

    factor_a: Tensor | None = None
    factor_b: Tensor | None = None
    bias: Tensor | None = None
    dtype: torch.dtype = torch.float32
    out: Tensor | None = None

    @property
    def is_of_dtype_alone(self) -> bool:
        """True if the product, rounded, is the result."""
        return self.factor_a is self.factor_b is self.bias is None

    def dimensions(self, product: Sequence[int]) -> tuple[int, int]:
        """Of the factors of a product of shape [L, R, S]: 1 for one of lanes, 2 for one of all lines of lanes, 0 for
        none. ValueError for what is neither: a kernel would read beyond it."""
        lanes, *lines = product
        for factor, count in zip((self.factor_a, self.factor_b), lines, strict=True):
            if factor is not None and tuple(factor.shape) not in ((lanes,), (lanes, count)):
                raise ValueError(f"factor: found {tuple(factor.shape)}; accepted: {(lanes,)} or {(lanes, count)}")
        a, b = (0 if factor is None else factor.dim() for factor in (self.factor_a, self.factor_b))
        return a, b


AS_IT_IS = Finish()
"""For a product that is the result."""


def finished(product: Tensor, finish: Finish) -> Tensor:
    """A product, float32 [L, R, S], which may be overwritten, after all that `finish` has."""
    finish.dimensions(product.shape)
    product = scaled(product, finish.factor_a, finish.factor_b)
    if finish.bias is not None:
        product = product.add_(finish.bias[:, None, :])
    if finish.out is None or product is finish.out:
        return product.to(finish.dtype)
    return finish.out.copy_(product)


def multiply(a: Tensor, b: Tensor, fp32: str = "ieee", finish: Finish = AS_IT_IS) -> Tensor:
    """a [L, R, K] · b [L, S, K]ᵀ in float32, finished: [L, R, S] of its dtype; a, b: float32, on a GPU also bfloat16.

    fp32: products of FP32 numbers on a GPU, `ieee` or `tf32`.
    """
    if is_narrow(a, b) and (kernels := _PRODUCTS.kernels(a)):
        return kernels.multiply(a, b, fp32, finish)
    if is_tiled(a, b, finish) and (kernels := _PRODUCTS.kernels(a)):
        return kernels.tiled(a, b, finish)
    dtype = finish.dtype if finish.is_of_dtype_alone and a.dtype == finish.dtype else torch.float32
    out = finish.out if finish.dtype == dtype else None
    return finished(by_device(a, cpu=_in_lines, cuda=_on_gpu)(a, b, fp32, dtype, out), finish)


def _on_gpu(a: Tensor, b: Tensor, fp32: str, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
    """dtype: what the sums, which are FP32, are rounded to; that of the operands, or float32. out: of it, where they
    are rather written than to a new tensor; it is not, where a single matrix is multiplied twice."""
    with _math(fp32):
        if is_large(a, b):
            return one_by_one(a, b, dtype, out)
        if len(a) > 1:
            return _batch(a, b, dtype, out)
        return _batch(twice(a), twice(b), dtype)[:1]


def bf16(a: Tensor, b: Tensor, finish: Finish = AS_IT_IS) -> Tensor:
    """The product of operands rounded to BF16, in FP32, finished; on a CPU of the same numbers as float32."""
    a, b = a.to(torch.bfloat16), b.to(torch.bfloat16)
    dtype = by_device(a, cpu=torch.float32, cuda=torch.bfloat16)
    return multiply(a.to(dtype), b.to(dtype), finish=finish)


def in_segments(
    a: Tensor,
    b: Tensor,
    factor_a: Tensor | None,
    factor_b: Tensor | None,
    run: Callable[[Tensor, Tensor], Tensor],
    fp32: str | None = "ieee",
) -> Tensor:
    """The product of a [L, R, K] and b [L, S, K] whose segments of 128 along K are scaled, float32 [L, R, S]:

        out = Σ_s ((Σ_(k in s) a[r, k] · b[c, k]) · factor_a[r, s]) · factor_b[c, s]

    The sum within a segment is that of `run`; all else is in FP32 with one rounding an operation, segment after segment
    from the first on. (Transformer Engine's reference has a fused multiply-add in the place of the last two.)

    factor_a, factor_b: float32 [L, R, K / 128] and [L, S, K / 128], or None for one; not both.
    fp32: as in `multiply`, for the kernel; None: `run` on a GPU, too.
    """
    if fp32 is not None and (kernels := _PRODUCTS.kernels(a)):
        return kernels.in_segments(a, b, factor_a, factor_b, fp32)
    out = None
    for number in range(a.shape[2] // SEGMENT):
        along = slice(number * SEGMENT, (number + 1) * SEGMENT)
        part = run(a[:, :, along], b[:, :, along])
        part = scaled(part, *(None if f is None else f[:, :, number] for f in (factor_a, factor_b)))
        out = part if out is None else out.add_(part)
    return a.new_zeros(len(a), a.shape[1], b.shape[1], dtype=torch.float32) if out is None else out


def scaled(product: Tensor, a: Tensor | None, b: Tensor | None) -> Tensor:
    """A product [L, R, S] times the factors of its operands, in place: a [L] or [L, R], then b [L] or [L, S]."""
    plain = [t for t in (a, b) if t is not None and t.dim() == 1]
    of_lanes = plain and len(plain) == (a is not None) + (b is not None)
    if of_lanes and product[0].is_contiguous() and (kernels := _PRODUCTS.kernels(product)):
        return kernels.scale(product, plain[0], plain[1] if len(plain) > 1 else None)
    if a is not None:
        product.mul_(a.view(len(product), -1, 1))
    return product if b is None else product.mul_(b.view(len(product), 1, -1))


def is_narrow(a: Tensor, b: Tensor) -> bool:
    """True for shapes, dtypes and strides whose products triton.py computes on a GPU."""
    sizes = a.shape[1], b.shape[1], a.shape[2]
    return min(sizes) < NARROW or b.shape[1] % 4 > 0 or not (_aligned(a) and _aligned(b))


def is_tiled(a: Tensor, b: Tensor, finish: Finish) -> bool:
    """True for products that triton.py computes on a GPU although a library could: of BF16 operands, with factors or a
    bias, and no long contraction."""
    of_bf16 = a.dtype == b.dtype == torch.bfloat16
    return of_bf16 and a.shape[2] < LONG and not finish.is_of_dtype_alone


def is_large(a: Tensor, b: Tensor) -> bool:
    """True for shapes, dtypes and strides whose products are computed one by one on a GPU."""
    result = a.shape[1] * b.shape[1]
    work = 2 * result * a.shape[2]
    return work >= LARGE_WORK and result >= LARGE_RESULT and not is_narrow(a, b)


def one_by_one(a: Tensor, b: Tensor, dtype: torch.dtype = torch.float32, out: Tensor | None = None) -> Tensor:
    """The products, each computed by itself and written to its place in the result."""
    out = a.new_empty(len(a), a.shape[1], b.shape[1], dtype=dtype) if out is None else out
    more = {} if a.dtype == dtype else {"out_dtype": dtype}
    for x, y, product in zip(a, b, out, strict=True):
        torch.mm(x, y.mT, out=product, **more)
    return out


def twice(x: Tensor) -> Tensor:
    """x [1, R, K] as a batch of two equal matrices: a view if lanes of a batch are aligned like x, else a copy."""
    if _aligned(x):
        return x.expand(2, -1, -1)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape[1:], x.stride()[1:], strict=True))
    return x.new_empty_strided((2, *x.shape[1:]), (extent, *x.stride()[1:])).copy_(x)


def _aligned(x: Tensor) -> bool:
    """True if all lanes, and all rows in them (columns, where x is laid out by columns), begin at multiples of ALIGNED
    bytes."""
    places = x.storage_offset(), x.stride(0), max(x.stride()[1:])
    return all(place * x.element_size() % ALIGNED == 0 for place in places)


def _batch(a: Tensor, b: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    if a.dtype == dtype:
        return torch.bmm(a, b.mT, out=out)
    return torch.bmm(a, b.mT, out_dtype=dtype, out=out)


def _in_lines(
    a: Tensor, b: Tensor, fp32: str, dtype: torch.dtype = torch.float32, _out: Tensor | None = None
) -> Tensor:
    """The products on a CPU, of matrices padded with zeros so that each begins a cache line; zeros add nothing.

    fp32, dtype: as on a GPU; here there is one way, in float32, and a new tensor, in which each matrix begins a line.
    """
    if len(a) == 1:
        return _in_lines(a.expand(2, -1, -1), b.expand(2, -1, -1), fp32, dtype)[:1]
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
    """Set cuBLAS to `ieee` or `tf32` products of FP32 numbers and to no partial sums in BF16; reset it afterwards."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    partial, split = (getattr(matmul, f"allow_bf16_reduced_precision_reduction{end}") for end in ("", "_split_k"))
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = fp32, (False, split)
    try:
        yield
    finally:
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = precision, (partial, split)
