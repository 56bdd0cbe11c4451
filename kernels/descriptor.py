"""The descriptor table: a quantizer as one row of numbers per lane, so that different recipes share one function.

Everything that is not in the row (block size, rotation size) fixes tensor shapes and is a compile-time constant.
Products of constants are taken in float64 and rounded once to FP32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fp4dse.dse.formats import FloatFormat, e8m0_rule
from fp4dse.dse.own_formats import MOST_VALUES, Element, TableElement, element_format
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.rounding import Ema, Nearest, Rounding, Stochastic
from fp4dse.dse.scale import E8M0, FloatScale, scale_grid

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
LEVELS = MOST_VALUES
BOUNDS = MOST_VALUES - 1
"""Behind FLOATS stand, for codec `table`, the values of the element, ascending, the last one repeated; and the number
from which on each but the first is nearer than the one below it, Inf for those that are repeated."""


def descriptor(quantizers: Sequence[Quantizer], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tables float32 [L, len(FLOATS)] and int32 [L, len(INTS)] of block-scaled quantizers, one row a lane.

    Of codec `table`, which all lanes then have, the first is [L, len(FLOATS) + LEVELS + BOUNDS].
    """
    canonical = [q.canonical() for q in quantizers]
    rows = [_row(q) for q in canonical]
    numbers = [[row[k] for k in FLOATS] + levels(q.element, q.rounding) for q, row in zip(canonical, rows, strict=True)]
    floats = torch.tensor(numbers, dtype=torch.float64).to(torch.float32)
    ints = torch.tensor([[int(row[k]) for k in INTS] for row in rows], dtype=torch.int32)
    return floats.to(device), ints.to(device)


def _row(q: Quantizer) -> dict[str, float]:
    element = element_format(q.element)
    bits = q.rounding.bits if isinstance(q.rounding, Stochastic) else 16
    row = dict.fromkeys((*FLOATS, *INTS), 0.0) | {
        "elem_pmin": 1.0,
        "elem_ulps": 1.0,
        "elem_max": element.max,
        "inv_val_max": 1 / q.val_max,
        "prescale": 0.75 if q.range in ("3/4", "aligned") else 1.0,
        "postscale": {"3/4": 4 / 3, "aligned": 4 / 3 * 1.009276}.get(q.range, 1.0) / (7 if q.adapt == "if4" else 1),
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
    if isinstance(element, FloatFormat):
        row |= {"elem_pmin": 2.0**element.emin, "elem_ulps": 2.0**element.mantissa, "log_ties": element.mantissa == 0}
    if isinstance(q.scale, E8M0):
        row["e8m0_carry"], row["e8m0_offset"] = e8m0_rule(q.scale.rule, q.scaled_to)
    elif isinstance(q.scale, FloatScale):
        scale = scale_grid(q.scale)
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


def levels(element: Element, rounding: Rounding) -> list[float]:
    """The values of a table and where they begin, empty for other elements."""
    if not isinstance(element, TableElement):
        return []
    values, missing = element.values, LEVELS - len(element.values)
    away = isinstance(rounding, Nearest) and rounding.ties == "away"
    bounds = [_bound(low, high, values, away) for low, high in pairwise(values)]
    return [*values, *[values[-1]] * missing, *bounds, *[math.inf] * missing]


def _bound(low: float, high: float, values: tuple[float, ...], away: bool) -> float:
    """The smallest float32 number that is rounded up to `high`, and not down to its neighbour.

    A tie is a midpoint that float32 holds: it goes away from 0, or to the value of even index, counted from 0 outwards.
    """
    middle = Fraction(low) / 2 + Fraction(high) / 2  # of two float32 numbers, exactly
    bound = np.float32(float(middle))
    if Fraction(float(bound)) == middle:
        goes_up = high > 0 if away else (values.index(high) - values.index(0.0)) % 2 == 0
        return float(bound if goes_up else np.nextafter(bound, np.float32(math.inf)))
    return float(bound if Fraction(float(bound)) > middle else np.nextafter(bound, np.float32(math.inf)))
