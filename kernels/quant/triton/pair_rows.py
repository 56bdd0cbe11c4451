"""One operand along the rows of x, in FP8, in pairs (pairs.py).

A thread has 16 neighbours of a row, of several rows, and writes them as 16 bytes; 8 threads write a line of 128. What
belongs to a block, its largest and what follows from that, is known of two rows at a time, a half of a word each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import History, Shift
from fp4dse.kernels.ops.fp8.shifting import either, higher
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.triton.blocks import numbers_of
from fp4dse.kernels.quant.triton.eights import exponent_now
from fp4dse.kernels.quant.triton.numbers import SIGNS, larger_of_pairs, none, permuted, prmt
from fp4dse.kernels.quant.triton.pair_tiles import How, finish, largest_of, launch_of, parts, put, write_in_float32
from fp4dse.kernels.quant.triton.pairs import (
    bytes_of,
    either_of_pairs,
    larger_pair,
    lines_of,
    nearest_codes,
    rule_of,
    tops_of,
)


@triton.jit
def rows_in_pairs(
    x_ptr,
    values_ptr,
    flags_ptr,
    wide_ptr,
    power_ptr,
    tops_ptr,
    notes_ptr,
    dec_ptr,
    table_ptr,
    floats_ptr,
    ints_ptr,
    rows,
    width,
    apart,
    seeds_ptr,
    step_ptr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    LAST: tl.constexpr,
    LOWEST: tl.constexpr,
    MANTISSA: tl.constexpr,
    TRAINING: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGE: tl.constexpr,
):
    """One operand of x, bfloat16 [L, rows, width]: of some rows a segment for each warp. A thread has 8 · WORDS
    neighbours of each of ROWS rows, an even number. Other arguments as in `columns_in_pairs`."""
    PARTS: tl.constexpr = 4 // WORDS  # threads that share a block
    LINES: tl.constexpr = 8 // PARTS  # rows that a warp has at a time
    COUNT: tl.constexpr = 4 * WORDS  # words of a row that a thread has
    program, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if LARGE:
        program, rows, width = program.to(tl.int64), tl.cast(rows, tl.int64), tl.cast(width, tl.int64)
    across = (width + WARPS * 128 - 1) // (WARPS * 128)
    row0, column0 = program // across * (LINES * ROWS), program % across * (WARPS * 128)
    x_ptr += lane * (rows * width + apart)
    warp, line = tl.arange(0, WARPS)[:, None, None, None], tl.arange(0, LINES)[None, :, None, None]
    along = (
        warp * 128 + tl.arange(0, 4)[None, None, :, None] * 32 + tl.arange(0, PARTS)[None, None, None, :] * COUNT * 2
    )
    within = WHOLE | (column0 + along < width)
    four = tl.arange(0, 4)[None, None, None, None, :]
    begin = (x_ptr + (row0 * width + column0)).to(tl.pointer_type(tl.int32))
    begin += ((line * width + along) // 2)[:, :, :, :, None] + four
    words = none()
    for n in tl.static_range(ROWS):
        here = WHOLE | within & (row0 + n * LINES + line < rows)
        for word in tl.static_range(WORDS):
            words += parts(tl.load(begin + word * 4, here[:, :, :, :, None], 0))
        begin += LINES * width // 2
    rule = rule_of(lane, floats_ptr, ints_ptr)
    exponent, known = exponent_now(tops_ptr, lane, step_ptr, MANTISSA, TRAINING)
    base = -rule[2] - exponent - LOWEST
    found, top = tl.full((WARPS, LINES, 4), 0, tl.int32), tl.full((WARPS, LINES, 4), 0, tl.int32)
    missed = tl.full((WARPS, LINES, 4, PARTS), 0, tl.int32)
    outs = none()
    for two in tl.static_range(ROWS // 2):
        first = largest_of(words, 2 * two * COUNT, 1, COUNT)
        second = largest_of(words, (2 * two + 1) * COUNT, 1, COUNT)
        amax = larger_of_pairs(prmt(first, second, 0x5410), prmt(first, second, 0x7632))
        amax = either_of_pairs(amax, 3)
        exponents, lines, beyond = lines_of(amax, rule)
        found |= beyond
        top = larger_pair(top, tops_of(exponents, nearest_codes(amax, *lines)))
        limits, factors = lines[0], lines[1]
        for side in tl.static_range(2):
            limit = prmt(limits, limits, 0x3232 if side else 0x1010)[:, :, :, None]
            a = prmt(factors, factors, 0x3232 if side else 0x1010)[:, :, :, None]
            low, high = bytes_of(exponents >> 23 if side else exponents >> 7 & 0x1FF, base, table_ptr, LAST)
            low, high = low[:, :, :, None], high[:, :, :, None]
            for pair in tl.static_range(COUNT // 2):
                w_0 = words[(2 * two + side) * COUNT + 2 * pair]
                w_1 = words[(2 * two + side) * COUNT + 2 * pair + 1]
                # 0x4300 in each half, of two; then 3 bits of numbers 0, 2, 1 and 3 in bytes
                codes = nearest_codes(w_0, limit, a, a - 0x800080, a - 0x1000100) - 0x43434300
                codes += nearest_codes(w_1, limit, a, a - 0x800080, a - 0x1000100) * 256
                of_four = permuted(low, high, codes + (codes >> 12))
                missed |= of_four
                outs += (of_four & ~SIGNS | prmt(w_0, w_1, 0x7531) & SIGNS,)
    wrong = tl.reduce(found[:, :, :, None] | missed & SIGNS, None, either)
    flagged, of_all = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    segments = (width + 127) // 128
    if (wrong == 0) & rule[0]:
        start = lane * rows + row0 + line
        out = (values_ptr + (start * width + column0 + along)).to(tl.pointer_type(tl.int32))
        segment = column0 // 128 + tl.arange(0, WARPS)[:, None]
        row = row0 + tl.arange(0, LINES)[None, :]
        of_flags = flags_ptr + ((lane * rows + row) * segments + segment)
        for n in tl.static_range(ROWS):
            here = WHOLE | within & (row0 + n * LINES + line < rows)
            put(out + n * LINES * width // 4, outs, n * 2 * WORDS, 1, here, 2 * WORDS)
            inside = WHOLE | (segment < segments) & (row + n * LINES < rows)
            tl.store(of_flags + n * LINES * segments, tl.full((WARPS, LINES), 0, tl.uint8), inside)
        of_all = tl.reduce(tl.maximum(top >> 23, top >> 7 & 0x1FF), None, higher) - rule[2] - 1
    else:
        numbers = numbers_of(lane, floats_ptr, ints_ptr, None, seeds_ptr, step_ptr, 0, 0, False, "block")
        pointers = values_ptr, flags_ptr, wide_ptr
        for part in range(WARPS):
            place = lane, row0, rows, column0 + part * 128, width, exponent
            made = write_in_float32(x_ptr, pointers, place, numbers, LINES * ROWS, 128, False, MANTISSA)
            of_all, flagged = tl.maximum(of_all, made[0]), flagged | made[1]
    of_lane = power_ptr, dec_ptr, floats_ptr
    finish(lane, (of_all, flagged), known, exponent, tops_ptr, notes_ptr, of_lane, step_ptr, TRAINING)


def rows_with(warps: int, rows: int, words: int, registers: int) -> How:
    """A way to launch: an even number of rows, and 1, 2 or 4 words of 8 numbers, of a thread."""
    return How(warps, rows, words, registers, (2 * words * rows, warps * 128))


ROWS = rows_with(2, 4, 2, 80)
"""The one in use."""


def rows_in_fp8(
    x: Tensor, call: Call, dtype: torch.dtype, history: History, how: How = ROWS
) -> tuple[Tensor, Shift, Tensor]:
    """`launch.launch_fp8` of rows."""
    made = launch_of(x, False, call, dtype, history, how)
    rows_in_pairs[launch_grid(made.programs, made.lanes)](*made.arguments, **made.constants)
    return made.outputs
