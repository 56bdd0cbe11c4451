"""Ways to launch and to write the conversion of packed MXFP4 rows to FP8 columns, timed beside what memory allows:

    python -m tests.kernels.conversion_variants

On a GPU. Ceilings are kernels that convert nothing: a copy, a fill of the bytes that are written, and kernels that read
a word and write two. Every variant has its bits compared with the kernel in use before it is timed, and is printed as
soon as it is. Ways are compiled by several processes first. What is faster goes into kernels/ops/mxfp4/triton.py, with
its time into docs/log.md.

The kernel in use takes 4.9 instructions an element (`python -m tests.kernels.instructions`), of which 2.1 decode and
transpose. A thread has 4 rows of a block, so that words of 4 numbers go through shared memory to make lines, and a
program reads 16 bytes of a row, half of what memory gives. Ways with `rows` keep everything in the registers of the
thread that read it: it has 4, 8 or 16 rows of a block, and a program as much of each row as makes 32 threads. They take
4.0, 3.4 and 3.1 instructions. None of them is in use until a GPU has shown that it is faster.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp4dse.kernels.bench.clock import CALLS, copy_us, graph, median_us
from fp4dse.kernels.bench.conversion import EDGE, operand
from fp4dse.kernels.ops.mxfp4 import E4M3, Fp8
from fp4dse.kernels.ops.mxfp4 import triton as ours
from fp4dse.kernels.ops.mxfp4.triton import (
    _NAN,
    _below,
    _blocks,
    _bytes,
    _fp8_table,
    _power,
    _tile_of,
    _transposed,
    higher,
    permuted,
    prmt,
)

PROCESSES = 14
_HIGH = tl.constexpr(-0x7F7F7F80)  # bit 7 of each byte


@triton.jit
def _widened_kernel(x_ptr, out_ptr, count, TILE: tl.constexpr):
    """Words as two words each: what a conversion reads and writes, without one."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    words = tl.load(x_ptr + at, at < count, 0)
    both = tl.reshape(tl.join(words, words ^ 5), (2 * TILE,))
    to = tl.program_id(0).to(tl.int64) * 2 * TILE + tl.arange(0, 2 * TILE)
    tl.store(out_ptr + to, both, to < 2 * count)


@triton.jit
def _filled_kernel(out_ptr, count, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out_ptr + at, at.to(tl.int32), at < count)


