"""Instructions an element of the kernels that quantize to MXFP4, convert it to FP8 and pack rows, as an H100 gets them:

    python -m tests.kernels.instructions

It needs no GPU: Triton brings the assembler, and the program that lists what it made. A loop's body counts once, and so
does what a program does once, and what it seldom does: quantizers in FP8 have a second way for tiles that are not held.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from fp4dse.dse import QUANTIZERS, Quantizer
from fp4dse.kernels.ops.fp8 import E5M2, History
from fp4dse.kernels.ops.messages import triton as messages
from fp4dse.kernels.ops.mxfp4 import triton as mxfp4
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.triton import launch
from fp4dse.kernels.quant.triton.features import features_of
from tests.kernels import conversion_variants, fp8_quantizer_variants
from tests.kernels.compiling import Absent

LISTING = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
EDGE = 2048


class Case(NamedTuple):
    """A launch. numbers: that a program of it takes."""

    what: str
    numbers: int
    launch: Callable[[], Any]


def names(listing: str) -> list[str]:
    """The instructions of a listing, without predicates and operands, and without those that do nothing."""
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", listing)
    return [name for name in found if name != "NOP"]


def quantizers() -> Iterator[Case]:
    """Those of MXFP4 to nearest: operands in BF16, in FP8, and in FP8 by the kernel for all formats."""
    tables, zero = descriptor((QUANTIZERS["mxfp4"],)), torch.zeros((), dtype=torch.int64)
    call = Call(32, *tables, features_of(*tables), zero[None], zero, 0)
    x, history = torch.zeros(1, EDGE, EDGE, dtype=torch.bfloat16), History(torch.zeros(1, 3).int(), zero, True)
    for columns, numbers in ((False, 2048), (True, 4096)):
        what = "columns" if columns else "rows"
        outputs = x, None, torch.zeros(1)
        yield Case(f"{what} to mxfp4 in BF16", numbers, lambda c=columns, o=outputs: launch.launch(x, c, call, o))
        yield Case(
            f"{what} to mxfp4 in FP8, in use", 8192, lambda c=columns: launch.launch_fp8(x, c, call, E5M2, history)
        )
        yield Case(
            f"{what} to mxfp4 in FP8, for all formats",
            8192 if columns else 2048,
            lambda c=columns: fp8_quantizer_variants.for_all_formats(x, c, call, history),
        )

    calls, dtypes, histories = (call, call), (E5M2, E5M2), (history, history)
    yield Case("both to mxfp4 in FP8", 16384, lambda: launch.launch_both_fp8(x, calls, dtypes, histories))


def cases() -> Iterator[Case]:
    """What is in use, then the ways of `conversion_variants`."""
    yield from quantizers()
    codes, scales = (torch.zeros(1, EDGE, EDGE // n, dtype=torch.uint8) for n in (2, 32))
    rows = mxfp4._TO_FP8["ROWS"] * 128
    yield Case("mxfp4 to fp8 of columns, in use", 8192, lambda: mxfp4.columns_to_fp8(codes, scales))
    yield Case("mxfp4 to fp8, in use", rows, lambda: mxfp4.to_fp8(codes, scales))
    x, number = torch.zeros(EDGE, EDGE), torch.arange(EDGE)
    for q in (QUANTIZERS["mxfp4"], QUANTIZERS["fp8-1x128"], Quantizer(element="bf16")):
        message = torch.empty(EDGE, messages.row_bytes(EDGE, q), dtype=torch.uint8)
        tile = messages._HOW["TILE"]
        yield Case(f"rows to {q.label()}", tile, lambda q=q: messages.packed(x, number, q, 2))
        yield Case(f"{q.label()} to rows", tile, lambda q=q, m=message: messages.placed(m, number, EDGE, q))
    for way in conversion_variants.ways():
        numbers = 4096 * way.how.get("BLOCKS", 2) if way.columns else 128 * way.how["ROWS"]
        yield Case(way.name(), numbers, lambda way=way: way.call(codes, scales))


def main() -> None:
    """Compile each case and print a line for it."""
    compiled: list[Any] = []
    run = JITFunction.run
    driver.set_active(Absent())
    JITFunction.run = lambda *args, warmup, **more: compiled.append(run(*args, warmup=True, **more))
    for case in cases():
        case.launch()
        of = compiled[-1]
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(of.asm["cubin"])
            listing = [
                subprocess.run([LISTING, option, file.name], capture_output=True, text=True, check=True).stdout
                for option in ("-sass", "-res-usage")
            ]
        [registers] = re.findall(r"REG:(\d+)", listing[1])
        of_thread = case.numbers / (32 * of.metadata.num_warps)
        each = len(names(listing[0])) / of_thread
        barriers = names(listing[0]).count("BAR")
        print(
            f"{each:.2f} instructions an element, {registers} registers, {of.metadata.shared} bytes shared, "
            f"{barriers} barriers: {case.what}",
            flush=True,
        )


if __name__ == "__main__":
    main()
