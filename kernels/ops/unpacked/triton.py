"""Packed operands as numbers in one kernel: a byte of codes a thread, whose elements and scale are read from tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.quant.packed import codebook

_TILE = 512
"""Bytes of codes of a program."""


@triton.jit
def _unpacked_kernel(
    codes_ptr, scales_ptr, elements_ptr, grid_ptr, out_ptr, size, HALF: tl.constexpr, TILE: tl.constexpr
):
    """TILE bytes of a lane. size: bytes of a lane; HALF: bytes that share a scale."""
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < size
    codes = tl.load(codes_ptr + lane * size + at, inside, 0).to(tl.int32)
    code = tl.load(scales_ptr + lane * (size // HALF) + at // HALF, inside, 0).to(tl.int32)
    scale = tl.load(grid_ptr + lane * 256 + code)
    low = tl.load(elements_ptr + lane * 16 + (codes & 15))
    high = tl.load(elements_ptr + lane * 16 + (codes >> 4))
    values = tl.reshape(tl.join(low * scale, high * scale), (2 * TILE,))
    to = tl.program_id(0).to(tl.int64) * (2 * TILE) + tl.arange(0, 2 * TILE)
    tl.store(out_ptr + lane * (2 * size) + to, values, to < 2 * size)


def unpacked(codes: Tensor, scales: Tensor, quantizers: Sequence[Quantizer]) -> Tensor:
    """`unpacked` of its definition."""
    lanes, rows, half = codes.shape
    out = codes.new_empty(lanes, rows, 2 * half, dtype=torch.float32)
    elements, grids = _tables(tuple(quantizers), codes.device)
    grid = launch_grid(triton.cdiv(rows * half, _TILE), lanes)
    inputs = codes.contiguous(), scales.contiguous(), elements, grids
    how = {"HALF": half // scales.shape[2], "TILE": _TILE, "num_warps": 4, "enable_fp_fusion": False}
    _unpacked_kernel[grid](*inputs, out, rows * half, **how)
    return out


@cache
def _tables(quantizers: tuple[Quantizer, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Elements by their code, float32 [L, 16], and scales by theirs, NaN after the last: float32 [L, 256]."""
    books = [codebook(quantizer) for quantizer in quantizers]
    missing = [torch.full((256 - len(scales),), torch.nan) for _, scales in books]
    scales = [torch.cat([of, more]) for (_, of), more in zip(books, missing, strict=True)]
    return torch.stack([elements for elements, _ in books]).to(device), torch.stack(scales).to(device)
