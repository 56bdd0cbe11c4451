"""The descriptor table: a quantizer as one row of numbers per lane, so that different recipes share one function.

Everything that is not in the row (block size, rotation size) fixes tensor shapes and is a compile-time constant.
Products of constants are taken in float64 and rounded once to FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.formats import FloatFormat, e8m0_rule
from fp4dse.dse.own_formats import MOST_VALUES, Element, TableElement, element_format
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.rounding import Ema, Nearest, Rounding, Stochastic
from fp4dse.dse.scale import E6M2, E8M0, FloatScale, One, scale_grid


class Column(NamedTuple):
    """A column of a descriptor table.

    feature: the field of `Features` without which Triton kernels are compiled without the code that reads it, "" if
        that code is always there
    plain: its value in the row of a quantizer that does without it
    what: its meaning
    most: values up to it do without the feature; None: only `plain` does
    known: the values that implementations were written for, which refuse all others; empty: any number
    """

    feature: Literal["", "tensor_scale", "stochastic", "adaptive", "scales", "ties"]
    plain: float
    what: str
    most: float | None = None
    known: tuple[float, ...] = ()

    def needed(self, values: Tensor) -> bool:
        """True if one of the values needs the feature."""
        return bool((values != self.plain if self.most is None else values > self.most).any())


FLAG = (0, 1)
WIDE = 2.0**100
"""Scale formats that reach beyond are rounded by the kernels' long way."""


FLOATS = {
    "elem_pmin": Column("", 1.0, "2^emin of the element format"),
    "elem_ulps": Column("", 1.0, "2^mantissa: grid points in a binade"),
    "elem_max": Column("", 1.0, "the largest element"),
    "inv_val_max": Column("", 1.0, "1 / (value that the block maximum is mapped to)"),
    "tensor_target": Column("tensor_scale", 0.0, "target · val_max, 0 for no tensor scale; encode: val_max / target"),
    "scale_pmin": Column("", 1.0, "2^emin of the scale format"),
    "scale_ulps": Column("", 1.0, "2^mantissa of the scale format"),
    "scale_max": Column("scales", 1.0, "the largest scale", most=WIDE),
    "scale_zero": Column("", 0.0, "what a scale that rounds to zero becomes"),
    "prescale": Column("", 1.0, "elements are those of prescale · x"),
    "postscale": Column("", 1.0, "the product is multiplied by this"),
}
INTS = {
    "float_scale": Column("", 0, "a scale with a mantissa, not E8M0", known=FLAG),
    "e8m0_carry": Column("", 0, "added to the FP32 bits of a maximum before the exponent is taken"),
    "e8m0_offset": Column("", 0, "subtracted from the exponent"),
    "scale_up": Column("scales", 0, "scales are rounded up", known=FLAG),
    "scale_stochastic": Column("", 0, "scales are rounded up by chance", known=FLAG),
    "encode": Column("scales", 0, "the stored scale is the multiplier", known=FLAG),
    "hybrid": Column("scales", 0, "elements are made with the unrounded scale", known=FLAG),
    "log_ties": Column("ties", 0, "no mantissa bits: ties go to the code of even exponent", known=FLAG),
    "half_away": Column("ties", 0, "ties go away from zero", known=FLAG),
    "random_shift": Column("stochastic", 0, "16 - b for b random bits"),
    "stochastic": Column("stochastic", 0, "elements are rounded by chance", known=FLAG),
    "ema": Column("", 0, "elements are rounded towards a moving average", known=FLAG),
    "adapt": Column("adaptive", 0, "the better of two encodings of a block", known=FLAG),
    "adapt_mae": Column("adaptive", 0, "the better one by absolute error", known=FLAG),
}
LEVELS = MOST_VALUES
BOUNDS = MOST_VALUES - 1
"""Behind FLOATS stand, for codec `table`, the values of the element, ascending, the last one repeated; and the number
from which on each but the first is nearer than the one below it, Inf for those that are repeated."""


