"""Instructions an element of the kernels that convert MXFP4 to FP8 and that pack rows, as an H100 gets them:

    python -m tests.kernels.instructions

It needs no GPU: Triton brings the assembler, and the program that lists what it made. A loop's body counts once, and so
does what a program does once.
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
from fp4dse.kernels.ops.messages import triton as messages
from fp4dse.kernels.ops.mxfp4 import triton as mxfp4
from tests.kernels import conversion_variants
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


def cases() -> Iterator[Case]:
    """What is in use, then the ways of `conversion_variants`."""
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
