"""The GPU's rows of conversions between MXFP4 and FP8 (ops/mxfp4): 8192 × 8192 numbers, beside a copy of their bytes.

What turns an operand from rows to columns is there three times: as one kernel; as two, by way of MXFP4 along the
columns, which rounds again; and by way of BF16, two functions in torch as their users write them, compiled. The last
takes its factors from the maxima of what it decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fp4dse.dse import QUANTIZERS
from fp4dse.kernels.bench.clock import CALLS, copy_us, graph, median_us, named
from fp4dse.kernels.bench.timing import Timing
from fp4dse.kernels.ops import mxfp4
from fp4dse.kernels.ops.mxfp4 import BLOCK, E4M3, TILE, Fp8
from fp4dse.kernels.quant.call import Call
from fp4dse.kernels.quant.descriptor import descriptor
from fp4dse.kernels.quant.triton import operators as fused
from fp4dse.kernels.quant.triton.features import features_of

EDGE = 8192
CHECKED = 1024
"""Edge of what is compared with the definition, which takes seconds on a CPU where it is larger."""
_TOP = 8
"""Exponent of E4M3's largest numbers."""


class Case(NamedTuple):
    """A row. call: on a device; expected: the same by the definition, on a CPU; nbytes: read and written, what lies in
    between not counted."""

    what: str
    call: Callable[[], tuple[Tensor, ...]]
    expected: Callable[[], tuple[Tensor, ...]]
    nbytes: int


def conversions(only: Sequence[str] = ()) -> Iterator[Timing]:
    """The rows, of EDGE × EDGE numbers, on the current CUDA device; only: as in `table.bench`."""
    timed, checked = (cases(*operand(torch.randn(1, n, n, device="cuda"))) for n in (EDGE, CHECKED))
    for case, small in zip(timed, checked, strict=True):
        if not named(case.what, only):
            continue
        pairs = zip(small.call(), small.expected(), strict=True)
        wrong = sum(int((a.cpu() != b).sum().item()) for a, b in pairs)
        copy = copy_us(torch.empty(case.nbytes // 2, dtype=torch.uint8, device="cuda"))
        us = median_us(graph(case.call)) / CALLS
        yield Timing(case.what, us, case.nbytes / us / 1e3, copy / us, wrong)


def operand(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 x [1, R, C] in MXFP4, by the device's kernel."""
    tables, zero = descriptor((QUANTIZERS["mxfp4"],), x.device), torch.zeros((), dtype=torch.int64, device=x.device)
    codes, scales, _ = fused.packed(x, False, Call(BLOCK, *tables, features_of(*tables), zero[None], zero, 0))
    return codes, scales


def cases(codes: Tensor, scales: Tensor) -> list[Case]:
    """The rows for a packed operand."""
    there, here = (codes, scales), (codes.cpu(), scales.cpu())
    fp8 = mxfp4.to_fp8(*there)
    fp8_there, fp8_here = fp8[:2], (fp8.values.cpu(), fp8.factor.cpu())
    decode = torch.compile(to_bf16, fullgraph=True, dynamic=False)
    quantize = torch.compile(bf16_to_fp8, fullgraph=True, dynamic=False)
    packed = codes.nbytes + scales.nbytes
    both = packed + fp8.values.nbytes + fp8.factor.nbytes  # 1.56 bytes an element
    return [
        Case(
            "mxfp4 to fp8 of columns, one kernel",
            lambda: _bits(mxfp4.columns_to_fp8(*there)),
            lambda: _bits(mxfp4.columns_to_fp8(*here)),
            both,
        ),
        Case(
            "mxfp4 to mxfp4 of columns to fp8, two kernels",
            lambda: _bits(mxfp4.to_fp8(*mxfp4.to_columns(*there))),
            lambda: _bits(mxfp4.to_fp8(*mxfp4.to_columns(*here))),
            both,
        ),
        Case(
            "mxfp4 to bf16 to fp8 of columns, two compiled functions",
            lambda: quantize(decode(*there)),
            lambda: bf16_to_fp8(to_bf16(*here)),
            both,
        ),
        Case(
            "mxfp4 to mxfp4 of columns",
            lambda: mxfp4.to_columns(*there),
            lambda: mxfp4.to_columns(*here),
            2 * packed,
        ),
        Case("mxfp4 to fp8", lambda: _bits(mxfp4.to_fp8(*there)), lambda: _bits(mxfp4.to_fp8(*here)), both),
        Case("fp8 to mxfp4", lambda: mxfp4.from_fp8(*fp8_there), lambda: mxfp4.from_fp8(*fp8_here), both),
    ]


def to_bf16(codes: Tensor, scales: Tensor) -> Tensor:
    """A packed operand [L, R, C / 2] in BF16, [L, R, C]."""
    four = torch.stack([codes & 15, codes >> 4], -1).flatten(2).int()
    normal = ((four >> 1 & 3) + 126 << 23 | (four & 1) << 22).view(torch.float32)
    values = torch.where(four & 7 > 1, normal, (four & 1) * 0.5) * (1 - (four >> 3) * 2)
    scale = (scales.int() << 23).view(torch.float32)
    return (values.view(*scale.shape, BLOCK) * scale[..., None]).flatten(2).to(torch.bfloat16)


def bf16_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [L, R, C] transposed, in E4M3 as bytes, [L, C, R], under powers of two float32 [L, C, R / 128] that follow the
    maxima."""
    tiles = x.mT.float().unflatten(2, (-1, TILE))
    power = tiles.abs().amax(-1).view(torch.int32) & 0x7F800000
    factor = torch.where(power > 0, power - (_TOP << 23), 127 << 23).view(torch.float32)
    return (tiles / factor[..., None]).to(E4M3).flatten(2).view(torch.uint8), factor


def _bits(x: Fp8) -> tuple[Tensor, Tensor, Tensor]:
    return x.values.view(torch.uint8), x.factor, x.outside