@triton.jit(do_not_specialize=["group"])
def _columns_kernel(  # noqa: PLR0913
    codes_ptr,
    scales_ptr,
    table_ptr,
    out_ptr,
    out,
    factor_ptr,
    outside_ptr,
    rows,
    blocks,
    group,
    FIRST: tl.constexpr,
    LOWEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    BLOCKS: tl.constexpr,
    REPEAT: tl.constexpr,
    TMA: tl.constexpr,
    STORE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of 128 rows and BLOCKS blocks, REPEAT of them below each other. Programs go down first within `group` tiles
    that are beside each other. out: a descriptor of [columns, words], for TMA."""
    tiles = (rows + 127) // 128
    steps = (tiles + REPEAT - 1) // REPEAT
    within = tl.program_id(0) % group
    down = tl.program_id(0) // group % steps
    place = tl.program_id(0) // (group * steps) * group + within
    block = place * BLOCKS + tl.arange(0, BLOCKS)
    column = place * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)
    inside = column < blocks * 32
    for step in tl.range(0, REPEAT, num_stages=STAGES):
        number = down * REPEAT + step
        row = number.to(tl.int64) * 128 + tl.arange(0, 32) * 4
        words_a, scale_a, counting_a = _blocks(codes_ptr, scales_ptr, row, rows, block, blocks)
        words_b, scale_b, counting_b = _blocks(codes_ptr, scales_ptr, row + 1, rows, block, blocks)
        words_c, scale_c, counting_c = _blocks(codes_ptr, scales_ptr, row + 2, rows, block, blocks)
        words_d, scale_d, counting_d = _blocks(codes_ptr, scales_ptr, row + 3, rows, block, blocks)
        top = tl.maximum(tl.maximum(counting_a, counting_b), tl.maximum(counting_c, counting_d))
        tile = _tile_of(tl.reduce(top, 0, higher), HIGHEST)[None, :]
        low_a, high_a = _bytes(words_a, scale_a, tile, table_ptr, FIRST, HIGHEST)
        low_b, high_b = _bytes(words_b, scale_b, tile, table_ptr, FIRST, HIGHEST)
        low_c, high_c = _bytes(words_c, scale_c, tile, table_ptr, FIRST, HIGHEST)
        low_d, high_d = _bytes(words_d, scale_d, tile, table_ptr, FIRST, HIGHEST)
        low_0, low_1, low_2, low_3 = _transposed(low_a, low_b, low_c, low_d)
        high_0, high_1, high_2, high_3 = _transposed(high_a, high_b, high_c, high_d)
        even = tl.join(tl.join(low_0, high_0), tl.join(low_2, high_2))
        odd = tl.join(tl.join(low_1, high_1), tl.join(low_3, high_3))
        columns = tl.trans(tl.reshape(tl.join(even, odd), (32, BLOCKS * 32)))
        if TMA:
            out.store([place * BLOCKS * 32, number * 32], columns)
        else:
            at = column.to(tl.int64) * tiles + number
            places = out_ptr + at[:, None] * 32 + tl.arange(0, 32)[None, :]
            tl.store(places, columns, inside[:, None], cache_modifier=STORE)
        of_tile = number.to(tl.int64) * blocks + block
        factor = tl.broadcast_to(tl.trans(_power(tile)), (BLOCKS, 32))
        tl.store(factor_ptr + of_tile[:, None] * 32 + tl.arange(0, 32)[None, :], factor, (block < blocks)[:, None])
        below = _below(counting_a, tile, LOWEST) | _below(counting_b, tile, LOWEST)
        below |= _below(counting_c, tile, LOWEST) | _below(counting_d, tile, LOWEST)
        tl.store(outside_ptr + of_tile, tl.reduce(below, 0, higher).to(tl.uint8), block < blocks)


@triton.jit
def _quarters(words):
    """The four words of each block."""
    odd, even = tl.split(tl.reshape(words, (words.shape[0], words.shape[1], 2, 2)))
    first, third = tl.split(odd)
    second, fourth = tl.split(even)
    return first, second, third, fourth


@triton.jit
def _eight(word, low, high):
    """FP8 codes of a word's codes of even and of odd number, by the table of a block. Signs of the one half are in
    their place, those of the other 4 bits below."""
    magnitudes = word & 0x77777777
    a, b = permuted(low, high, magnitudes), permuted(low, high, magnitudes >> 16)
    return prmt(a, b, 0x6420) | word << 4 & _HIGH, prmt(a, b, 0x7531) | word & _HIGH


@triton.jit
def _held_kernel(  # noqa: PLR0913
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
    ROWS: tl.constexpr,
):
    """A tile of 128 rows and as many blocks as 32 threads have, each ROWS rows of a block, which it transposes itself.

    A block that does not count is as one far below: its numbers are zeros. NaN has a row of the table.
    """
    GROUPS: tl.constexpr = 128 // ROWS
    BLOCKS: tl.constexpr = ROWS // 4
    number, tiles = tl.program_id(1).to(tl.int64), rows // 128
    block, group = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, GROUPS)
    codes_ptr += number * 512 * blocks
    scales_ptr += number * 128 * blocks
    at = group[:, None] * ROWS * blocks + block[None, :]
    words, scales, counting = (), (), ()
    for row in tl.static_range(ROWS):
        there = (at + row * blocks)[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        words += (tl.load(codes_ptr + there),)
        scales += (tl.load(scales_ptr + at + row * blocks).to(tl.int32),)
    top, bottom = tl.full((GROUPS, BLOCKS), -1, tl.int32), tl.full((GROUPS, BLOCKS), -255, tl.int32)
    for row in tl.static_range(ROWS):
        counts = (tl.reduce(words[row] & 0x77777777, 2, higher) > 0) & (scales[row] != _NAN)
        counting += (tl.where(counts, scales[row], -1),)
        top = tl.maximum(top, counting[row])
        bottom = tl.maximum(bottom, tl.where(counts, -scales[row], -255))
    tile = _tile_of(tl.reduce(top, 0, higher), HIGHEST)
    lows, highs, parts = (), (), ()
    for row in tl.static_range(ROWS):
        place = tl.maximum(counting[row] - (tile + FIRST)[None, :], 0)
        place = tl.where(scales[row] == _NAN, HIGHEST + 1 - FIRST, place)
        low, high = tl.split(tl.load(table_ptr + (2 * place)[:, :, None] + tl.arange(0, 2)[None, None, :]))
        lows += (low,)
        highs += (high,)
        parts += _quarters(words[row])
    first = block.to(tl.int64)[None, :] * 1024 * tiles + number * 32 + group[:, None] * BLOCKS
    for word in tl.static_range(4):
        columns = ()  # words of 4 rows: of columns 0, 2, 4, 6, 1, 3, 5, 7, then those of the next rows
        for four in tl.static_range(BLOCKS):
            even_a, odd_a = _eight(parts[16 * four + word], lows[4 * four], highs[4 * four])
            even_b, odd_b = _eight(parts[16 * four + 4 + word], lows[4 * four + 1], highs[4 * four + 1])
            even_c, odd_c = _eight(parts[16 * four + 8 + word], lows[4 * four + 2], highs[4 * four + 2])
            even_d, odd_d = _eight(parts[16 * four + 12 + word], lows[4 * four + 3], highs[4 * four + 3])
            columns += _transposed(even_a, even_b, even_c, even_d)
            columns += _transposed(odd_a, odd_b, odd_c, odd_d)
        for column in tl.static_range(8):
            there = out_ptr + first + (word * 8 + column) * tiles * 32
            if BLOCKS == 1:
                tl.store(there, columns[column // 2 + column % 2 * 4])
            elif BLOCKS == 2:
                two = tl.join(columns[column // 2 + column % 2 * 4], columns[column // 2 + column % 2 * 4 + 8])
                tl.store(there[:, :, None] + tl.arange(0, 2)[None, None, :], two)
            else:
                a = tl.join(columns[column // 2 + column % 2 * 4], columns[column // 2 + column % 2 * 4 + 16])
                b = tl.join(columns[column // 2 + column % 2 * 4 + 8], columns[column // 2 + column % 2 * 4 + 24])
                four_words = tl.reshape(tl.join(a, b), (GROUPS, BLOCKS, 4))
                tl.store(there[:, :, None] + tl.arange(0, 4)[None, None, :], four_words)
    of_tile = number * blocks + block
    factor = tl.broadcast_to(_power(tile)[:, None], (BLOCKS, 32))
    tl.store(factor_ptr + of_tile[:, None] * 32 + tl.arange(0, 32)[None, :], factor)
    tl.store(outside_ptr + of_tile, (-tl.reduce(bottom, 0, higher) - tile < LOWEST).to(tl.uint8))


def columns(codes: Tensor, scales: Tensor, how: dict[str, Any]) -> Fp8:
    """`mxfp4.columns_to_fp8` in E4M3 of one lane [1, R, C / 2], R a multiple of 128 · REPEAT, C one of 32 · BLOCKS."""
    _, rows, blocks = scales.shape
    tiles, across = rows // 128, blocks // how["BLOCKS"]
    table, constants = _fp8_table(E4M3, codes.device)
    values = codes.new_empty(1, blocks * 32, rows)
    factor = values.new_empty(1, tiles, blocks * 32, dtype=torch.float32)
    outside = values.new_empty(1, tiles, blocks, dtype=torch.bool)
    words = values.view(torch.int32)
    if how["ROWS"]:
        inputs = codes.view(torch.int32), scales, table, words, factor.view(torch.int32), outside.view(torch.uint8)
        launch = {name: how[name] for name in ("ROWS", "num_warps", "maxnreg")} | {"enable_fp_fusion": False}
        _held_kernel[(across, tiles)](*inputs, rows, blocks, **constants, **launch)
        return Fp8(values.view(E4M3), factor.mT, outside.mT)
    there = TensorDescriptor.from_tensor(words[0], [how["BLOCKS"] * 32, 32]) if how["TMA"] else words
    more = {name: value for name, value in how.items() if name not in ("GROUP", "ROWS")} | {"enable_fp_fusion": False}
    _columns_kernel[(across * tiles // how["REPEAT"],)](
        *(codes.view(torch.int32), scales, table, words, there, factor.view(torch.int32), outside.view(torch.uint8)),
        *(rows, blocks, min(how["GROUP"], across)),
        **constants,
        **more,
    )
    return Fp8(values.view(E4M3), factor.mT, outside.mT)


def ways() -> Iterator[dict[str, Any]]:
    """The launches: first what one thing changes, then some together."""
    plain = {"BLOCKS": 1, "GROUP": 1 << 20, "REPEAT": 1, "TMA": False, "STORE": "", "STAGES": 1, "num_warps": 1}
    plain |= {"ROWS": 0, "maxnreg": None}
    yield plain
    for rows, registers in ((4, None), (4, 64), (8, None), (8, 80), (16, None), (16, 168), (16, 128)):
        yield plain | {"BLOCKS": rows // 4, "ROWS": rows, "maxnreg": registers}
    for group in (1, 2, 4, 16, 64):
        yield plain | {"GROUP": group}
    for store in (".cs", ".cg", ".wt"):
        yield plain | {"STORE": store}
    for blocks, warps in ((2, 1), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8)):
        for group in dict.fromkeys((1 << 20, 8 // blocks, 1)):
            yield plain | {"BLOCKS": blocks, "num_warps": warps, "GROUP": group}
    for blocks, warps in ((1, 1), (2, 2), (4, 4), (8, 8)):
        for group, repeat in itertools.product((1 << 20, 8 // blocks), (1, 4)):
            yield plain | {"BLOCKS": blocks, "num_warps": warps, "GROUP": group, "TMA": True, "REPEAT": repeat}
    for blocks, warps, stages in ((1, 1, 2), (4, 4, 2), (4, 4, 3)):
        for repeat in (2, 8):
            yield plain | {"BLOCKS": blocks, "num_warps": warps, "GROUP": 4, "REPEAT": repeat, "STAGES": stages}


def name(how: dict[str, Any]) -> str:
    """A launch in words."""
    group = "all" if how["GROUP"] > EDGE else how["GROUP"]
    registers = f", at most {how['maxnreg']} registers" if how["maxnreg"] else ""
    if how["ROWS"]:
        return f"blocks {how['BLOCKS']}, rows {how['ROWS']} of a thread{registers}"
    return (
        f"blocks {how['BLOCKS']}, warps {how['num_warps']}, beside {group}, repeat {how['REPEAT']}"
        f"{', tma' if how['TMA'] else ''}{', ' + how['STORE'] if how['STORE'] else ''}, stages {how['STAGES']}"
    )


def compile_it(how: dict[str, Any]) -> str:
    """A process that compiles a launch into Triton's cache: an empty text, or what went wrong."""
    codes, scales = operand(torch.randn(1, 1024, 1024, device="cuda"))
    try:
        columns(codes, scales, how)
        torch.cuda.synchronize()
    except Exception as error:  # what cannot be launched is a row of the table
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}" if str(error) else type(error).__name__
    return ""


