"""Packed operands as numbers again: element times block scale, which is exact in FP32 (quant/packed.py)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fp4dse.dse import Quantizer
from fp4dse.kernels.dispatch import Operation
from fp4dse.kernels.quant.packed import unpack

_UNPACKED = Operation(__name__)


def unpacked(codes: Tensor, scales: Tensor, quantizers: Sequence[Quantizer]) -> Tensor:
    """The operand float32 [L, R, C], but for the tensor's factor. codes: uint8 [L, R, C / 2], scales: uint8 [L, R,
    C / B]; quantizers: canonical ones that `why_not_packed` has no reason against, one a lane."""
    if kernels := _UNPACKED.kernels(codes):
        return kernels.unpacked(codes, scales, quantizers)
    lanes, rows, half = codes.shape
    blocks = codes.view(lanes, -1, half // scales.shape[2])
    return unpack(blocks, scales.flatten(1), quantizers).view(lanes, rows, 2 * half)
