"""What stands between the products of a training step, as kernels that read each tensor once: SiLU and its gradient,
tensor factors, random words and AdamW.

Every operation is a single IEEE rounding in the order of the functions that they stand for (`activations.silu`,
`gemm.scaled`, `philox.words`, `adam.adamw`), so that the bits are theirs. They matter because a step is bound by
memory: eager PyTorch reads and writes the whole tensor for each of the 25 operations of a sigmoid.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.fused.elementary import exp_nonpositive
from fp4dse.kernels.fused.grids import grid
from fp4dse.kernels.fused.numbers import draws16, philox

_TILE = 1024
_BIG = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def sigmoid(x):
    """`activations.sigmoid`, operation by operation."""
    e = exp_nonpositive(-tl.abs(x))
    return tl.div_rn(tl.where(x >= 0, 1.0, e), 1.0 + e)


@triton.jit
def _silu_kernel(x_ptr, y_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + at, at < n, 0.0)
    tl.store(y_ptr + at, x * sigmoid(x), at < n)


@triton.jit
def _silu_gradient_kernel(x_ptr, g_ptr, out_ptr, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x, g = tl.load(x_ptr + at, at < n, 0.0), tl.load(g_ptr + at, at < n, 0.0)
    s = sigmoid(x)
    tl.store(out_ptr + at, g * (s * (1.0 + x * (1.0 - s))), at < n)


@triton.jit
def _scale_kernel(x_ptr, a_ptr, b_ptr, n, BOTH: tl.constexpr, TILE: tl.constexpr):
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = tl.load(x_ptr + lane * n + at, at < n, 0.0) * tl.load(a_ptr + lane)
    if BOTH:
        x = x * tl.load(b_ptr + lane)
    tl.store(x_ptr + lane * n + at, x, at < n)


@triton.jit(do_not_specialize=["stream"])  # which may be 1, and philox wants a number
def _words_kernel(
    out_ptr, seeds_ptr, step_ptr, site_ptr, stream, first_ptr, count, HAS_FIRST: tl.constexpr, TILE: tl.constexpr
):
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = at.to(tl.int64)
    if HAS_FIRST:
        index += tl.load(first_ptr)
    c0, c1, c2, c3 = philox(index, tl.load(seeds_ptr + lane), stream, tl.load(step_ptr), tl.load(site_ptr))
    out, mask = out_ptr + (lane * count + at) * 4, at < count
    tl.store(out, c0.to(tl.int32, bitcast=True), mask)
    tl.store(out + 1, c1.to(tl.int32, bitcast=True), mask)
    tl.store(out + 2, c2.to(tl.int32, bitcast=True), mask)
    tl.store(out + 3, c3.to(tl.int32, bitcast=True), mask)


@triton.jit(do_not_specialize=["stream"])
def _signs_kernel(out_ptr, seeds_ptr, step_ptr, site_ptr, stream, SIZE: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, SIZE)
    key = tl.load(seeds_ptr + lane), stream, tl.load(step_ptr), tl.load(site_ptr)
    tl.store(out_ptr + lane * SIZE + number, 1.0 - 2.0 * (draws16(number, key) & 1).to(tl.float32))


@triton.jit
def _adamw_kernel(
    flat_ptr,
    mean_ptr,
    square_ptr,
    gradient_ptr,
    alive_ptr,
    numbers_ptr,
    decaying_ptr,
    n,
    DECAYS: tl.constexpr,
    TILE: tl.constexpr,
):
    lane = tl.program_id(1).to(tl.int64)
    if tl.load(alive_ptr + lane) != 0:
        of_lane = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        mask, at = of_lane < n, lane * n + of_lane
        numbers = numbers_ptr + lane * 9
        b1, past1 = tl.load(numbers + 1), tl.load(numbers + 2)
        b2, past2 = tl.load(numbers + 3), tl.load(numbers + 4)
        g, w = tl.load(gradient_ptr + at, mask, 0.0), tl.load(flat_ptr + at, mask, 0.0)
        mean = tl.load(mean_ptr + at, mask, 0.0) * b1 + g * past1
        square = tl.load(square_ptr + at, mask, 0.0) * b2 + g * g * past2
        scale = tl.sqrt_rn(tl.div_rn(square, tl.load(numbers + 7))) + tl.load(numbers + 5)
        update = tl.div_rn(tl.div_rn(mean, tl.load(numbers + 6)), scale)
        if DECAYS:
            decay = tl.load(numbers + 8)
            decaying = tl.load(decaying_ptr + of_lane, mask, 0).to(tl.int32) * (decay > 0).to(tl.int32)
            update = tl.where(decaying > 0, update + w * decay, update)
        tl.store(mean_ptr + at, mean, mask)
        tl.store(square_ptr + at, square, mask)
        tl.store(flat_ptr + at, w - tl.load(numbers) * update, mask)


def silu(x: Tensor) -> Tensor:
    """`activations.silu` of float32 x of any shape."""
    x, n = x.contiguous(), x.numel()
    y = torch.empty_like(x)
    _silu_kernel[grid(triton.cdiv(n, _TILE))](x, y, n, TILE=_TILE, **_BIG)
    return y


def silu_gradient(x: Tensor, g: Tensor) -> Tensor:
    """The gradient of x from g, that of silu(x)."""
    x, g, n = x.contiguous(), g.contiguous(), x.numel()
    out = torch.empty_like(x)
    _silu_gradient_kernel[grid(triton.cdiv(n, _TILE))](x, g, out, n, TILE=_TILE, **_BIG)
    return out


def scale(x: Tensor, a: Tensor, b: Tensor | None) -> Tensor:
    """x [L, …], contiguous, times a [L], then times b [L]; in place."""
    n = x[0].numel()
    _scale_kernel[grid(triton.cdiv(n, _TILE), len(x))](
        x, a.contiguous(), a if b is None else b.contiguous(), n, BOTH=b is not None, TILE=_TILE, **_BIG
    )
    return x


def words(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int, first: Tensor | int = 0) -> Tensor:
    """`philox.words` on a device."""
    out = torch.empty(len(seeds), count, 4, dtype=torch.int32, device=seeds.device)
    has_first = isinstance(first, Tensor)
    at, tile = (first if isinstance(first, Tensor) else step), 128
    if not has_first and first:
        raise ValueError(f"first: found {first}; accepted: 0 or a tensor")
    pointers = out, seeds.contiguous(), step, site, stream, at
    places = grid(triton.cdiv(count, tile), len(seeds))
    _words_kernel[places](*pointers, count, HAS_FIRST=has_first, TILE=tile, num_warps=4)
    return out


def signs(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int) -> Tensor:
    """`philox.signs` of a power of two on a device, by draws of a stream."""
    out = torch.empty(len(seeds), count, device=seeds.device)
    _signs_kernel[grid(len(seeds))](out, seeds.contiguous(), step, site, stream, SIZE=count, num_warps=1)
    return out


def adamw(
    flat: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    alive: Tensor,
    numbers: Tensor,
    decaying: Tensor | None,
) -> None:
    """`adam.adamw`, in place: flat, mean, square, gradient [L, P], alive bool [L], numbers [L, 9] as in adam.NUMBERS,
    decaying bool [P]: which elements have weight decay, None for none."""
    n = flat.shape[1]
    bits = alive.view(torch.uint8)
    marks = bits if decaying is None else decaying.view(torch.uint8)
    tensors = flat, mean, square, gradient.contiguous(), bits, numbers.contiguous(), marks
    _adamw_kernel[grid(triton.cdiv(n, _TILE), len(flat))](*tensors, n, DECAYS=decaying is not None, TILE=_TILE, **_BIG)