def _fill(out: Tensor, tile: int, warps: int) -> None:
    _filled_kernel[(triton.cdiv(len(out), tile),)](out, len(out), tile, num_warps=warps)


def _widen(words: Tensor, out: Tensor, tile: int, warps: int) -> None:
    _widened_kernel[(triton.cdiv(len(words), tile),)](words, out, len(words), tile, num_warps=warps)


def timed(call: Callable[[], object]) -> float:
    """Median µs of a call."""
    return median_us(graph(call)) / CALLS


def differing(found: Fp8, wanted: Fp8) -> int:
    """Bytes that differ, however the tensors lie in memory: factors and marks are transposed."""
    pairs = [[x.contiguous().view(torch.uint8) for x in pair] for pair in zip(found, wanted, strict=True)]
    return sum(int((a != b).sum()) for a, b in pairs)


def main() -> int:
    """Compile the variants, each once, and print their table."""
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return table(compiled(pool))


def compiled(pool: Executor) -> dict[str, str]:
    """By the names of launches what went wrong with them, if anything. Those that differ in GROUP are one kernel."""
    of = {name(how | {"GROUP": 1}): how | {"GROUP": 1} for how in ways()}
    failed = dict(zip(of, pool.map(compile_it, of.values()), strict=True))
    return {name(how): failed[name(how | {"GROUP": 1})] for how in ways()}


