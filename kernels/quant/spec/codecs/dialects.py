"""BlockDialect (2501.01144): each block picks one of 16 codebooks, its dialect; all arithmetic is on small integers.

    scale = 2^(floor(log2 amax) - 2)                E8M0, floor rule: |x| / scale lies below 8
    z     = min(round(2 · |x| / scale), 15)         in halves, ties to even: the 5-bit intermediate, sign included
    q     = the nearest to z of the dialect's 8 magnitudes, a tie goes to the even index
    the dialect is the one with the least Σ (q - z)² of all 16, the first if several have it

Magnitudes are multiples of a half as well. Dialects 0 … 14 differ in the two largest, 7 is E2M1; 15 is denser in the
middle. The exhaustive choice is the published one for weights; every operand gets it here, and the released two-stage
selector for activations is not built. That z is rounded before the choice is how the published hardware does it, and
costs: without it the error on Gaussian numbers would be 8.6e-3 in the place of 1.07e-2.
"""

from __future__ import annotations

from functools import cache

import torch

from fp4dse.kernels.quant.spec.codecs.block import Blocks, Encoded, e8m0, multiplier

COMMON = (0, 1, 2, 3, 4, 6)
TOPS = (
    *((11, 15), (9, 15), (11, 14), (9, 14), (10, 13), (8, 13), (10, 12), (8, 12)),
    *((9, 11), (7, 11), (9, 10), (7, 10), (8, 9), (7, 9), (7, 8)),
)
DIALECTS = (*((*COMMON, *top) for top in TOPS), (0, 1, 2, 3, 4, 5, 6, 8))
"""Magnitudes of each dialect in halves."""


def nearest(z: int, levels: tuple[int, ...]) -> int:
    """The nearest level, of two the one of even index."""
    return levels[min(range(len(levels)), key=lambda k: (abs(levels[k] - z), k % 2))]


NEAREST = torch.tensor([[nearest(z, levels) for z in range(16)] for levels in DIALECTS], dtype=torch.float32)
"""0 … 15 halves as each dialect rounds them, in halves: [16, 16]."""


@cache
def _nearest_on(device: torch.device) -> torch.Tensor:
    """Copied once: a CUDA graph that is being captured allows no copy from the host."""
    return NEAREST.to(device)


def dialects(b: Blocks) -> Encoded:
    """meta: dialect [L, n], int64."""
    scale = e8m0(b.amax * b.enc, b.i)
    magnitude = b.x.abs() * (multiplier(scale, b.enc) * b.prescale)[:, :, None]
    z = torch.clamp(torch.round(magnitude * 2), max=15)
    index = torch.where(torch.isnan(z), 0, z).to(torch.int64)
    table = NEAREST if z.device.type == "cpu" else _nearest_on(z.device)
    least, dialect = torch.full_like(scale, torch.inf), torch.zeros_like(scale, dtype=torch.int64)
    for number, squares in enumerate((table - torch.arange(16, device=z.device)).square().unbind()):
        error = squares[index].sum(dim=2)  # of integers below 2^24: exact in any order
        dialect, least = torch.where(error < least, number, dialect), torch.minimum(error, least)
    q = table[dialect[:, :, None], index] * 0.5
    return Encoded(torch.copysign(torch.where(torch.isnan(z), z, q), b.x), scale, {"dialect": dialect})
