"""Ways to launch and to write the conversions of packed MXFP4 rows to FP8, timed beside what memory allows:

    python -m tests.kernels.conversion_variants

On a GPU. Ceilings are kernels that convert nothing: a copy, a fill of the bytes that are written, and kernels that read
a word and write two. Every variant has its bits compared with the kernel in use before it is timed, and is printed as
soon as it is. Ways are compiled by several processes first. What is faster goes into kernels/ops/mxfp4/triton.py, with
its time into docs/log.md.

Columns: the kernel in use keeps all in the registers of the thread that read it, which has eight rows of a block, and
takes 3.4 instructions an element (`python -m tests.kernels.instructions`). The one before it had four rows to a thread,
so that words of 4 numbers go through shared memory to make lines: 4.9 instructions, or 4.2 here with less masked.
On an H100 four rows in registers were as slow as that (4.0 instructions), sixteen as fast as eight (3.1); fewer
registers, other orders of programs, bulk stores and loops over tiles were slower (docs/log.md).

Rows: 5.9 instructions an element, of which a fifth exchange words between threads, so that each stores 16 bytes beside
those of the next. More rows a program take fewer.
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp4dse.kernels.bench.clock import CALLS, copy_us, graph, median_us
from fp4dse.kernels.bench.conversion import EDGE, operand
from fp4dse.kernels.ops.mxfp4 import E4M3, Fp8
from fp4dse.kernels.ops.mxfp4.triton import (
    _TO_FP8,
    _TO_FP8_COLUMNS,
    _below,
    _blocks,
    _bytes,
    _fp8_table,
    _power,
    _tile_of,
    _transposed,
    columns_to_fp8,
    higher,
    to_fp8,
)

PROCESSES = 14


class Way(NamedTuple):
    """A launch. columns: what it converts to, else rows. shared: `_shared_kernel`, else the kernel in use. how: its
    arguments in place of those in use."""

    columns: bool
    shared: bool
    how: dict[str, Any]

    def name(self) -> str:
        """In words."""
        what = "columns" if self.columns else "rows"
        return ", ".join([what, *["through shared memory"] * self.shared, *(f"{k} {v}" for k, v in self.how.items())])

    def call(self, codes: Tensor, scales: Tensor) -> Fp8:
        """Of one lane [1, R, C / 2]; through shared memory R is a multiple of 128, C one of 32 · BLOCKS."""
        if self.shared:
            return _through_shared(codes, scales, self.how)
        with patch.dict(_TO_FP8_COLUMNS if self.columns else _TO_FP8, self.how):
            return self.in_use(codes, scales)

    def in_use(self, codes: Tensor, scales: Tensor) -> Fp8:
        """The same by what is in use."""
        return (columns_to_fp8 if self.columns else to_fp8)(codes, scales)


def ways() -> list[Way]:
    """The launches."""
    return [
        *(Way(True, False, {"maxnreg": registers}) for registers in (112, 80)),
        *(Way(True, True, {"BLOCKS": blocks, "num_warps": 1}) for blocks in (1, 2)),
        *(Way(False, False, {"ROWS": 16 * n, "num_warps": warps}) for warps in (1, 2) for n in (warps, 2 * warps)),
    ]


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


@triton.jit
def _shared_kernel(  # noqa: PLR0913
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
    BLOCKS: tl.constexpr,
):
    """A tile of 128 rows and BLOCKS blocks, four rows of it to a thread; nothing is filled in part."""
    number, tiles = tl.program_id(1).to(tl.int64), rows // 128
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    row = number * 128 + tl.arange(0, 32) * 4
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
    column = (tl.program_id(0) * BLOCKS * 32 + tl.arange(0, BLOCKS * 32)).to(tl.int64)
    tl.store(out_ptr + (column * tiles + number)[:, None] * 32 + tl.arange(0, 32)[None, :], columns)
    of_tile = number * blocks + block
    factor = tl.broadcast_to(tl.trans(_power(tile)), (BLOCKS, 32))
    tl.store(factor_ptr + of_tile[:, None] * 32 + tl.arange(0, 32)[None, :], factor)
    below = _below(counting_a, tile, LOWEST) | _below(counting_b, tile, LOWEST)
    below |= _below(counting_c, tile, LOWEST) | _below(counting_d, tile, LOWEST)
    tl.store(outside_ptr + of_tile, tl.reduce(below, 0, higher).to(tl.uint8))


def _through_shared(codes: Tensor, scales: Tensor, how: dict[str, Any]) -> Fp8:
    _, rows, blocks = scales.shape
    tiles = rows // 128
    table, constants = _fp8_table(E4M3, codes.device)
    values = codes.new_empty(1, blocks * 32, rows)
    factor = values.new_empty(1, tiles, blocks * 32, dtype=torch.float32)
    outside = values.new_empty(1, tiles, blocks, dtype=torch.bool)
    inputs = codes.view(torch.int32), scales, table
    outputs = values.view(torch.int32), factor.view(torch.int32), outside.view(torch.uint8)
    launch = constants | how | {"enable_fp_fusion": False}
    _shared_kernel[(blocks // how["BLOCKS"], tiles)](*inputs, *outputs, rows, blocks, **launch)
    return Fp8(values.view(E4M3), factor.mT, outside.mT)


def compile_it(way: Way) -> str:
    """A process that compiles a launch into Triton's cache: an empty text, or what went wrong."""
    codes, scales = operand(torch.randn(1, 1024, 1024, device="cuda"))
    try:
        way.call(codes, scales)
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
    """Compile the variants and print their table."""
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return table(compiled(pool))


def compiled(pool: Executor) -> dict[str, str]:
    """By the names of launches what went wrong with them, if anything."""
    return dict(zip((way.name() for way in ways()), pool.map(compile_it, ways()), strict=True))


def table(failed: dict[str, str]) -> int:
    """Print a line for each ceiling and variant, then the fastest; 1 if bits differ. failed: as `compiled` has it."""
    codes, scales = operand(torch.randn(1, EDGE, EDGE, device="cuda"))
    in_use = columns_to_fp8(codes, scales)
    written = in_use.values.nbytes + in_use.factor.nbytes
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
    for what, call in {"columns": columns_to_fp8, "rows": to_fp8}.items():
        now = timed(partial(call, codes, scales))
        print(f"{now:6.1f} us, {copy / now:.2f} of a copy: {what}, in use", flush=True)
    wrong = 0
    for way in ways():
        if failed[way.name()]:
            print(f"{way.name()}: {failed[way.name()]}", flush=True)
            continue
        bad = differing(way.call(codes, scales), way.in_use(codes, scales))
        us = timed(partial(way.call, codes, scales))
        print(f"{us:6.1f} us, {copy / us:.2f} of a copy, {bad} wrong: {way.name()}", flush=True)
        wrong += bad
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
