"""Both operands of x in FP8, along its rows and down its columns, in pairs (pairs.py), from one read of x.

A thread has 16 rows of a block and 8 columns. Two threads know the largest of a block of a column, and four that of a
block of a row; what follows from that is known of two columns or rows at a time, a half of a word each. 8 threads write
a line of 128 bytes of columns, 16 bytes each, and 4 write 32 bytes of a row.

Its 64 words leave few registers. So everything is stored before it is known whether the tile is held. Where it is not,
both operands are made again in float32, which has the same bits where both ways may be taken, and written over what is
there, behind a barrier.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.ops.fp8 import History, Shift
from fp4dse.kernels.ops.fp8.shifting import either, higher
from fp4dse.kernels.ops.launching import launch_grid
from fp4dse.kernels.ops.products import SEGMENT
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.triton.blocks import numbers_of
from fp4dse.kernels.quant.triton.eights import exponent_now
from fp4dse.kernels.quant.triton.numbers import SIGNS, larger_of_pairs, none, permuted, prmt, unknown
from fp4dse.kernels.quant.triton.pair_tiles import (
    BLOCK,
    How,
    aligned,
    finish,
    is_paired,
    largest_of,
    launch_of,
    parts,
    put,
    write_in_float32,
)
from fp4dse.kernels.quant.triton.pairs import (
    bytes_of,
    either_of_pairs,
    larger_pair,
    lines_of,
    nearest_codes,
    rule_of,
    tops_of,
)

_OF_ONE = "LAST", "LOWEST", "MANTISSA"
"""Constants that each operand has of its own."""
_EDGE = tl.constexpr(SEGMENT)  # rows and columns of a program: a segment of either operand


@triton.jit
def _columns(
    words, out_ptr, rows, here, rule, base, table_ptr, LAST: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """Store a thread's columns, as `columns_in_pairs` makes them. out_ptr: of the first one, `rows` before the next.
    Returns what is not zero where a number is not held, and the tops of blocks."""
    LANES: tl.constexpr = 16 // WORDS  # threads that share rows
    top, found = tl.full((4, 4, LANES), 0, tl.int32), tl.full((4, 4, LANES), 0, tl.int32)
    found = tl.where(rule[0], found, 1)
    missed = tl.full((4, 4, 32 // ROWS, LANES), 0, tl.int32)
    for word in tl.static_range(WORDS):
        amax = either_of_pairs(largest_of(words, word, WORDS, ROWS), 2)
        exponents, lines, beyond = lines_of(amax, rule)
        found = unknown(found | beyond)  # now: put off, it would keep registers
        top = larger_pair(top, tops_of(exponents, nearest_codes(amax, *lines)))
        low_1, high_1 = bytes_of(exponents >> 7 & 0x1FF, base, table_ptr, LAST)
        low_2, high_2 = bytes_of(exponents >> 23, base, table_ptr, LAST)
        limit, a, b, c = lines
        limit, a, b, c = limit[:, :, None], a[:, :, None], b[:, :, None], c[:, :, None]
        outs = none()
        for four in tl.static_range(ROWS // 4):
            w_0, w_1 = words[four * 4 * WORDS + word], words[(four * 4 + 1) * WORDS + word]
            w_2, w_3 = words[(four * 4 + 2) * WORDS + word], words[(four * 4 + 3) * WORDS + word]
            codes = nearest_codes(w_0, limit, a, b, c, True) - 0x77777300  # 0x4300 in each half, of four
            codes += nearest_codes(w_1, limit, a, b, c, True) * 16
            codes += nearest_codes(w_2, limit, a, b, c, True) * 256
            codes += nearest_codes(w_3, limit, a, b, c, True) * 4096
            first_two, last_two = prmt(w_0, w_1, 0x7351), prmt(w_2, w_3, 0x7351)
            bytes_1 = permuted(low_1[:, :, None], high_1[:, :, None], codes)
            bytes_2 = permuted(low_2[:, :, None], high_2[:, :, None], codes >> 16)
            missed |= bytes_1 | bytes_2
            outs += (bytes_1 & ~SIGNS | prmt(first_two, last_two, 0x5410) & SIGNS,)
            outs += (bytes_2 & ~SIGNS | prmt(first_two, last_two, 0x7632) & SIGNS,)
        for side in tl.static_range(2):
            put(out_ptr.to(tl.pointer_type(tl.int32)), outs, side, 2, here, ROWS // 4)
            out_ptr += rows
    return found[:, :, None] | missed & SIGNS, tl.maximum(top >> 23, top >> 7 & 0x1FF)


@triton.jit
def _rows(
    words, out_ptr, width, here, rule, base, table_ptr, LAST: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr
):
    """Store a thread's rows, as `rows_in_pairs` makes them; the rest is as in `_columns`."""
    HALVES: tl.constexpr = 32 // ROWS  # threads that share columns
    top, found = tl.full((4, 4, HALVES), 0, tl.int32), tl.full((4, 4, HALVES), 0, tl.int32)
    found = tl.where(rule[0], found, 1)
    missed = tl.full((4, 4, HALVES, 16 // WORDS), 0, tl.int32)
    for two in tl.static_range(ROWS // 2):
        first = largest_of(words, 2 * two * WORDS, 1, WORDS)
        second = largest_of(words, (2 * two + 1) * WORDS, 1, WORDS)
        amax = larger_of_pairs(prmt(first, second, 0x5410), prmt(first, second, 0x7632))
        amax = either_of_pairs(amax, 3)
        exponents, lines, beyond = lines_of(amax, rule)
        found = unknown(found | beyond)
        top = larger_pair(top, tops_of(exponents, nearest_codes(amax, *lines)))
        limits, factors = lines[0], lines[1]
        for side in tl.static_range(2):
            limit = prmt(limits, limits, 0x3232 if side else 0x1010)[:, :, :, None]
            a = prmt(factors, factors, 0x3232 if side else 0x1010)[:, :, :, None]
            low, high = bytes_of(exponents >> 23 if side else exponents >> 7 & 0x1FF, base, table_ptr, LAST)
            low, high = low[:, :, :, None], high[:, :, :, None]
            outs = none()
            for pair in tl.static_range(WORDS // 2):
                w_0 = words[(2 * two + side) * WORDS + 2 * pair]
                w_1 = words[(2 * two + side) * WORDS + 2 * pair + 1]
                # 0x4300 in each half, of two; then 3 bits of numbers 0, 2, 1 and 3 in bytes
                codes = nearest_codes(w_0, limit, a, a - 0x800080, a - 0x1000100, True) - 0x43434300
                codes += nearest_codes(w_1, limit, a, a - 0x800080, a - 0x1000100, True) * 256
                of_four = permuted(low, high, codes + (codes >> 12))
                missed |= of_four
                outs += (of_four & ~SIGNS | prmt(w_0, w_1, 0x7531) & SIGNS,)
            put(out_ptr.to(tl.pointer_type(tl.int32)), outs, 0, 1, here, WORDS // 2)
            out_ptr += width
    return found[:, :, :, None] | missed & SIGNS, tl.maximum(top >> 23, top >> 7 & 0x1FF)


@triton.jit
def both_in_pairs(
    x_ptr,
    values_r_ptr,
    flags_r_ptr,
    wide_r_ptr,
    power_r_ptr,
    tops_r_ptr,
    notes_r_ptr,
    dec_r_ptr,
    table_r_ptr,
    floats_r_ptr,
    ints_r_ptr,
    values_c_ptr,
    flags_c_ptr,
    wide_c_ptr,
    power_c_ptr,
    tops_c_ptr,
    notes_c_ptr,
    dec_c_ptr,
    table_c_ptr,
    floats_c_ptr,
    ints_c_ptr,
    rows,
    width,
    apart,
    seeds_ptr,
    step_ptr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    LAST_R: tl.constexpr,
    LOWEST_R: tl.constexpr,
    MANTISSA_R: tl.constexpr,
    LAST_C: tl.constexpr,
    LOWEST_C: tl.constexpr,
    MANTISSA_C: tl.constexpr,
    TRAINING: tl.constexpr,
    WHOLE: tl.constexpr,
    LARGE: tl.constexpr,
):
    """The operands along the rows (r) and down the columns (c) of x, bfloat16 [L, rows, width], both multiples of 32:
    128 by 128 numbers of a lane. Other arguments as in `columns_in_pairs`."""
    program, lane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if LARGE:
        program, rows, width = program.to(tl.int64), tl.cast(rows, tl.int64), tl.cast(width, tl.int64)
    across, down = (width + _EDGE - 1) // _EDGE, (rows + _EDGE - 1) // _EDGE
    number, segment = program // across, program % across
    row0, column0 = number * _EDGE, segment * _EDGE
    x_ptr += lane * (rows * width + apart)
    block, half = tl.arange(0, 4)[None, :, None, None], tl.arange(0, 32 // ROWS)[None, None, :, None]
    line = block * 32 + half * ROWS
    along = tl.arange(0, 4)[:, None, None, None] * 32 + tl.arange(0, 16 // WORDS)[None, None, None, :] * (2 * WORDS)
    here = WHOLE | (row0 + line < rows) & (column0 + along < width)
    begin = (x_ptr + (row0 * width + column0)).to(tl.pointer_type(tl.int32))
    begin += ((line * width + along) // 2)[:, :, :, :, None] + tl.arange(0, WORDS)[None, None, None, None, :]
    words = none()
    for _ in tl.static_range(ROWS):
        words += parts(tl.load(begin, here[:, :, :, :, None], 0))
        begin += width // 2
    rule_c = rule_of(lane, floats_c_ptr, ints_c_ptr)
    exponent_c, known_c = exponent_now(tops_c_ptr, lane, step_ptr, MANTISSA_C, TRAINING)
    base_c = -rule_c[2] - exponent_c - LOWEST_C
    of_columns = values_c_ptr + ((lane * width + column0 + along) * rows + row0 + line)
    wrong_c, top_c = _columns(words, of_columns, rows, here, rule_c, base_c, table_c_ptr, LAST_C, ROWS, WORDS)
    rule_r = rule_of(lane, floats_r_ptr, ints_r_ptr)  # read here, not before: it would wait in registers
    exponent_r, known_r = exponent_now(tops_r_ptr, lane, step_ptr, MANTISSA_R, TRAINING)
    base_r = -rule_r[2] - exponent_r - LOWEST_R
    of_rows = values_r_ptr + ((lane * rows + row0 + line) * width + column0 + along)
    wrong_r, top_r = _rows(words, of_rows, width, here, rule_r, base_r, table_r_ptr, LAST_R, ROWS, WORDS)
    wrong = tl.reduce(wrong_c | wrong_r, None, either)
    flagged_c, flagged_r = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    if wrong == 0:
        place = tl.arange(0, _EDGE)
        of_flags_c = flags_c_ptr + (lane * width + column0 + place) * down + number
        of_flags_r = flags_r_ptr + (lane * rows + row0 + place) * across + segment
        tl.store(of_flags_c, tl.full((_EDGE,), 0, tl.uint8), WHOLE | (column0 + place < width))
        tl.store(of_flags_r, tl.full((_EDGE,), 0, tl.uint8), WHOLE | (row0 + place < rows))
        of_all_c = tl.reduce(top_c, None, higher) - rule_c[2] - 1
        of_all_r = tl.reduce(top_r, None, higher) - rule_r[2] - 1
    else:
        tl.debug_barrier()
        of_all_c, of_all_r = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        numbers_c = numbers_of(lane, floats_c_ptr, ints_c_ptr, None, seeds_ptr, step_ptr, 0, 0, False, "block")
        pointers_c = values_c_ptr, flags_c_ptr, wide_c_ptr
        for part in range(_EDGE // 16):
            place_c = lane, column0 + part * 16, width, row0, rows, exponent_c
            made = write_in_float32(x_ptr, pointers_c, place_c, numbers_c, 16, _EDGE, True, MANTISSA_C)
            of_all_c, flagged_c = tl.maximum(of_all_c, made[0]), flagged_c | made[1]
        numbers_r = numbers_of(lane, floats_r_ptr, ints_r_ptr, None, seeds_ptr, step_ptr, 0, 0, False, "block")
        pointers_r = values_r_ptr, flags_r_ptr, wide_r_ptr
        for part in range(_EDGE // 16):
            place_r = lane, row0 + part * 16, rows, column0, width, exponent_r
            made = write_in_float32(x_ptr, pointers_r, place_r, numbers_r, 16, _EDGE, False, MANTISSA_R)
            of_all_r, flagged_r = tl.maximum(of_all_r, made[0]), flagged_r | made[1]
    of_lane_c, of_lane_r = (power_c_ptr, dec_c_ptr, floats_c_ptr), (power_r_ptr, dec_r_ptr, floats_r_ptr)
    found_c, found_r = (of_all_c, flagged_c), (of_all_r, flagged_r)
    finish(lane, found_c, known_c, exponent_c, tops_c_ptr, notes_c_ptr, of_lane_c, step_ptr, TRAINING)
    finish(lane, found_r, known_r, exponent_r, tops_r_ptr, notes_r_ptr, of_lane_r, step_ptr, TRAINING)


def both_with(rows: int, words: int, registers: int) -> How:
    """A way to launch: 8 or 16 rows, and 4 words of two columns, of a thread."""
    return How(256 // (rows * words), rows, words, registers, (SEGMENT, SEGMENT))


BOTH = both_with(16, 4, 168)
"""The one in use, the fastest of those that `python -m tests.kernels.fp8_quantizer_variants` times, at either width."""


def both_in_fp8(
    x: Tensor, calls: Sequence[Call], dtypes: Sequence[torch.dtype], histories: Sequence[History], how: How = BOTH
) -> list[tuple[Tensor, Shift, Tensor]]:
    """`launch.launch_fp8` of rows and of columns."""
    x = aligned(x)
    each = zip((False, True), calls, dtypes, histories, strict=True)
    rows, columns = (launch_of(x, *of, how) for of in each)
    own = slice(1, len(rows.arguments) - 5)  # but for x before, and sizes, seeds and step after them
    arguments = x, *rows.arguments[own], *columns.arguments[own], *rows.arguments[own.stop :]
    constants = {name: of for name, of in rows.constants.items() if name not in ("WARPS", *_OF_ONE)}
    constants |= {f"{name}_R": rows.constants[name] for name in _OF_ONE}
    constants |= {f"{name}_C": columns.constants[name] for name in _OF_ONE}
    both_in_pairs[launch_grid(rows.programs, rows.lanes)](*arguments, **constants)
    return [rows.outputs, columns.outputs]


def are_paired(x: Tensor, calls: Sequence[Call]) -> bool:
    """True if both operands are made by one program: each as `is_paired`, of rows and columns of whole blocks."""
    return not any(size % BLOCK for size in x.shape[1:]) and all(is_paired(x, call) for call in calls)
