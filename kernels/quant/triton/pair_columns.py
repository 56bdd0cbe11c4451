"""One operand down the columns of x, in FP8, in pairs (pairs.py).

A thread has 16 rows of a block and 4 columns, so that two threads know the block's largest, 8 write a line of 128
bytes, 16 bytes each, and nothing goes through shared memory but what a program notes.
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
from fp4dse.kernels.quant.triton.numbers import SIGNS, none, permuted, prmt
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
def columns_in_pairs(
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
    """One operand down the columns of x, bfloat16 [L, rows, width], 32 of whose rows are a block: 128 rows, of which a
    thread has ROWS neighbours and 2 · WORDS columns. WHOLE: no tile is filled in part. Other arguments as in
    `quantize_kernel`."""
    HALVES: tl.constexpr = 32 // ROWS  # threads that share a block
    LANES: tl.constexpr = 8 // HALVES  # that share rows
    COLUMNS: tl.constexpr = WARPS * LANES * WORDS * 2
    program, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if LARGE:
        program, rows, width = program.to(tl.int64), tl.cast(rows, tl.int64), tl.cast(width, tl.int64)
    across = (width + COLUMNS - 1) // COLUMNS
    number, column0 = program // across, program % across * COLUMNS
    x_ptr += lane * (rows * width + apart)
    block, half = tl.arange(0, 4)[None, :, None, None], tl.arange(0, HALVES)[None, None, :, None]
    lanes = tl.arange(0, WARPS)[:, None, None, None] * LANES + tl.arange(0, LANES)[None, None, None, :]
    row = number * 128 + block * 32 + half * ROWS
    here = WHOLE | (row < rows) & (column0 + lanes * (WORDS * 2) < width)
    apart_words = width // 2
    begin = (x_ptr + (number * 128 * width + column0)).to(tl.pointer_type(tl.int32))
    begin += ((block * 32 + half * ROWS) * apart_words + lanes * WORDS)[:, :, :, :, None]
    begin += tl.arange(0, WORDS)[None, None, None, None, :]
    words = none()
    for _ in tl.static_range(ROWS):
        words += parts(tl.load(begin, here[:, :, :, :, None], 0))
        begin += apart_words
    rule = rule_of(lane, floats_ptr, ints_ptr)
    exponent, known = exponent_now(tops_ptr, lane, step_ptr, MANTISSA, TRAINING)
    base = -rule[2] - exponent - LOWEST
    found, top = tl.full((WARPS, 4, LANES), 0, tl.int32), tl.full((WARPS, 4, LANES), 0, tl.int32)
    missed = tl.full((WARPS, 4, HALVES, LANES), 0, tl.int32)
    outs = none()
    for word in tl.static_range(WORDS):
        amax = either_of_pairs(largest_of(words, word, WORDS, ROWS), 2)
        exponents, lines, beyond = lines_of(amax, rule)
        found |= beyond
        top = larger_pair(top, tops_of(exponents, nearest_codes(amax, *lines)))
        low_1, high_1 = bytes_of(exponents >> 7 & 0x1FF, base, table_ptr, LAST)
        low_2, high_2 = bytes_of(exponents >> 23, base, table_ptr, LAST)
        limit, a, b, c = lines
        limit, a, b, c = limit[:, :, None], a[:, :, None], b[:, :, None], c[:, :, None]
        for four in tl.static_range(ROWS // 4):
            w_0, w_1 = words[four * 4 * WORDS + word], words[(four * 4 + 1) * WORDS + word]
            w_2, w_3 = words[(four * 4 + 2) * WORDS + word], words[(four * 4 + 3) * WORDS + word]
            codes = nearest_codes(w_0, limit, a, b, c) - 0x77777300  # 0x4300 in each half, of four
            codes += nearest_codes(w_1, limit, a, b, c) * 16
            codes += nearest_codes(w_2, limit, a, b, c) * 256
            codes += nearest_codes(w_3, limit, a, b, c) * 4096
            first_two, last_two = prmt(w_0, w_1, 0x7351), prmt(w_2, w_3, 0x7351)
            bytes_1 = permuted(low_1[:, :, None], high_1[:, :, None], codes)
            bytes_2 = permuted(low_2[:, :, None], high_2[:, :, None], codes >> 16)
            missed |= bytes_1 | bytes_2
            outs += (bytes_1 & ~SIGNS | prmt(first_two, last_two, 0x5410) & SIGNS,)
            outs += (bytes_2 & ~SIGNS | prmt(first_two, last_two, 0x7632) & SIGNS,)
    wrong = tl.reduce(found[:, :, None] | missed & SIGNS, None, either)
    flagged, of_all = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if (wrong == 0) & rule[0]:
        column_of = lane * width + column0 + lanes * (WORDS * 2)
        start = number * 128 + block * 32 + half * ROWS
        of_flags = flags_ptr + (lane * width + column0) * ((rows + 127) // 128) + number
        line = lanes * (WORDS * 2)
        for side in tl.static_range(2 * WORDS):
            of_column = (values_ptr + ((column_of + side) * rows + start)).to(tl.pointer_type(tl.int32))
            put(of_column, outs, side // 2 * (ROWS // 2) + side % 2, 2, here, ROWS // 4)
            at = tl.reshape(line + side, (WARPS, LANES))
            inside = WHOLE | (column0 + at < width)
            tl.store(of_flags + at * ((rows + 127) // 128), tl.full((WARPS, LANES), 0, tl.uint8), inside)
        of_all = tl.reduce(tl.maximum(top >> 23, top >> 7 & 0x1FF), None, higher) - rule[2] - 1
    else:
        numbers = numbers_of(lane, floats_ptr, ints_ptr, None, seeds_ptr, step_ptr, 0, 0, False, "block")
        pointers = values_ptr, flags_ptr, wide_ptr
        for part in range(WARPS):
            place = lane, column0 + part * (COLUMNS // WARPS), width, number * 128, rows, exponent
            made = write_in_float32(x_ptr, pointers, place, numbers, COLUMNS // WARPS, 128, True, MANTISSA)
            of_all, flagged = tl.maximum(of_all, made[0]), flagged | made[1]
    of_lane = power_ptr, dec_ptr, floats_ptr
    finish(lane, (of_all, flagged), known, exponent, tops_ptr, notes_ptr, of_lane, step_ptr, TRAINING)


def columns_with(warps: int, rows: int, words: int, registers: int) -> How:
    """A way to launch: 8, 16 or 32 rows, and 1, 2 or 4 words of two columns, of a thread."""
    return How(warps, rows, words, registers, (warps * rows // 4 * words * 2, 128))


COLUMNS = columns_with(4, 16, 2, 80)
"""The one in use."""


def columns_in_fp8(
    x: Tensor, call: Call, dtype: torch.dtype, history: History, how: How = COLUMNS
) -> tuple[Tensor, Shift, Tensor]:
    """`launch.launch_fp8` of columns."""
    made = launch_of(x, True, call, dtype, history, how)
    columns_in_pairs[launch_grid(made.programs, made.lanes)](*made.arguments, **made.constants)
    return made.outputs