def descriptor(quantizers: Sequence[Quantizer], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Tables float32 [L, len(FLOATS)] and int32 [L, len(INTS)] of block-scaled quantizers, one row a lane.

    Of codec `table`, which all lanes then have, the first is [L, len(FLOATS) + LEVELS + BOUNDS].
    """
    canonical = [q.canonical() for q in quantizers]
    numbers = {q: _numbers(q) for q in dict.fromkeys(canonical)}  # of many lanes few are different
    floats = torch.tensor([numbers[q][0] for q in canonical], dtype=torch.float64).to(torch.float32)
    ints = torch.tensor([numbers[q][1] for q in canonical], dtype=torch.int32)
    return floats.to(device), ints.to(device)


PRESCALE = {"full": 1.0, "16/17": 1.0, "3/4": 0.75, "aligned": 0.75}
"""Range -> what operands are multiplied by; the 16/17 is in the value that maxima are mapped to."""
POSTSCALE = {"full": 1.0, "16/17": 1.0, "3/4": 4 / 3, "aligned": 4 / 3 * 1.009276}
ADAPT: dict[str, dict[str, float]] = {
    "none": {},
    "4over6-mse": {"adapt": 1},
    "4over6-mae": {"adapt": 1, "adapt_mae": 1},
    "if4": {},  # the codec's own, as the others
    "mixfp4": {},
    "razer": {},
    "dialects": {},
}
TIES = {"even": 0, "away": 1}
ROUNDING: dict[type[Rounding], Callable[[Any], dict[str, float]]] = {
    Nearest: lambda rounding: {"half_away": TIES[rounding.ties]},
    Stochastic: lambda rounding: _by_chance(rounding),
    Ema: lambda _: {"ema": 1},
}
SCALE_ROUNDING: dict[str, dict[str, float]] = {
    "nearest": {},
    "up": {"scale_up": 1},
    "stochastic": {"scale_stochastic": 1},
}
CONVENTION: dict[str, dict[str, float]] = {"decode": {}, "encode": {"encode": 1}}
"""The part of a row that follows from a field of a quantizer; a value that none of these tables has is a KeyError."""


def _by_chance(rounding: Stochastic) -> dict[str, float]:
    """A table is one encoding: what averages several (operand.kinds.Sampled) makes the table of one."""
    if rounding.samples != 1:
        raise ConfigError("rounding.samples", rounding.samples, "1 (of one encoding; slots average several)")
    return {"stochastic": 1, "random_shift": 16 - rounding.bits}


def _numbers(q: Quantizer) -> tuple[list[float], list[int]]:
    """A row of either table."""
    row = _row(q)
    return [row[k] for k in FLOATS] + levels(q.element, q.rounding), [int(row[k]) for k in INTS]


def _row(q: Quantizer) -> dict[str, float]:
    element = element_format(q.element)
    row: dict[str, float] = {name: column.plain for name, column in (FLOATS | INTS).items()}
    row |= {"elem_max": element.max, "inv_val_max": 1 / q.val_max, "prescale": PRESCALE[q.range]}
    row |= ROUNDING[type(q.rounding)](q.rounding) | ADAPT[q.adapt]
    row["postscale"] = POSTSCALE[q.range] / (7 if q.adapt == "if4" else 1)
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
            "hybrid": q.scale.hybrid,
        }
        row |= SCALE_ROUNDING[q.scale.rounding] | CONVENTION[q.scale.convention]
    elif isinstance(q.scale, One):  # a stored multiplier that can only be one
        row |= {"float_scale": 1, "encode": 1, "scale_up": 1, "scale_zero": 1.0}
    elif not isinstance(q.scale, E6M2):  # which is its codec's own
        raise KeyError(q.scale)
    if q.tensor_scale and q.tensor_scale.target:
        target = q.tensor_scale.target
        row["tensor_target"] = q.val_max / target if row["encode"] else target * q.val_max
    return row


def unheeded(floats: Tensor, ints: Tensor, heeded: Collection[str]) -> list[str]:
    """The needs of lanes in columns that an implementation does not heed, or with values that none was written for, a
    sentence a column: none, or it must refuse."""
    found = []
    for columns, table in (FLOATS, floats.cpu()), (INTS, ints.cpu()):
        least, most = (end.tolist() for end in table.aminmax(dim=0))
        for number, (name, column) in enumerate(columns.items()):
            accepted = column.known if name in heeded else (column.plain,)
            if not accepted or least[number] == most[number] in accepted:  # nearly always
                continue
            values = table[:, number]
            others = values[~torch.isin(values, values.new_tensor(accepted))]
            if len(others):
                of = ", ".join(f"{value:g}" for value in accepted)
                found.append(f"{name}: found {float(others[0]):g}; accepted: {of} ({column.what})")
    return found


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
