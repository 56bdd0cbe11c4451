"""Ways to launch the quantizers of MXFP4 in FP8 (kernels/quant/triton/pair_columns.py, pair_rows.py), timed:

    python -m tests.kernels.fp8_quantizer_variants

On a GPU. For each size the bytes of each way are compared with those of the kernel for all formats, then its time
stands beside that kernel's, that of the quantizer of operands in BF16, and a copy of as many bytes; last the way in use
where 5 % of tiles of columns, 10 % of rows, have a number that FP8 does not hold. Ways are compiled by several
processes first. The fastest goes into `COLUMNS`, `ROWS` and `BOTH`, with its time into docs/log.md.

Instructions an element, of a tile that is held, are some 13 for all of them, beside 41 (rows) and 50 (columns) of the
kernel for all formats: so bytes should limit, and what differs is how many programs run at a time and how threads share
lines of memory.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from fp4dse.dse import QUANTIZERS
from fp4dse.kernels.bench.clock import CALLS, copy_us, graph, median_us
from fp4dse.kernels.ops.fp8 import E5M2, History, Shift, top_of
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.triton import launch
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton.features import features_of
from fp4dse.kernels.quant.triton.pair_both import BOTH, both_in_fp8, both_with
from fp4dse.kernels.quant.triton.pair_columns import COLUMNS, columns_in_fp8, columns_with
from fp4dse.kernels.quant.triton.pair_rows import ROWS, rows_in_fp8, rows_with
from fp4dse.kernels.quant.triton.pair_tiles import How

TALL = 16384
WIDTHS = {True: (1024, 2736, 5472), False: (1024, 5472)}
"""Of columns; of rows, whose blocks have to fit."""
BOTH_WAYS = [both_with(*of) for of in ((16, 4, 128), (16, 4, 168), (16, 4, 112), (8, 4, 80), (8, 4, 96), (8, 4, 120))]
"""Of rows and columns from one read: rows and words of a thread, registers."""
PROCESSES = 14

Made = tuple[Tensor, Shift, Tensor]


class Way(NamedTuple):
    """A launch for columns, or for rows."""

    columns: bool
    how: How

    def name(self) -> str:
        """In words."""
        what = "columns" if self.columns else "rows"
        in_use = ", in use" if self.how == (COLUMNS if self.columns else ROWS) else ""
        warps, rows, words, registers, _ = self.how
        return f"{what}, warps {warps}, rows {rows}, words {words}, registers {registers}{in_use}"

    def call(self, x: Tensor, call: Call, history: History) -> Made:
        """The operand."""
        return (columns_in_fp8 if self.columns else rows_in_fp8)(x, call, E5M2, history, self.how)


def ways() -> list[Way]:
    """The launches: warps, rows and words of a thread, registers."""
    columns = (4, 16, 2, 80), (4, 16, 2, 64), (4, 16, 2, 96), (2, 16, 2, 80), (1, 16, 2, 80), (4, 32, 1, 80)
    columns += (4, 8, 4, 80), (4, 16, 4, 128)
    rows = (4, 4, 2, 80), (4, 4, 2, 64), (4, 4, 2, 96), (2, 4, 2, 80), (4, 2, 4, 80), (4, 8, 1, 80)
    return [*(Way(True, columns_with(*of)) for of in columns), *(Way(False, rows_with(*of)) for of in rows)]


def operand(x: Tensor) -> tuple[Call, History]:
    """How x [1, R, C] is quantized, and what the step before has left."""
    tables, zero = descriptor((QUANTIZERS["mxfp4"],), x.device), torch.zeros((), dtype=torch.int64, device=x.device)
    tops = torch.zeros(1, 3, dtype=torch.int32, device=x.device)
    tops[:, 2] = top_of(x)
    return Call(32, *tables, features_of(*tables), zero[None], zero, 0), History(tops, zero, True)


def for_all_formats(x: Tensor, columns: bool, call: Call, history: History) -> Made:
    """By the kernel for all formats."""
    with patch.object(launch, "is_paired", lambda *_: False):
        return launch.launch_fp8(x, columns, call, E5M2, history)


def differing(found: Made, wanted: Made) -> int:
    """Bytes that differ: codes, flags, power and factor, and what is in BF16 where there is a flag."""
    (values, shift, dec), (values_, shift_, dec_) = found, wanted
    pairs: list[tuple[Any, Any]] = [(values, values_), (shift.flags, shift_.flags), (shift.power, shift_.power)]
    pairs += [(dec, dec_), (shift.notes.amax(1) > 0, shift_.notes.amax(1) > 0)]
    is_wide = shift_.flags.repeat_interleave(128, 2)[:, :, : values.shape[2]] > 0
    pairs += [(shift.wide[is_wide].nan_to_num(7.0), shift_.wide[is_wide].nan_to_num(7.0))]
    views = [
        [x.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8) for x in pair] for pair in pairs
    ]
    return sum(int((a != b).sum()) for a, b in views)


def compile_it(way: Way) -> str:
    """A process that compiles a launch into Triton's cache: an empty text, or what went wrong."""
    try:
        for width in (1024, 5472):
            x = torch.randn(1, 256, width, device="cuda", dtype=torch.bfloat16)
            way.call(x, *operand(x))
        torch.cuda.synchronize()
    except Exception as error:  # what cannot be launched is a row of the table
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}" if str(error) else type(error).__name__
    return ""


