"""A soft block maximum in the place of the hard one (the `softsoftmax` of arXiv 2509.17791).

    Z = (amax/β) · ln Σ exp(β |x| / amax)  =  amax · (1 + ln(Σ exp(β (|x|/amax - 1))) / β),    β = 80

Z is at least amax and at most 1 + ln(B)/β times it, 3.5 % more for blocks of 16; its gradient is spread over the block
by softmax(β |x| / amax). β is relative to the block maximum, so that the result does not depend on the unit of x; the
paper's is not. Everything else is the general codec's. The logarithm is built from single operations, like exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.ops.elementary import exp_nonpositive, log
from fp4dse.kernels.ops.sums import lane_sum
from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, block, general_scales

SHARPNESS = 80.0
"""β."""


def softmax(b: Blocks) -> Encoded:
    """The general codec with Z for the block maxima."""
    return block(_soft(b))


def softmax_scales(b: Blocks) -> tuple[Tensor, Tensor]:
    """Scales and multipliers [L, n]."""
    return general_scales(_soft(b))


def _soft(b: Blocks) -> Blocks:
    """The blocks with Z in the place of their maxima."""
    return b._replace(amax=soft_maxima(b.x, b.amax))


def soft_maxima(x: Tensor, amax: Tensor) -> Tensor:
    """Z [L, n] of blocks x [L, n, B] with maxima amax [L, n]."""
    return amax * (1.0 + log(lane_sum(exponentials(x, amax), 2)) * (1 / SHARPNESS))


def exponentials(x: Tensor, amax: Tensor) -> Tensor:
    """exp(β (|x|/amax - 1)) of blocks x [L, n, B] with maxima amax [L, n]; for a block of zeros e^-β."""
    amax = torch.where(amax > 0, amax, 1.0)[:, :, None]
    return exp_nonpositive(SHARPNESS * (x.abs() / amax - 1.0))