def table(failed: dict[str, str]) -> int:
    """Print a line for each ceiling and variant, then the fastest; 1 if bits differ. failed: as `compiled` has it."""
    codes, scales = operand(torch.randn(1, EDGE, EDGE, device="cuda"))
    wanted = ours.columns_to_fp8(codes, scales)
    written = wanted.values.nbytes + wanted.factor.nbytes
    nbytes = codes.nbytes + scales.nbytes + written
    copy = copy_us(torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda"))
    print(torch.cuda.get_device_name(), f"copy of {nbytes / 1e6:.1f} MB, half read: {copy:.1f} us", flush=True)
    words = codes.view(torch.int32).flatten()
    out = words.new_empty(2 * len(words))
    flat = words.new_empty(written // 4)
    print(f"fill of {written / 1e6:.1f} MB: torch {timed(lambda: flat.fill_(7)):.1f} us")
    for tile, warps in itertools.product((512, 1024, 4096), (1, 4)):
        fill = timed(partial(_fill, flat, tile, warps))
        widened = timed(partial(_widen, words, out, tile, warps))
        print(f"tile {tile}, warps {warps}: fill {fill:.1f} us, read a word and write two {widened:.1f} us", flush=True)
    now = timed(lambda: ours.columns_to_fp8(codes, scales))
    print(f"in use: {now:.1f} us, {copy / now:.2f} of a copy; rows: {timed(lambda: ours.to_fp8(codes, scales)):.1f} us")
    rows: list[tuple[float, str]] = []
    wrong = 0
    for how in ways():
        if failed[name(how)]:
            print(f"{name(how)}: {failed[name(how)]}", flush=True)
            continue
        bad = differing(columns(codes, scales, how), wanted)
        us = timed(partial(columns, codes, scales, how))
        print(f"{us:6.1f} us, {copy / us:.2f} of a copy, {bad} wrong: {name(how)}", flush=True)
        wrong += bad
        rows.append((us, name(how)))
    print(*("fastest: {:.1f} us, {}".format(*row) for row in sorted(rows)[:5]), sep="\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
