"""Counter-based random numbers: Philox 4×32-10 (Salmon et al., SC 2011) in torch integer arithmetic.

    key      (seed, stream)
    counter  (index, step, site, call)

A random number is a pure function of what it is for, so it is the same on every device, in every launch shape and
whatever the neighbours draw. `step`, `site` and `call` may be tensors: the step lives in device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor

from fp4dse.kernels.dispatch import Operation

_PHILOX = Operation(__name__, native=True)

STREAMS = {"rounding": 1, "signs": 2, "init": 3, "data": 4, "order": 5, "scales": 6, "batch": 7, "factors": 8}
"""Uses of random numbers. Different streams never share a key."""

PIECE = 1 << 16
"""Counters, of all lanes together, that draws of 16 bits make at a time."""
PAIRS = 1 << 15
"""Pairs, of all lanes together, that normal draws make at a time: they stay in a processor's cache."""
LARGE = 1 << 18
"""Normal numbers, of all lanes together, from which a draw is worth building native code and starting threads."""
MOST_THREADS = 16
"""That make one draw."""

_MASK = 0xFFFFFFFF
MULTIPLIERS = _M0, _M1 = 0xD2511F53, 0xCD9E8D57
WEYL = _W0, _W1 = 0x9E3779B9, 0xBB67AE85
"""The constants of Philox 4×32: of its rounds, and of what is added to its keys."""


def philox4x32(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Ten rounds of Philox on int64 tensors that hold 32-bit words; four such words back."""
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # int64 wraps: the low 64 bits of the product are what is wanted
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def words(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int, first: Tensor | int = 0) -> Tensor:
    """int32 [L, count, 4]: the four words of `count` counters from `first` on, for each lane's seed.

    seeds: int64 [L]; step, site, first: int64 scalars. Call number 0: a site is used once a step.
    """
    index = first + torch.arange(count, dtype=torch.int64, device=seeds.device)[None, :]
    key = seeds[:, None]
    zero = torch.zeros_like(key)
    out = philox4x32(index + zero, step + zero, site + zero, zero, key, zero + stream)
    return torch.stack([w.to(torch.int32) for w in out], dim=-1)


def draws16(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int) -> Tensor:
    """int16 [L, count], uniform 16 bits. Element e: 16-bit half e % 2 of word (e // 2) % 4 of counter e // 8.

    Large draws are made piece by piece, since making one takes several times its memory.
    """
    kernels = _PHILOX.kernels(seeds)
    make = kernels.words if kernels else words
    counters = max(2, -(-count // 8))  # for one counter alone a kernel of `words` would be compiled anew
    piece = counters if seeds.is_cuda else -(-counters // -(-counters * len(seeds) // PIECE))
    pieces = (
        make(seeds, stream, step, site, min(piece, counters - first), torch.full((), first, device=seeds.device))
        for first in range(0, counters, piece)
    )
    if counters <= piece:
        drawn = next(pieces)
    else:
        drawn = torch.empty(len(seeds), counters, 4, dtype=torch.int32, device=seeds.device)
        for out, made in zip(drawn.split(piece, dim=1), pieces, strict=True):
            out.copy_(made)
    return drawn.view(torch.int16).view(len(seeds), -1)[:, :count].contiguous()


def random16(seeds: Tensor, stream: int, step: Tensor, site: Tensor, count: int) -> Tensor:
    """The same bits as int32 [L, count], uniform in 0 … 65535."""
    return draws16(seeds, stream, step, site, count).to(torch.int32) & 0xFFFF


def signs(seeds: Tensor, step: Tensor, site: Tensor, count: int) -> Tensor:
    """float32 [L, count], ±1: the lowest bit of each 16-bit draw."""
    kernels = _PHILOX.kernels(seeds, count)
    if kernels and hasattr(kernels, "signs"):  # native code has words alone
        return kernels.signs(seeds, STREAMS["signs"], step, site, count)
    return many_signs(seeds, step, site, count)


def many_signs(seeds: Tensor, step: Tensor, site: Tensor, count: int) -> Tensor:
    """The same, of any number: on a GPU `signs` makes all of a lane at once."""
    return 1.0 - 2.0 * (random16(seeds, STREAMS["signs"], step, site, count) & 1).to(torch.float32)


def random32(seeds: Tensor, stream: int, step: int, site: int, count: int) -> Tensor:
    """int64 [L, count], uniform in 0 … 2^32-1; element e is word e % 4 of counter e // 4."""
    as_tensor = torch.tensor
    four = words(seeds, stream, as_tensor(step), as_tensor(site), -(-count // 4))
    return four.view(len(seeds), -1)[:, :count].to(torch.int64) & _MASK


def normal(seeds: Tensor, stream: int, step: int, site: int, count: int, std: float = 1.0) -> Tensor:
    """float32 [L, count], normal with this standard deviation, by Box–Muller in float64 (on the CPU, so that devices
    agree). The numbers of a lane are radius · cos(angle) of all pairs, then radius · sin(angle) of all.

    Draws are made piece by piece, and large ones, the weights of models, by as many threads as torch may use, 16 at
    most: where workers share a machine, each keeps to its part. No bit depends on either.
    """
    keys, half = seeds.cpu(), -(-count // 2)
    out = torch.empty(len(keys), count)
    is_large = out.numel() >= LARGE  # native code is not built for others
    kernels = _PHILOX.kernels(keys) if is_large else None
    draw = partial(kernels.words if kernels else words, keys, stream, torch.tensor(step), torch.tensor(site))
    piece = max(1, PAIRS // max(1, len(keys)))
    pieces = [range(first, min(first + piece, half)) for first in range(0, half, piece)]
    make = partial(_write_pairs, out, draw, std)
    threads = min(MOST_THREADS, torch.get_num_threads(), len(pieces)) if is_large else 1
    if threads > 1:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(make, pieces))
    else:
        for pairs in pieces:
            make(pairs)
    return out


def _write_pairs(out: Tensor, draw: Callable[..., Tensor], std: float, pairs: range) -> None:
    """Write some pairs of `normal` to out [L, count]."""
    half = -(-out.shape[1] // 2)
    if len(pairs) == half:  # all at once
        radius, angle = _uniform(draw, range(2 * half)).split(half, 1)
    else:
        radius, angle = (_uniform(draw, range(of + pairs.start, of + pairs.stop)) for of in (0, half))
    radius.log_().mul_(-2).sqrt_()
    angle.mul_(2 * torch.pi)
    for of_angle, first in (torch.cos, pairs.start), (torch.sin, half + pairs.start):
        to = out[:, first : first + len(pairs)]  # of an odd number the last sine is left out
        to.copy_(of_angle(angle).mul_(radius)[:, : to.shape[1]])
        if std != 1:
            to.mul_(std)


def _uniform(draw: Callable[..., Tensor], elements: range) -> Tensor:
    """float64 [L, n] between 0 and 1: (u + 1/2) / 2^32, u being these elements of `random32`, of which `draw` makes the
    words."""
    first = elements.start // 4
    four = draw(-(-elements.stop // 4) - first, torch.tensor(first)).flatten(1)
    mine = four[:, elements.start - 4 * first : elements.stop - 4 * first]
    return mine.view(torch.uint32).to(torch.float64).add_(0.5).mul_(2.0**-32)
