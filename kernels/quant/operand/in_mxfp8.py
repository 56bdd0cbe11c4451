"""A tensor that is kept from the forward to the backward pass in MXFP8.

It is no operand: no product takes it, no recipe says how it is rounded, and lanes in BF16 may keep it so, too. Elements
are rounded to nearest, and nothing but a block shares a scale, so that lanes need not be told apart.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4dse.dse import QUANTIZERS
from fp4dse.kernels.quant.backend import backend
from fp4dse.kernels.quant.operand.lane_quantizers import LaneQuantizers
from fp4dse.kernels.quant.operand.paths import quantized
from fp4dse.kernels.quant.operand.records import Stored, Use
from fp4dse.kernels.quant.operand.stored import restored, stored

FORMAT = QUANTIZERS["mxfp8"].canonical()
BLOCK = 32


def in_mxfp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Elements and scales of x, float32 or bfloat16 [..., C], 33 bytes for 32 numbers.

    E4M3 [1, R, C'], and codes of E8M0, uint8 [1, R, C' / 32]. R: the number of rows; C': C, filled up with zeros to
    whole blocks.
    """
    rows = x.detach().reshape(1, -1, x.shape[-1])
    of, use = _quantizers(str(x.device))
    missing = -x.shape[-1] % BLOCK
    found = stored(quantized(of, F.pad(rows, (0, missing)) if missing else rows, use), of.each)
    return found.codes, found.scales


def from_mxfp8(codes: Tensor, scales: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The numbers of an x of this shape as `in_mxfp8` rounded them, in this dtype: both hold them."""
    values = restored(Stored(codes, scales, scales.new_empty(0)), (FORMAT,)).values
    return values[0, :, : shape[-1]].to(dtype).reshape(shape)


@cache
def _quantizers(device: str) -> tuple[LaneQuantizers, Use]:
    """The quantizer on a device, and its use: nothing is drawn, carried or counted."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    return LaneQuantizers((FORMAT,), 0, torch.device(device), backend(device)), Use(zero[None], zero, 0, training=False)
