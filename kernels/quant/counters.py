"""Losses of a quantizer, four counts a lane: clipped elements, flushed elements, zeroed blocks, saturated scales; and
the squared error of the first two.

All compare x with its decoded value, so they hold for every convention, range and zero policy. Counts are integers:
they add up over steps in any order. Zeros are never counted, so padding changes no count; the caller divides by
the number of elements without padding. Nothing here waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4dse.dse.exactness import OF_ONE_CODEBOOK
from fp4dse.kernels.quant.descriptor import FLOATS, INTS, LEVELS
from fp4dse.kernels.quant.spec.codecs.dialects import DIALECTS
from fp4dse.kernels.quant.spec.reference import effective_scale, per_element

COUNTERS = {"clipped": "elements", "flushed": "elements", "zeroed": "blocks", "saturated": "blocks"}
"""Counter -> what it is a share of.

clipped    |x| is beyond the largest value that its block decodes to
flushed    x ≠ 0 decodes to 0
zeroed     a block that is not all zero decodes to zeros alone
saturated  a block clips under the largest scale that its format can store
"""

SQUARED_ERRORS = ("clipped_error", "flushed_error")
"""The sums of (x̂ − x)² over clipped and over flushed elements, in the unit of x²."""

LARGEST = {"if4": 42.0, "hif4": 7.0, "razer": 6.0}
"""Codec -> its largest element, where elements are not in the unit of one codebook: sevenths, and S1P2 with its
exponent bits."""

SLACK = 1 + 2.0**-20
"""An excess below this factor is FP32 rounding of scale and factor, not clipping."""


def count(
    x: Tensor, q: Tensor, scale: Tensor, dec: Tensor, floats: Tensor, ints: Tensor, elem_max: Tensor | None = None
) -> dict[str, Tensor]:
    """Each of COUNTERS as int64 [L], each of SQUARED_ERRORS as float64 [L]. Blocks that hold NaN are not counted.

    x               float32 [L, n, B], the blocks before they were quantized
    q, scale, dec   as reference.quantize_blocks returns them: [L, n, B]; [L, n], or [L, n, B] where scales vary inside
                    a block; [L], or [L, m] for m equal consecutive parts of the n blocks
    floats, ints    the descriptor tables, a row a lane
    elem_max        the largest element, broadcastable to [L, n, B], where it is not the one of the table
    """
    of_floats, levels = floats[:, : len(FLOATS)], floats[:, len(FLOATS) :]
    f, i = (dict(zip(names, t.unbind(1), strict=True)) for names, t in ((FLOATS, of_floats), (INTS, ints)))
    step = effective_scale(scale, dec)
    largest = f["elem_max"][:, None, None] if elem_max is None else elem_max
    if levels.shape[1]:  # a table, which has an end on either side
        largest = torch.where(x < 0, -levels[:, 0, None, None], levels[:, LEVELS - 1, None, None])
    is_zero = (q * step) == 0
    there = x != 0
    flushed = there & is_zero
    clipped = (x.abs() > largest * step * SLACK) & ~is_zero
    encode_top = f["scale_ulps"] / f["scale_pmin"]  # the reciprocal of the smallest multiplier
    float_top = torch.where(i["encode"] > 0, encode_top, f["scale_max"])
    top = torch.where(i["float_scale"] > 0, float_top, 2.0**127)
    squares = (q * step - x).to(torch.float64).square()
    return {
        "clipped": clipped.sum((1, 2)),
        "flushed": flushed.sum((1, 2)),
        "zeroed": (is_zero.all(2) & there.any(2)).sum(1),
        "saturated": (clipped & (per_element(scale) >= top[:, None, None])).any(2).sum(1),
        "clipped_error": torch.where(clipped, squares, 0.0).sum((1, 2)),
        "flushed_error": torch.where(flushed, squares, 0.0).sum((1, 2)),
    }


def largest_element(codec: str, meta: dict[str, Tensor]) -> Tensor | None:
    """The largest |q| that a block can have, [L, n, 1], or a scalar for all; None where it is the element format's.

    meta: as in codecs.Encoded. KeyError for a codec whose elements are of no one codebook, and nothing more is known.
    """
    if codec == "dialects":
        tops = torch.tensor([levels[-1] / 2 for levels in DIALECTS], device=meta["dialect"].device)
        return tops[meta["dialect"].long()][:, :, None]
    if codec == "mixfp4":
        return torch.where(meta["e1m2"], 7.0, 6.0)[:, :, None]
    return torch.tensor(LARGEST[codec]) if codec in LARGEST or codec not in OF_ONE_CODEBOOK else None
