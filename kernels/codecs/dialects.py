"""BlockDialect (2501.01144): each block picks one of 16 codebooks, its dialect.

    scale = 2^(floor(log2 amax) - 2)                E8M0, floor rule; z = |x| / scale lies below 8
    q     = the nearest of the dialect's 8 magnitudes, a tie goes to the even index
    the dialect is the one with the least Σ (q - z)² of all, the first if several have it

The magnitudes are multiples of 1/2. Dialects 0 … 14 differ in the two largest, 7 is E2M1; 15 is denser in the middle.
This exhaustive choice is the published one for weights. The released two-stage selector for activations is not built:
every operand is given the better, exhaustive choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.kernels.codecs.block import Blocks, Encoded, e8m0, multiplier
from fp4dse.kernels.reduce import lane_sum

COMMON = (0, 1, 2, 3, 4, 6)
TOPS = (
    *((11, 15), (9, 15), (11, 14), (9, 14), (10, 13), (8, 13), (10, 12), (8, 12)),
    *((9, 11), (7, 11), (9, 10), (7, 10), (8, 9), (7, 9), (7, 8)),
)
DIALECTS = (*((*COMMON, *top) for top in TOPS), (0, 1, 2, 3, 4, 5, 6, 8))
"""Magnitudes of each dialect in halves."""


def dialects(b: Blocks) -> Encoded:
    """meta: dialect [L, n], uint8."""
    scale = e8m0(b.amax * b.enc, b.i)
    z = b.x.abs() * (multiplier(scale, b.enc) * b.prescale)[:, :, None] * 2  # in halves
    low = nearest(z, COMMON)
    best = dialect = None
    for number, levels in enumerate(DIALECTS):
        q = nearest(z, levels, 6, low) if levels[:6] == COMMON else nearest(z, levels)
        error = lane_sum((q - z) * (q - z), 2)
        if best is None or dialect is None:
            best, dialect = error, torch.zeros_like(error, dtype=torch.uint8)
            continue
        better = error < best
        best, dialect = torch.where(better, error, best), torch.where(better, number, dialect)
    assert dialect is not None
    table = torch.tensor(DIALECTS, dtype=torch.float32, device=z.device)
    q = nearest(z, table[dialect.long()][:, :, None, :].unbind(3)) * 0.5
    q = torch.where(torch.isnan(z), z, q)
    return Encoded(torch.copysign(q, b.x), scale, {"dialect": dialect})


def nearest(z: Tensor, levels, start: int = 1, below: Tensor | None = None) -> Tensor:
    """The nearest to z of ascending levels, numbers or tensors; a tie goes to the even index.

    below: the result among the levels before `start`, where it is known.
    """
    q = torch.zeros_like(z) if below is None else below
    for k in range(start, len(levels)):
        middle = (levels[k - 1] + levels[k]) * 0.5
        q = torch.where(z >= middle if k % 2 == 0 else z > middle, levels[k], q)
    return q
