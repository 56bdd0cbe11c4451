"""Rows as they are sent from one device to another: chosen rows of a tensor as bytes, and these as rows again.

A row travels as its codes, then its scales, then its factors in FP32, all by themselves: as a recipe stores an operand
of that row (quant/operand/stored.py). Choosing rows and quantizing them is one pass, and so is decoding them at their
places, with zeros in the places that get none: a number is read once and written once, and none is written twice.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.dse.rounding import Nearest
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.quant.backend import backend
from fp4dse.kernels.quant.operand.kinds import slot_of
from fp4dse.kernels.quant.operand.records import Stored, Use
from fp4dse.kernels.quant.operand.slot import Slot
from fp4dse.kernels.quant.operand.stored import restored, stored, why_not_stored

_MESSAGES = Operation(__name__)


def why_not_sent(q: Quantizer) -> str | None:
    """The formats that are accepted instead of a quantizer, None if its rows can be sent: each is quantized by
    itself."""
    if q.element == "none" or q.is_plain:
        return None
    if q.rounding != Nearest() or q.outliers is not None:
        return "rounding to nearest, without outliers"
    over = q.canonical().factors_over
    if not (isinstance(q.block, int) or q.block == "row") or (q.tensor_scale is not None and over == "tensor"):
        return "scales of their own in every row, such as mxfp4, fp8-row or fp8-1x128"
    return why_not_stored(q.canonical())


def packed(x: Tensor, chosen: Tensor, q: Quantizer, each: int = 1) -> Tensor:
    """Rows of x [N, D], float32 or bfloat16, as bytes, uint8 [S, B], by a quantizer that `why_not_sent` has no reason
    against. chosen: int64 [S]; row n is that of chosen[n] // each."""
    if not len(chosen):
        return torch.empty(0, row_bytes(x.shape[1], q), dtype=torch.uint8, device=x.device)
    if kernels := _MESSAGES.kernels(x, q):
        return kernels.packed(x, chosen, q, each)
    return _bytes(x[chosen // each], q)


def placed(message: Tensor, source: Tensor, width: int, q: Quantizer) -> Tensor:
    """Rows of a message [S, B] as numbers, float32 [P, width]. source: int64 [P]; row n is that of source[n], zeros
    where it is -1."""
    if kernels := _MESSAGES.kernels(source, q):
        return kernels.placed(message, source, width, q)
    return F.pad(_numbers(message, width, q), (0, 0, 0, 1))[source]  # -1 is the last


def row_bytes(width: int, q: Quantizer) -> int:
    """Bytes of a row of so many numbers."""
    return 4 * width if q.element == "none" else sum(_sizes(_example(width, q)))


def _bytes(rows: Tensor, q: Quantizer) -> Tensor:
    """Rows [S, D], at least one, as bytes, uint8 [S, B]."""
    if q.element == "none":
        return rows.to(torch.float32).contiguous().view(torch.uint8)
    if len(rows) == 1:  # whose factor would be as one of a tensor
        return _bytes(F.pad(rows, (0, 0, 0, 1)), q)[:1]
    parts = (part for part in _stored(rows, q) if _is_of_rows(part))
    return torch.cat([part.contiguous().view(torch.uint8).view(len(rows), -1) for part in parts], dim=1)


def _numbers(message: Tensor, width: int, q: Quantizer) -> Tensor:
    """The inverse of `_bytes`: float32 [S, width]."""
    if q.element == "none":
        return message.contiguous().view(torch.float32)
    if not len(message):
        return torch.empty(0, width, device=message.device)
    example = _example(width, q)
    cut = iter(message.split(_sizes(example), dim=1))
    parts = [
        _apart(next(cut)).view(of.dtype).view(1, len(message), *of.shape[2:])
        if _is_of_rows(of)
        else of.to(message.device)
        for of in example
    ]
    return restored(Stored(*parts), [q.canonical()]).decoded()[0, :, :width]


def _apart(part: Tensor) -> Tensor:
    """A part of rows in memory of its own, also of a single row: there FP32 begins at a multiple of four bytes."""
    return part.clone(memory_format=torch.contiguous_format)


@cache
def _example(width: int, q: Quantizer) -> Stored:
    """Two rows of zeros as they are stored."""
    return _stored(torch.zeros(2, width), q)


def _sizes(example: Stored) -> list[int]:
    """Bytes of each part of a row."""
    return [part.nbytes // 2 for part in example if _is_of_rows(part)]


def _is_of_rows(part: Tensor) -> bool:
    """True for a part of what is stored that has a value of its own for each row; the factor of a tensor without a
    tensor scale is a constant."""
    return part.ndim > 1


def _stored(rows: Tensor, q: Quantizer) -> Stored:
    """Rows [S, D], S above 1, as a recipe stores an operand of one lane."""
    q, slot = q.canonical(), _slot(q.canonical(), rows.device)
    nothing = torch.zeros((), dtype=torch.int64, device=rows.device)
    use = Use(nothing[None], nothing, 0, training=False, length=rows.shape[1], keeping=True)
    padded = F.pad(rows.to(torch.float32), (0, -rows.shape[1] % slot.unit))
    operand = slot.quantize(padded[None], use)
    return operand.stored or stored(operand.terms[0], [q])


@cache
def _slot(q: Quantizer, device: torch.device) -> Slot:
    """A slot of one lane. A GPU is asked some thirty times what a descriptor says, so that it is made once."""
    return slot_of([q], 0, device, backend(str(device)))
