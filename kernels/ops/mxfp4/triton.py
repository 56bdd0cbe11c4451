"""Packed MXFP4 to FP8, back, and to columns, in one kernel each that reads and writes every byte once.

    codes to FP8   a table has FP8's codes of E2M1's eight magnitudes for each exponent, 8 bytes. A code without its
                   sign is the number of a byte therein: PRMT takes four of them at once, another one their signs
    to columns     a program has a tile of 128 rows. In FP8 a thread has eight rows of a block, whose 4 × 4 bytes PRMT
                   transposes: nothing goes through shared memory, and 16 threads write a line of 128 bytes
    FP8 to codes   FP8's numbers rise with their codes. E2M1's code is the number of thresholds that are reached, seven
                   for each distance from the block's largest; a word's four codes are compared at once

Which FP8 it is, only the tables know.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.launching import OTHERS, launch_grid
from fp4dse.kernels.ops.mxfp4 import BLOCK, E4M3, NAN, ONE, TILE, Fp8, e2m1_steps, fp8_codes, window
from fp4dse.kernels.quant.triton.numbers import SIGNS, in_four, none, permuted, prmt

_NAN, _ONE = tl.constexpr(NAN), tl.constexpr(ONE)
_MOST = tl.constexpr(NAN - 3)
"""The largest scale of a block of FP32 numbers: that of those from 2^127 on, which are 4 to 8 times as large."""
_TO_FP8 = {"ROWS": 16, "num_warps": 1, "enable_fp_fusion": False}
_TO_FP8_COLUMNS = {"num_warps": 1, "enable_fp_fusion": False}
_TO_COLUMNS = {"num_warps": 4, "enable_fp_fusion": False}
_FROM_FP8 = {"ROWS": 32, "num_warps": 1, "enable_fp_fusion": False}
"""Arguments of launches: rows of 128 numbers of a program. The fastest that were measured (docs/log.md)."""


@triton.jit
def higher(a, b):
    """The larger of two integers. Tests: a twin that the interpreter is quick at."""
    return tl.maximum(a, b)


@triton.jit
def _power(code):
    """The bits of 2^(code - 127), float32."""
    return tl.where(code > 0, code << 23, 0x00400000)


@triton.jit
def _blocks(codes_ptr, scales_ptr, row, rows, block, blocks):
    """Blocks of some rows: words of 8 codes, int32 [n, m, 4], codes of their scales [n, m], and these where they count,
    else -1. row: int64 [n]; block: [m]."""
    inside = (row < rows)[:, None] & (block < blocks)[None, :]
    at = row[:, None] * blocks + block[None, :]
    words = tl.load(codes_ptr + at[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], inside[:, :, None], 0)
    scale = tl.load(scales_ptr + at, inside, 0).to(tl.int32)
    holds = tl.reduce(words & 0x77777777, 2, higher) > 0
    return words, scale, tl.where(holds & (scale != _NAN), scale, -1)


@triton.jit
def _tile_of(top, HIGHEST: tl.constexpr):
    """The code of a tile's scale, from the largest of its blocks that count."""
    return tl.where(top < 0, _ONE, tl.maximum(top - HIGHEST, 0))


@triton.jit
def _below(counting, tile, LOWEST: tl.constexpr):
    """1 for blocks below the window."""
    return ((counting >= 0) & (counting - tile < LOWEST)).to(tl.int32)


@triton.jit
def _bytes(words, scale, tile, table_ptr, FIRST: tl.constexpr, HIGHEST: tl.constexpr):
    """FP8 codes, four a word, of words of 8 codes [n, m, 4]: of their lower and of their upper halves. tile: as scale,
    or so that it is broadcast."""
    row = tl.where(scale == _NAN, HIGHEST + 1, tl.minimum(tl.maximum(scale - tile, FIRST), HIGHEST)) - FIRST
    low, high = tl.load(table_ptr + 2 * row)[:, :, None], tl.load(table_ptr + 2 * row + 1)[:, :, None]
    return _four(words, low, high), _four(words >> 16, low, high)


@triton.jit
def _four(codes, low, high):
    """The bytes of a table of 8 whose numbers are the lower 3 bits of a word's lower 4 codes, with the codes' signs."""
    signs = permuted(SIGNS, SIGNS, codes)  # bytes of 0x80, or 0xFF with a sign
    return permuted(low, high, codes & 0x77777777) | signs << 7 & SIGNS


