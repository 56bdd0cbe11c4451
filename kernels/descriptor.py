"""The descriptor table: a quantizer as one row of numbers per lane, so that different recipes share one function.

Everything that is not in the row (block size, rotation size) fixes tensor shapes and is a compile-time constant.
Products of constants are taken in float64 and rounded once to FP32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.dse.formats import ELEMENTS, SCALES, e8m0_carry
from fp4dse.dse.quantizer import E8M0, Quantizer, Stochastic, scale_format

FLOATS = (
    "elem_pmin",  # 2^emin of the element format
    "elem_ulps",  # 2^mantissa: grid points in a binade
    "elem_max",
    "inv_val_max",  # 1 / (value that the block maximum is mapped to)
    "tensor_target",  # target · val_max, or 0 for no tensor scale
    "scale_pmin",
    "scale_ulps",
    "scale_max",
)
INTS = (
    "float_scale",  # 1: scale with a mantissa, 0: E8M0
    "e8m0_carry",  # added to the FP32 bits of amax before the exponent is taken
    "e8m0_offset",  # emax of the element format
    "zero_to_one",  # a scale that rounds to zero becomes 1
    "stochastic",
)


def descriptor(quantizers: Sequence[Quantizer], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tables float32 [L, len(FLOATS)] and int32 [L, len(INTS)] of block-scaled quantizers, one row a lane."""
    rows = [_row(q.canonical()) for q in quantizers]
    floats = torch.tensor([[row[k] for k in FLOATS] for row in rows], dtype=torch.float64).to(torch.float32)
    ints = torch.tensor([[int(row[k]) for k in INTS] for row in rows], dtype=torch.int32)
    return floats.to(device), ints.to(device)


def _row(q: Quantizer) -> dict[str, float]:
    element = ELEMENTS[q.element]
    row = {
        "elem_pmin": 2.0**element.emin,
        "elem_ulps": 2.0**element.mantissa,
        "elem_max": element.max,
        "inv_val_max": 1 / q.val_max,
        "tensor_target": q.tensor_scale.target * q.val_max if q.tensor_scale and q.tensor_scale.target else 0.0,
        "stochastic": isinstance(q.rounding, Stochastic),
        "e8m0_offset": element.emax,
        "e8m0_carry": 0,
        "float_scale": 0,
        "zero_to_one": 0,
        "scale_pmin": 1.0,
        "scale_ulps": 1.0,
        "scale_max": 1.0,
    }
    if isinstance(q.scale, E8M0):
        row["e8m0_carry"] = e8m0_carry(q.scale.rule, element)
    else:
        scale = SCALES[scale_format(q.scale)]
        row |= {
            "float_scale": 1,
            "zero_to_one": q.scale.zero == "one",
            "scale_pmin": 2.0**scale.emin,
            "scale_ulps": 2.0**scale.mantissa,
            "scale_max": scale.max,
        }
    return row
