"""Roundings of elements to their grid, as data. A tagged union: only stochastic rounding has random bits."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fp4dse.dse.record import Part, name_in


class Nearest(Part, frozen=True, tag_field="mode", tag="nearest"):
    """Round to nearest; ties to the even code, or `away` from zero."""

    ties: Literal["even", "away"] = "even"


class Stochastic(Part, frozen=True, tag_field="mode", tag="stochastic"):
    """Round up with the probability of the fractional position, from b = 8 or 16 random bits, midpoint form.

    With r uniform in 0 … 2^b-1, the magnitude is rounded up iff fraction + (2r+1)/2^(b+1) >= 1.

    samples  the operand is rounded so many times, with random bits of its own each, and their products are averaged
             (SMP, 2112.10769): the mean stays, and the variance is that of one sample over their number
    """

    bits: Literal[8, 16] = 16
    samples: Literal[1, 2, 4] = 1


class Ema(Part, frozen=True, tag_field="mode", tag="ema"):
    """Of the two neighbours on the grid, the one nearer to the moving average of the weight (Q-EMA, 2502.20853).

    average <- beta · average + (1 - beta) · weight after every optimizer step; to nearest for the first 10 steps.
    """

    beta: Annotated[float, msgspec.Meta(gt=0)] = 0.998


Rounding = Nearest | Stochastic | Ema

ROUNDING_NAMES: dict[str, Rounding] = {
    "nearest": Nearest(),
    "half-away": Nearest(ties="away"),
    "stochastic": Stochastic(),
    "stochastic8": Stochastic(bits=8),
    "smp2": Stochastic(samples=2),
    "ema": Ema(),
}


def rounding_name(rounding: Rounding) -> str:
    """The key in ROUNDING_NAMES, or the mode with its number."""
    if name := name_in(ROUNDING_NAMES, rounding):
        return name
    if isinstance(rounding, Stochastic):
        return f"smp{rounding.samples}" + ("" if rounding.bits == Stochastic().bits else f" {rounding.bits}")
    return f"ema{rounding.beta:g}"  # type: ignore[union-attr]  # of nearest all are named


ROUNDING_WORDS = {"nearest": "", "half-away": "half-away", "stochastic": "SR", "stochastic8": "SR8", "ema": "EMA"}


def rounding_words(rounding: Rounding) -> str:
    """Empty for nearest even, `SR`, `SMP2`, `EMA` …."""
    name = rounding_name(rounding)
    return ROUNDING_WORDS.get(name, name.replace("ema", "EMA").replace("smp", "SMP"))


def samples_of(rounding: Rounding) -> int:
    """The number of times that an operand is rounded."""
    return rounding.samples if isinstance(rounding, Stochastic) else 1


def of_one_sample(rounding: Rounding) -> Rounding:
    """The rounding of each sample."""
    return msgspec.structs.replace(rounding, samples=1) if isinstance(rounding, Stochastic) else rounding
