"""Philox, its words and signs as Triton code, with the bits of their definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops import philox as definition
from fp4dse.kernels.ops.launching import launch_grid

_M0, _M1, _W0, _W1 = (tl.constexpr(n) for n in (*definition.MULTIPLIERS, *definition.WEYL))


@triton.jit
def philox(index, seed, stream, step, site):
    """Philox 4×32-10 of counters (index, step, site, 0) and key (seed, stream): four uint32 of index's shape.

    The first two rounds are scalar in half of the state; there seed and step count with all their 64 bits, as in
    the definition.
    """
    seed, step, site = seed.to(tl.uint64), step.to(tl.uint64), site.to(tl.uint64)
    k0, k1 = seed.to(tl.uint32) + _W0, stream.to(tl.uint32) + _W1
    p0, p1 = index.to(tl.uint32).to(tl.uint64) * _M0, site * _M1
    q0 = ((p1 >> 32) ^ step ^ seed) * _M0
    q1 = ((p0 >> 32).to(tl.uint32) ^ stream.to(tl.uint32)).to(tl.uint64) * _M1
    c0, c1 = (q1 >> 32).to(tl.uint32) ^ (p1.to(tl.uint32) ^ k0), q1.to(tl.uint32)
    c2, c3 = p0.to(tl.uint32) ^ ((q0 >> 32).to(tl.uint32) ^ k1), q0.to(tl.uint32) | tl.full(c0.shape, 0, tl.uint32)
    for _ in tl.static_range(8):
        k0, k1 = k0 + _W0, k1 + _W1
        p0, p1 = c0.to(tl.uint64) * _M0, c2.to(tl.uint64) * _M1
        c0, c2 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0, (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1, c3 = p1.to(tl.uint32), p0.to(tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def half_words(chunk, key):
    """Random bits as `random16` gives them, int32 [n, 16]. chunk: numbers in the lane of runs of 16, [n]."""
    words = words_of_runs(chunk, key)
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16).to(tl.int32), (chunk.shape[0], 16))


@triton.jit
def words_of_runs(chunk, key):
    """The words 0, 1, 2, 3 of the two counters of runs of 16, in order: uint32 [n, 2, 2, 2]."""
    seed, stream, step, site = key
    index = chunk[:, None] * 2 + tl.arange(0, 2)[None, :]
    c0, c1, c2, c3 = philox(index, seed, stream, step, site)
    return tl.join(tl.join(c0, c2), tl.join(c1, c3))


@triton.jit
def draws16(number, key):
    """The 16 random bits of numbered things, int32 [n], as `draws16` of the definition gives them."""
    seed, stream, step, site = key
    c0, c1, c2, c3 = philox(number >> 3, seed, stream, step, site)
    word = number >> 1 & 3
    drawn = tl.where(word < 2, tl.where(word == 0, c0, c1), tl.where(word == 2, c2, c3)).to(tl.int32, bitcast=True)
    return drawn >> (number & 1) * 16 & 0xFFFF


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


def words(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int, first: Tensor | int = 0) -> Tensor:
    """`philox.words` on a device."""
    out = torch.empty(len(seeds), count, 4, dtype=torch.int32, device=seeds.device)
    has_first = isinstance(first, Tensor)
    at, tile = (first if isinstance(first, Tensor) else step), 128
    if not has_first and first:
        raise ValueError(f"first: found {first}; accepted: 0 or a tensor")
    pointers = out, seeds.contiguous(), step, site, stream, at
    programs = launch_grid(triton.cdiv(count, tile), len(seeds))
    _words_kernel[programs](*pointers, count, HAS_FIRST=has_first, TILE=tile, num_warps=4)
    return out


def why_not(_seeds: Tensor, count: int = 1) -> str | None:
    """The reason why `signs` does not make so many of a lane, or None if it does; `words` makes any number."""
    return f"count: found {count}; accepted: powers of two" if count & (count - 1) else None


def signs(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int) -> Tensor:
    """`philox.signs` of a power of two on a device, by draws of a stream."""
    out = torch.empty(len(seeds), count, device=seeds.device)
    _signs_kernel[launch_grid(len(seeds))](out, seeds.contiguous(), step, site, stream, SIZE=count, num_warps=1)
    return out
