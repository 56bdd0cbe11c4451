"""Tiles of an operand on a GPU: loaded so that a thread holds 16 neighbours of a block, rotated, quantized, written."""

from __future__ import annotations

import triton
import triton.language as tl

from fp4dse.kernels.ops.rotation.triton import hadamard
from fp4dse.kernels.quant.triton.blocks import block_maximum, decoded, pair_maximum, quantized, scaled
from fp4dse.kernels.quant.triton.codecs import coded
from fp4dse.kernels.quant.triton.codes import codes_of, nearest_codes, scale_codes, signs_of
from fp4dse.kernels.quant.triton.eights import put, put_blocks, put_fp8
from fp4dse.kernels.quant.triton.numbers import address, as_float, opaque, unknown


@triton.jit
def load(ptr, mask):
    """Zero where masked."""
    return tl.load(ptr, mask=mask, other=0)


@triton.jit
def singles(x, B: tl.constexpr, COLUMNS: tl.constexpr):
    """Blocks float32 [n, B] of a tile as `tile` gives it, and their maxima [n]."""
    if x.dtype == tl.int32:
        low, high = opaque(as_float(x << 16)), opaque(as_float(x & -0x10000))
        if COLUMNS:
            HALF: tl.constexpr = x.shape[0]
            COUNT: tl.constexpr = x.shape[1] // B
            # in two parts, so that the last step is a maximum of each block: then random bits are drawn where they go
            word = pair_maximum(tl.reshape(x, (HALF * COUNT * 2, B // 2)))
            parts = tl.reshape(tl.join(word << 16, word), (HALF, COUNT, 2, 2)) & 0x7FFF0000
            parts = tl.reshape(tl.permute(parts, (0, 3, 1, 2)), (2 * HALF * COUNT, 2))
            amax = block_maximum(as_float(parts))
            blocks = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (2 * HALF * COUNT, B))
        else:
            word = pair_maximum(tl.reshape(x, (x.shape[0] * x.shape[1] * 2 // B, B // 2)))
            amax = block_maximum(as_float(tl.join(word << 16, word) & 0x7FFF0000))
            blocks = tl.reshape(tl.join(low, high), (amax.shape[0], B))
    else:
        blocks = tl.reshape(x, (x.shape[0] * x.shape[1] // B, B))
        amax = block_maximum(tl.abs(blocks))
    return blocks, amax


@triton.jit
def rotated(x, signs_ptr, lane, SIZE: tl.constexpr, FACTOR: tl.constexpr):
    """x [n, W] as float32, consecutive groups of SIZE of each row rotated with the lane's signs, if any."""
    if x.dtype != tl.int32:
        x = x.to(tl.float32)
    if SIZE > 0:
        groups = tl.reshape(x, (x.shape[0] * x.shape[1] // SIZE, SIZE))
        if signs_ptr is not None:
            groups = groups * tl.load(signs_ptr + lane * SIZE + tl.arange(0, SIZE))[None, :]
        x = tl.reshape(hadamard(groups, SIZE) * FACTOR, x.shape)
    return x


@triton.jit
def tile(
    x_ptr,
    row0,
    rows,
    column0,
    width,
    P: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """The tile [P, W] at (row0, column0) of a lane's operand [rows, width], zero beyond its end.

    x_ptr: of the lane's x [rows, width], or [width, rows] where COLUMNS. WHOLE: no column of the tile lies beyond the
    width. PAIRS: x holds bfloat16 numbers, and two that lie side by side are read as one word, int32, the first in its
    lower half: the tile is [P, W / 2], or [P / 2, W] where COLUMNS, two of whose rows share words.
    """
    if PAIRS and COLUMNS:
        # of which nothing is known to follow on anything, so that a thread takes 16 numbers of one pair of rows
        row, chunk = tl.arange(0, P // 2), tl.arange(0, W // 16) * 16
        mask = (row < (rows - row0) >> 1)[:, None]
        if not WHOLE:
            mask = mask & (chunk < width - column0)[None, :]
        there = x_ptr + row[:, None] * 2 + chunk[None, :] * rows + (column0 * rows + row0)
        there = address(there.to(tl.int64)[:, :, None], tl.arange(0, 16)[None, None, :], (rows * 2).to(tl.int32))
        x = tl.reshape(load(there.to(tl.pointer_type(tl.int32)), mask[:, :, None]), (P // 2, W))
    elif PAIRS:
        chunk = tl.arange(0, P * W // 16)
        row, column = chunk // (W // 16), chunk % (W // 16) * 8
        mask = row < rows - row0
        if not WHOLE:
            mask = mask & (column * 2 < width - column0)
        there = x_ptr.to(tl.pointer_type(tl.int32)) + (row * (width >> 1) + column)[:, None] + tl.arange(0, 4)[None, :]
        there += row0 * width + column0 >> 1
        x = tl.permute(tl.join(load(there, mask[:, None]), load(there + 4, mask[:, None])), (0, 2, 1))
        x = tl.reshape(x, (P, W // 2))
    elif COLUMNS:
        # this hides that more than two neighbours follow: a thread takes two rows, and of each 16 numbers
        row = tl.arange(0, P) // 2 * 2 + tl.arange(0, P) % 2
        chunk = tl.arange(0, W // 16) * 16 + unknown(tl.cast(width * 0, tl.int32))  # so that addresses are not kept
        mask = (row < rows - row0)[None, None, :]
        if not WHOLE:
            mask = mask & (chunk < width - column0)[:, None, None]
        column = chunk[:, None, None] + tl.arange(0, 16)[None, :, None]
        corner = x_ptr + (column0 * rows + row0)
        x = tl.permute(load(corner + column * rows + row[None, None, :], mask), (2, 0, 1))
        x = tl.reshape(x, (P, W))
    else:
        # in two parts, so that a thread takes 16 neighbours, of which it cannot load more than 8 at a time
        chunk = tl.arange(0, P * W // 16)
        row, column = chunk // (W // 16), chunk % (W // 16) * 16
        mask = row < rows - row0
        if not WHOLE:
            mask = mask & (column < width - column0)
        corner = x_ptr + (row0 * width + column0)
        there = corner + (row * width + column)[:, None] + tl.arange(0, 8)[None, :]
        x = tl.permute(tl.join(load(there, mask[:, None]), load(there + 8, mask[:, None])), (0, 2, 1))
        x = tl.reshape(x, (P, W))
    return x


@triton.jit
def write(
    x,
    out_ptr,
    scales_ptr,
    wide_ptr,
    lane,
    row0,
    rows,
    column0,
    width,
    exponent,
    numbers,
    B: tl.constexpr,
    WHOLE: tl.constexpr,
    HELD: tl.constexpr,
    COLUMNS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ADAPTIVE: tl.constexpr,
    UNUSUAL: tl.constexpr,
    CODEC: tl.constexpr,
    FP8: tl.constexpr,
):
    """Quantize a tile x, float32 [P, W] or words as `tile` gives them, of a lane's operand [rows, width], and write it.

    out: the operand as bfloat16 or float32 [L, rows, width]; or uint8 codes [L, rows, width / 2] and in scales uint8
    [L, rows, width / B], for the general codec; or, with FP8, codes and flags as in eights.py, under the power of this
    exponent. WHOLE: no column of the tile lies beyond the width. HELD: as in `quantized`. CODEC: one of limits.CODECS.
    Returns what `put_fp8` does.
    """
    PAIRS: tl.constexpr = x.dtype == tl.int32
    P: tl.constexpr = x.shape[0] * (2 if PAIRS and COLUMNS else 1)
    W: tl.constexpr = x.shape[1] * (2 if PAIRS and not COLUMNS else 1)
    row = tl.arange(0, P)
    chunk = (row0 + row)[:, None] * (width // 16) + (column0 // 16 + tl.arange(0, W // 16))[None, :]
    blocks, amax = singles(x, B, COLUMNS)
    chunk = tl.reshape(chunk, (P * W // 16,)).to(tl.int32)
    top, missed = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    BY_BLOCKS: tl.constexpr = FP8 > 0 and CODEC == "block" and B <= 128
    NEAREST: tl.constexpr = FP8 == 0 and scales_ptr is not None and not STOCHASTIC and not ADAPTIVE and UNUSUAL < 2
    if NEAREST:
        y, scale = scaled(blocks, amax, numbers, UNUSUAL)
    elif CODEC == "block":
        q, scale = quantized(blocks, amax, chunk, numbers, HELD, STOCHASTIC, ADAPTIVE, UNUSUAL)
        if BY_BLOCKS:
            pointers, place = (out_ptr, scales_ptr, wide_ptr), (lane, row0, rows, column0, width, exponent)
            top, missed = put_blocks(q, scale, blocks, *pointers, *place, numbers[2], W, WHOLE, FP8)
        elif FP8 > 0 or scales_ptr is None:
            out = decoded(blocks, q, scale)
    else:
        number = (row0 + row)[:, None] * (width // B) + (column0 // B + tl.arange(0, W // B))[None, :]
        number = tl.reshape(number, (P * W // B,)).to(tl.int32)
        out = coded(blocks, amax, chunk, number, numbers, CODEC, HELD, STOCHASTIC, UNUSUAL)
    if FP8 > 0 and not BY_BLOCKS:
        out = tl.reshape(out, (P, W))
        place = lane, row0, rows, column0, width, exponent
        top, missed = put_fp8(out, out_ptr, scales_ptr, wide_ptr, *place, WHOLE, FP8)
    elif FP8 == 0 and scales_ptr is None:
        put(tl.reshape(out, (P, W)), out_ptr, lane, row0, rows, column0, width, WHOLE)
    elif FP8 == 0:
        stored = tl.reshape(scale_codes(scale, numbers[3]), (P, W // B))
        put(stored, scales_ptr, lane, row0, rows, column0 // B, width // B, WHOLE)
        if NEAREST:
            codes = nearest_codes(y, signs_of(x, B, COLUMNS), scale == scale, numbers[2])
            out_ptr = out_ptr.to(tl.pointer_type(tl.int32))
        else:
            codes = codes_of(blocks, q, scale, numbers[2])
        OF_ONE: tl.constexpr = 8 if NEAREST else 2  # elements
        codes = tl.reshape(codes, (P, W // OF_ONE))
        put(codes, out_ptr, lane, row0, rows, column0 // OF_ONE, width // OF_ONE, WHOLE)
    return top, missed
