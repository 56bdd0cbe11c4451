"""The descriptor table: a quantizer as one row of numbers per lane, so that different recipes share one function.

Everything that is not in the row (block size, rotation size) fixes tensor shapes and is a compile-time constant.
Products of constants are taken in float64 and rounded once to FP32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp4dse.dse.formats import ELEMENTS, SCALES, e8m0_rule
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.rounding import Ema, Nearest, Stochastic
from fp4dse.dse.scale import E8M0, FloatScale, scale_key

FLOATS = (
    "elem_pmin",  # 2^emin of the element format
    "elem_ulps",  # 2^mantissa: grid points in a binade
    "elem_max",
    "inv_val_max",  # 1 / (value that the block maximum is mapped to)
    "tensor_target",  # target · val_max, or 0 for no tensor scale; encode: val_max / target
    "scale_pmin",
    "scale_ulps",
    "scale_max",
    "scale_zero",  # what a scale that rounds to zero becomes
    "prescale",  # elements are those of prescale · x …
    "postscale",  # … and the product is multiplied by this
    "random_step",  # 2^-(b+1) for b random bits
)
INTS = (
    "float_scale",  # 1: scale with a mantissa, 0: E8M0
    "e8m0_carry",  # added to the FP32 bits of amax before the exponent is taken
    "e8m0_offset",
    "scale_up",  # the scale is rounded up …
    "scale_stochastic",  # … or up by chance
    "encode",  # the stored scale is the multiplier
    "hybrid",  # elements are made with the unrounded scale
    "log_ties",  # element without mantissa bits: the even code is the one of even exponent
    "half_away",
    "random_shift",  # 16 - b
    "stochastic",
    "ema",  # rounded towards a moving average
    "adapt",  # the better of two encodings of a block
    "adapt_mae",  # … by absolute error
)


def descriptor(quantizers: Sequence[Quantizer], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tables float32 [L, len(FLOATS)] and int32 [L, len(INTS)] of block-scaled quantizers, one row a lane."""
    rows = [_row(q.canonical()) for q in quantizers]
    floats = torch.tensor([[row[k] for k in FLOATS] for row in rows], dtype=torch.float64).to(torch.float32)
    ints = torch.tensor([[int(row[k]) for k in INTS] for row in rows], dtype=torch.int32)
    return floats.to(device), ints.to(device)


def _row(q: Quantizer) -> dict[str, float]:
    element = ELEMENTS[q.element]
    bits = q.rounding.bits if isinstance(q.rounding, Stochastic) else 16
    row = dict.fromkeys((*FLOATS, *INTS), 0.0) | {
        "elem_pmin": 2.0**element.emin,
        "elem_ulps": 2.0**element.mantissa,
        "elem_max": element.max,
        "inv_val_max": 1 / q.val_max,
        "prescale": 0.75 if q.range == "3/4" else 1.0,
        "postscale": {"3/4": 4 / 3, "aligned": 1.009276}.get(q.range, 1.0) / (7 if q.adapt == "if4" else 1),
        "log_ties": element.mantissa == 0,
        "half_away": isinstance(q.rounding, Nearest) and q.rounding.ties == "away",
        "stochastic": isinstance(q.rounding, Stochastic),
        "ema": isinstance(q.rounding, Ema),
        "random_shift": 16 - bits,
        "adapt": q.adapt.startswith("4over6"),
        "adapt_mae": q.adapt == "4over6-mae",
        "random_step": 2.0 ** -(bits + 1),
        "scale_pmin": 1.0,
        "scale_ulps": 1.0,
        "scale_max": 1.0,
    }
    if isinstance(q.scale, E8M0):
        row["e8m0_carry"], row["e8m0_offset"] = e8m0_rule(q.scale.rule, q.scaled_to)
    elif isinstance(q.scale, FloatScale):
        scale = SCALES[scale_key(q.scale)]
        zeros = {"keep": 0.0, "one": 1.0, "min": 2.0 ** (scale.emin - scale.mantissa)}
        row |= {
            "float_scale": 1,
            "scale_pmin": 2.0**scale.emin,
            "scale_ulps": 2.0**scale.mantissa,
            # above, the power of two of a BF16 or FP32 scale has no inverse among normal numbers
            "scale_max": min(scale.max, (2 - 2.0**-scale.mantissa) * 2.0**126),
            "scale_zero": zeros[q.scale.zero],
            "scale_up": q.scale.rounding == "up",
            "scale_stochastic": q.scale.rounding == "stochastic",
            "encode": q.scale.convention == "encode",
            "hybrid": q.scale.hybrid,
        }
    if q.tensor_scale and q.tensor_scale.target:
        target = q.tensor_scale.target
        row["tensor_target"] = q.val_max / target if row["encode"] else target * q.val_max
    return row
