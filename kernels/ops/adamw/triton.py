"""AdamW as one kernel that reads and writes each tensor once, with the bits of its definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import FLAT, TILE, launch_grid
from fp4dse.kernels.ops.rounded.copies import ALIGNED, Copies

_ALIGNED = tl.constexpr(ALIGNED)


@triton.jit
def _write_copies(x, of_lane, lane, tile, values_ptr, places_ptr, tiles_ptr, IS_ALIGNED: tl.constexpr):
    """The numbers x of a tile of a lane, rounded, to the copies that have some of them (rounded.copies.Copies)."""
    for number in range(tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)):
        place = places_ptr + 3 * number
        start, size, first = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        if IS_ALIGNED:
            start, size = tl.multiple_of(start, _ALIGNED), tl.multiple_of(size, _ALIGNED)
            first = tl.multiple_of(first, _ALIGNED)
        within = of_lane - start
        tl.store(values_ptr + first + lane * size + within, x.to(tl.bfloat16), (within >= 0) & (within < size))


@triton.jit
def _adamw_kernel(
    flat_ptr,
    mean_ptr,
    square_ptr,
    gradient_ptr,
    alive_ptr,
    numbers_ptr,
    decaying_ptr,
    values_ptr,
    places_ptr,
    tiles_ptr,
    n,
    DECAYS: tl.constexpr,
    COPIES: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
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
        w = w - tl.load(numbers) * update
        tl.store(flat_ptr + at, w, mask)
        if COPIES:
            _write_copies(w, of_lane, lane, tl.program_id(0), values_ptr, places_ptr, tiles_ptr, IS_ALIGNED)


def adamw(
    flat: Tensor,
    mean: Tensor,
    square: Tensor,
    gradient: Tensor,
    alive: Tensor,
    numbers: Tensor,
    decaying: Tensor | None,
    copies: Copies | None = None,
) -> None:
    """`adamw.adamw`, in place: flat, mean, square, gradient [L, P], alive bool [L], numbers [L, 9] as in adamw.NUMBERS,
    decaying bool [P]: which elements have weight decay, None for none; copies: of views into flat, or None."""
    n = flat.shape[1]
    bits = alive.view(torch.uint8)
    marks = bits if decaying is None else decaying.view(torch.uint8)
    tensors = flat, mean, square, gradient.contiguous(), bits, numbers.contiguous(), marks
    of_copies = (flat, flat, flat) if copies is None else (copies.values, copies.places, copies.tiles)
    flags = {"DECAYS": decaying is not None, "COPIES": copies is not None}
    flags["IS_ALIGNED"] = copies is not None and copies.is_aligned
    _adamw_kernel[launch_grid(triton.cdiv(n, TILE), len(flat))](*tensors, *of_copies, n, **flags, **FLAT)