def timed(call: Callable[[], object]) -> float:
    """Median µs of a call."""
    return median_us(graph(call)) / CALLS


def flagged(x: Tensor) -> Tensor:
    """x with a block in 5 % of tiles of 128 rows and 64 columns so small that FP8 does not hold it."""
    x = x.clone()
    for number in range(0, TALL // 128 * (x.shape[2] // 64), 20):
        row, column = number // (x.shape[2] // 64) * 128, number % (x.shape[2] // 64) * 64
        x[:, row : row + 32, column : column + 32] *= 2.0**-40
    return x


def table(width: int, columns: bool, failed: dict[str, str]) -> int:
    """Print the lines of a size; the number of bytes that differ. failed: as `compile_it` has it, by name."""
    x = torch.randn(1, TALL, width, device="cuda").to(torch.bfloat16)
    call, history = operand(x)
    what = f"{'columns' if columns else 'rows'} of {TALL} x {width}"
    copies = [copy_us(torch.empty(x.numel() * n // 2, dtype=torch.uint8, device="cuda")) for n in (3, 4)]
    bf16 = timed(lambda: fused.operand(x, columns, call, torch.bfloat16))
    before = timed(lambda: for_all_formats(x, columns, call, history))
    print(f"{what}: BF16 {bf16:.1f} us, its copy {copies[1]:.1f}; for all formats {before:.1f}, copy {copies[0]:.1f}")
    wrong, odd = 0, flagged(x)
    for way in ways():
        if way.columns != columns:
            continue
        if failed[way.name()]:
            print(f"{way.name()}: {failed[way.name()]}", flush=True)
            continue
        bad = sum(differing(way.call(y, call, history), for_all_formats(y, columns, call, history)) for y in (x, odd))
        us = timed(lambda way=way: way.call(x, call, history))
        print(f"{us:7.1f} us, {copies[0] / us:.2f} of a copy, {bad} wrong: {way.name()}", flush=True)
        wrong += bad
    before = timed(lambda: for_all_formats(odd, columns, call, history))
    us = timed(lambda: (columns_in_fp8 if columns else rows_in_fp8)(odd, call, E5M2, history))
    print(f"{us:7.1f} us, for all formats {before:.1f}: some tiles are not held", flush=True)
    return wrong


def table_of_both(width: int) -> int:
    """`table` of rows and columns from one read, beside the sum of both ways in use, two launches."""
    x = torch.randn(1, TALL, width, device="cuda").to(torch.bfloat16)
    call, history = operand(x)
    calls, dtypes, histories = (call, call), (E5M2, E5M2), (history, history)
    apart = [timed(lambda made=made: made(x, call, E5M2, history)) for made in (rows_in_fp8, columns_in_fp8)]
    copy = copy_us(torch.empty(x.numel() * 2, dtype=torch.uint8, device="cuda"))  # 4 bytes a number in all
    print(
        f"both, {TALL} x {width}: rows {apart[0]:.1f} us and columns {apart[1]:.1f}, {sum(apart):.1f}; copy {copy:.1f}"
    )
    wrong = 0
    for how in BOTH_WAYS:
        bad = 0
        for y in (x, flagged(x)):
            found = both_in_fp8(y, calls, dtypes, histories, how)
            wanted = rows_in_fp8(y, call, E5M2, history), columns_in_fp8(y, call, E5M2, history)
            bad += sum(map(differing, found, wanted))
        us = timed(lambda how=how: both_in_fp8(x, calls, dtypes, histories, how))
        in_use = ", in use" if how == BOTH else ""
        name = f"both, rows {how.rows}, words {how.words}, registers {how.registers}{in_use}"
        print(f"{us:7.1f} us, {copy / us:.2f} of a copy, {bad} wrong: {name}", flush=True)
        wrong += bad
    return wrong


def main() -> int:
    """Compile the ways and print their tables; 1 if bytes differ."""
    print(torch.cuda.get_device_name(), flush=True)
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        failed = dict(zip((way.name() for way in ways()), pool.map(compile_it, ways()), strict=True))
    wrong = sum(table(width, columns, failed) for columns, widths in WIDTHS.items() for width in widths)
    return int(wrong + sum(map(table_of_both, WIDTHS[False])) > 0)


if __name__ == "__main__":
    sys.exit(main())