@triton.jit
def _to_fp8_kernel(
    codes_ptr,
    scales_ptr,
    table_ptr,
    out_ptr,
    factor_ptr,
    outside_ptr,
    rows,
    blocks,
    tiles,
    FIRST: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One tile of ROWS rows. rows: of all lanes; blocks, tiles: of a row."""
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    number = tl.program_id(0) % tiles
    words, scale, counting = _blocks(codes_ptr, scales_ptr, row, rows, number * 4 + tl.arange(0, 4), blocks)
    tile = _tile_of(tl.reduce(counting, 1, higher), HIGHEST)
    low, high = _bytes(words, scale, tile[:, None], table_ptr, FIRST, HIGHEST)
    at, inside = row * tiles + number, row < rows
    whole = tl.reshape(tl.join(low, high), (ROWS, 32))
    tl.store(out_ptr + at[:, None] * 32 + tl.arange(0, 32)[None, :], whole, inside[:, None])
    tl.store(factor_ptr + at, _power(tile), inside)
    tl.store(outside_ptr + at, tl.reduce(_below(counting, tile[:, None], LOWEST), 1, higher).to(tl.uint8), inside)


@triton.jit
def _transposed(a, b, c, d):
    """Four words of 4 bytes as columns: words of the first, second, third and fourth bytes."""
    ab, cd = prmt(a, b, 0x5140), prmt(c, d, 0x5140)
    ab_, cd_ = prmt(a, b, 0x7362), prmt(c, d, 0x7362)
    return prmt(ab, cd, 0x5410), prmt(ab, cd, 0x7632), prmt(ab_, cd_, 0x5410), prmt(ab_, cd_, 0x7632)


@triton.jit
def _eight(word, low, high):
    """The bytes of a table of 8 of a word's codes of even and of odd number, with their signs. Those of the one half
    are in their place, those of the other 4 bits below."""
    magnitudes = word & 0x77777777
    a, b = permuted(low, high, magnitudes), permuted(low, high, magnitudes >> 16)
    return prmt(a, b, 0x6420) | word << 4 & SIGNS, prmt(a, b, 0x7531) | word & SIGNS


@triton.jit
def _columns_to_fp8_kernel(
    codes_ptr,
    scales_ptr,
    table_ptr,
    out_ptr,
    factor_ptr,
    outside_ptr,
    rows,
    blocks,
    FIRST: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    WHOLE: tl.constexpr,
    TALL: tl.constexpr,
):
    """A tile of 128 rows and two blocks of one lane, 8 rows of a block to a thread. WHOLE: no tile is filled in part,
    and nothing is masked. TALL: the tiles of a column stand along the first axis, else those of a row, which is faster.

    A block that does not count is as one far below: its numbers are zeros. NaN has a row of the table.
    """
    DOWN: tl.constexpr = 0 if TALL else 1
    number, lane = tl.program_id(DOWN).to(tl.int64), tl.program_id(2).to(tl.int64)
    tiles = tl.num_programs(0).to(tl.int64) if TALL else tl.num_programs(1)  # of a column
    block, group = tl.program_id(1 - DOWN) * 2 + tl.arange(0, 2), tl.arange(0, 16)
    begin = (lane * rows + number * 128) * blocks
    codes_ptr += begin * 4
    scales_ptr += begin
    at, left = group[:, None] * 8 * blocks + block[None, :], rows - number * 128
    here = WHOLE | (block < blocks)
    words, scales, counting = none(), none(), none()
    top, bottom = tl.full((16, 2), -1, tl.int32), tl.full((16, 2), -255, tl.int32)
    for row in tl.static_range(8):
        inside = WHOLE | (group * 8 + row < left)[:, None] & here[None, :]
        place = at + row * blocks
        word = tl.load(codes_ptr + place[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], inside[:, :, None], 0)
        words += (word,)
        scales += (tl.load(scales_ptr + place, inside, 0).to(tl.int32),)
    for row in tl.static_range(8):
        counts = (tl.reduce(words[row] & 0x77777777, 2, higher) > 0) & (scales[row] != _NAN)
        counting += (tl.where(counts, scales[row], -1),)
        top = tl.maximum(top, counting[row])
        bottom = tl.maximum(bottom, tl.where(counts, -scales[row], -255))
    tile = _tile_of(tl.reduce(top, 0, higher), HIGHEST)
    lows, highs, parts = none(), none(), none()
    for row in tl.static_range(8):
        line = tl.maximum(counting[row] - (tile + FIRST)[None, :], 0)
        line = tl.where(scales[row] == _NAN, HIGHEST + 1 - FIRST, line)
        low, high = tl.split(tl.load(table_ptr + (2 * line)[:, :, None] + tl.arange(0, 2)[None, None, :]))
        lows += (low,)
        highs += (high,)
        parts += in_four(tl.reshape(words[row], (16, 2, 2, 2)))
    out_ptr += ((lane * blocks + block) * 32 * tiles + number)[None, :] * 32 + group[:, None] * 2
    for word in tl.static_range(4):
        columns = none()  # words of rows 0 to 3: of columns 0, 2, 4, 6, 1, 3, 5, 7; then those of rows 4 to 7
        for four in tl.static_range(2):
            even_a, odd_a = _eight(parts[16 * four + word], lows[4 * four], highs[4 * four])
            even_b, odd_b = _eight(parts[16 * four + 4 + word], lows[4 * four + 1], highs[4 * four + 1])
            even_c, odd_c = _eight(parts[16 * four + 8 + word], lows[4 * four + 2], highs[4 * four + 2])
            even_d, odd_d = _eight(parts[16 * four + 12 + word], lows[4 * four + 3], highs[4 * four + 3])
            columns += _transposed(even_a, even_b, even_c, even_d)
            columns += _transposed(odd_a, odd_b, odd_c, odd_d)
        for column in tl.static_range(8):
            there = out_ptr + (word * 8 + column) * tiles * 32
            two = tl.join(columns[column // 2 + column % 2 * 4], columns[column // 2 + column % 2 * 4 + 8])
            tl.store(there[:, :, None] + tl.arange(0, 2)[None, None, :], two, here[None, :, None])
    of_tile = (lane * tiles + number) * blocks + block
    factor = tl.broadcast_to(_power(tile)[:, None], (2, 32))
    tl.store(factor_ptr + of_tile[:, None] * 32 + tl.arange(0, 32)[None, :], factor, here[:, None])
    below = (-tl.reduce(bottom, 0, higher) - tile < LOWEST).to(tl.uint8)
    tl.store(outside_ptr + of_tile, below, here)


@triton.jit
def _exponent(word, scale):
    """The exponents of four codes' numbers, of each column of 8 of a word: int32 of the lowest code, 0 for zero; to
    which the scale's code is added."""
    magnitude = word & 7
    return tl.where(magnitude > 0, (magnitude >> 1) + scale, -1)


@triton.jit
def _requantized(word, scale, new):
    """The code, 4 bits, of the lowest code of a word under the scale `new` in place of `scale`."""
    magnitude = word & 7
    moved = tl.where(magnitude == 1, 0, magnitude) + 2 * (scale - new)  # E2M1's code, but .5's is 0 and .25's -2
    small = tl.where(moved == 1, 2, (moved >= -1).to(tl.int32))
    return word & 8 | tl.where(magnitude == 0, 0, tl.where(moved > 1, moved, small))


@triton.jit
def _to_columns_kernel(codes_ptr, scales_ptr, out_ptr, new_ptr, rows, blocks, across):
    """A tile of 128 rows and 4 blocks of one lane, as codes and scales along the rows. across: tiles of a row."""
    number, lane = tl.program_id(0) // across, tl.program_id(1).to(tl.int64)
    tall = (rows + 31) // 32  # blocks of a column
    block = tl.program_id(0) % across * 4 + tl.arange(0, 4)
    codes_ptr += lane * rows * blocks * 4
    scales_ptr += lane * rows * blocks
    row = number.to(tl.int64) * 128 + tl.arange(0, 32) * 4
    words_a, scale_a, _ = _blocks(codes_ptr, scales_ptr, row, rows, block, blocks)
    words_b, scale_b, _ = _blocks(codes_ptr, scales_ptr, row + 1, rows, block, blocks)
    words_c, scale_c, _ = _blocks(codes_ptr, scales_ptr, row + 2, rows, block, blocks)
    words_d, scale_d, _ = _blocks(codes_ptr, scales_ptr, row + 3, rows, block, blocks)
    a, b, c, d = scale_a[:, :, None], scale_b[:, :, None], scale_c[:, :, None], scale_d[:, :, None]
    invalid = ((scale_a == _NAN) | (scale_b == _NAN) | (scale_c == _NAN) | (scale_d == _NAN)).to(tl.int32)
    invalid = tl.reduce(tl.reshape(invalid, (4, 8, 4)), 1, higher)[:, :, None] > 0  # blocks of 32 rows
    for n in tl.static_range(8):
        top = tl.maximum(_exponent(words_a >> 4 * n, a), _exponent(words_b >> 4 * n, b))
        top = tl.maximum(top, tl.maximum(_exponent(words_c >> 4 * n, c), _exponent(words_d >> 4 * n, d)))
        top = tl.reduce(tl.reshape(top, (4, 8, 4, 4)), 1, higher)
        new = tl.where(invalid, _NAN, tl.maximum(top - 3, 0))
        wide = tl.reshape(tl.broadcast_to(new[:, None, :, :], (4, 8, 4, 4)), (32, 4, 4))
        codes = _requantized(words_a >> 4 * n, a, wide) | _requantized(words_b >> 4 * n, b, wide) << 4
        codes |= _requantized(words_c >> 4 * n, c, wide) << 8 | _requantized(words_d >> 4 * n, d, wide) << 12
        codes = tl.where(wide == _NAN, 0, codes)
        column = block[:, None] * 32 + tl.arange(0, 4)[None, :] * 8 + n  # [4, 4]
        at = (lane * blocks * 32 + column) * tall + number * 4
        inside = (block < blocks)[:, None]
        eights = tl.arange(0, 32)[:, None, None]
        fits = inside[None, :, :] & (number * 32 + eights < tall * 8)
        tl.store(out_ptr + at[None, :, :] * 8 + eights, codes.to(tl.int16), fits)
        fours = tl.arange(0, 4)[:, None, None]
        fits = inside[None, :, :] & (number * 4 + fours < tall)
        tl.store(new_ptr + at[None, :, :] + fours, new.to(tl.uint8), fits)


@triton.jit
def _from_fp8_kernel(
    x_ptr, factor_ptr, steps_ptr, exponents_ptr, codes_ptr, scales_ptr, count, LEAST: tl.constexpr, ROWS: tl.constexpr
):
    """ROWS tiles of 128 numbers of all lanes. Four codes of 7 bits fill a word: with bit 7 set in each, one subtraction
    compares them all."""
    tile = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    block = (tile[:, None] * 4 + tl.arange(0, 4)[None, :])[:, :, None]
    four = tl.arange(0, 8)[None, None, :]
    inside = (tile < count)[:, None, None]
    words = tl.load(x_ptr + block * 8 + four, inside, 0)
    magnitudes = words & 0x7F7F7F7F
    top = tl.maximum(magnitudes & 0x7F, magnitudes >> 8 & 0x7F)
    largest = tl.reduce(tl.maximum(top, tl.maximum(magnitudes >> 16 & 0x7F, magnitudes >> 24)), 2, higher)
    factor = (tl.load(factor_ptr + tile, tile < count, 0) >> 23)[:, None]
    exponent = tl.load(exponents_ptr + largest)
    is_nan = factor + exponent > _MOST  # also where the largest is beyond FP32
    exponent = tl.where(is_nan, LEAST, tl.maximum(exponent, -factor))
    steps_ptr += (exponent - LEAST) * 7
    codes = words >> 4 & 0x08080808
    for n in tl.static_range(7):
        step = tl.load(steps_ptr + n)[:, :, None]
        codes += (magnitudes | SIGNS) - step >> 7 & 0x01010101
    pairs = (codes | codes >> 4) & 0x00FF00FF
    pairs = tl.where(is_nan[:, :, None], 0, pairs | pairs >> 8)
    tl.store(codes_ptr + block * 8 + four, pairs.to(tl.int16), inside)
    scale = tl.where(is_nan, _NAN, tl.where(largest == 0, 0, factor + exponent))
    at = tile[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(scales_ptr + at, scale.to(tl.uint8), (tile < count)[:, None])


def to_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """`mxfp4.to_fp8`."""
    lanes, rows, blocks = scales.shape
    tiles = triton.cdiv(blocks, TILE // BLOCK)
    table, constants = _fp8_table(dtype, codes.device)
    values = codes.new_empty(lanes, rows, tiles * TILE)
    factor = values.new_empty(lanes, rows, tiles, dtype=torch.float32)
    outside = values.new_empty(lanes, rows, tiles, dtype=torch.bool)
    inputs = codes.contiguous().view(torch.int32), scales.contiguous(), table
    outputs = values.view(torch.int32), factor.view(torch.int32), outside.view(torch.uint8)
    programs = launch_grid(triton.cdiv(lanes * rows, _TO_FP8["ROWS"]) * tiles)
    _to_fp8_kernel[programs](*inputs, *outputs, lanes * rows, blocks, tiles, **constants, **_TO_FP8)
    return Fp8(values.view(dtype), factor, outside)


def columns_to_fp8(codes: Tensor, scales: Tensor, dtype: torch.dtype = E4M3) -> Fp8:
    """`mxfp4.columns_to_fp8`; the factors of a tile lie beside each other."""
    lanes, rows, blocks = scales.shape
    tiles, across = triton.cdiv(rows, TILE), triton.cdiv(blocks, 2)
    table, constants = _fp8_table(dtype, codes.device)
    values = codes.new_empty(lanes, blocks * BLOCK, tiles * TILE)
    factor = values.new_empty(lanes, tiles, blocks * BLOCK, dtype=torch.float32)
    outside = values.new_empty(lanes, tiles, blocks, dtype=torch.bool)
    inputs = codes.contiguous().view(torch.int32), scales.contiguous(), table
    outputs = values.view(torch.int32), factor.view(torch.int32), outside.view(torch.uint8)
    is_tall = tiles > OTHERS
    programs = launch_grid(tiles, across, lanes) if is_tall else launch_grid(across, tiles, lanes)
    how = constants | {"WHOLE": rows % TILE == 0 and blocks % 2 == 0, "TALL": is_tall} | _TO_FP8_COLUMNS
    _columns_to_fp8_kernel[programs](*inputs, *outputs, rows, blocks, **how)
    return Fp8(values.view(dtype), factor.mT, outside.mT)


def to_columns(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """`mxfp4.to_columns`."""
    lanes, rows, blocks = scales.shape
    tall, across = triton.cdiv(rows, BLOCK), triton.cdiv(blocks, TILE // BLOCK)
    out = codes.new_empty(lanes, blocks * BLOCK, tall * BLOCK // 2)
    new = codes.new_empty(lanes, blocks * BLOCK, tall)
    inputs = codes.contiguous().view(torch.int32), scales.contiguous()
    programs = launch_grid(triton.cdiv(rows, TILE) * across, lanes)
    _to_columns_kernel[programs](*inputs, out.view(torch.int16), new, rows, blocks, across, **_TO_COLUMNS)
    return out, new


def from_fp8(values: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """`mxfp4.from_fp8`."""
    lanes, rows, tiles = factor.shape
    codes = values.new_empty(lanes, rows, tiles * TILE // 2, dtype=torch.uint8)
    scales = values.new_empty(lanes, rows, tiles * TILE // BLOCK, dtype=torch.uint8)
    steps, exponents, least = _steps_table(values.dtype, values.device)
    inputs = values.contiguous().view(torch.int32), factor.contiguous().view(torch.int32), steps, exponents
    programs = launch_grid(triton.cdiv(lanes * rows * tiles, _FROM_FP8["ROWS"]))
    outputs = codes.view(torch.int16), scales
    _from_fp8_kernel[programs](*inputs, *outputs, lanes * rows * tiles, LEAST=least, **_FROM_FP8)
    return codes, scales


@cache
def _fp8_table(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, dict[str, int]]:
    """`fp8_codes` as two words a row, and the exponents that it is about."""
    lowest, highest = window(dtype)
    table = fp8_codes(dtype)
    constants = {"FIRST": highest + 2 - len(table), "LOWEST": lowest, "HIGHEST": highest}
    return table.view(torch.int32).to(device), constants


@cache
def _steps_table(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """`e2m1_steps`, a step in each byte, and the least exponent."""
    steps, exponents = e2m1_steps(dtype)
    return (steps * 0x01010101).to(torch.int32).contiguous().to(device), exponents.to(device), int(exponents[0])
