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
    """

    bits: Literal[8, 16] = 16


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
    "ema": Ema(),
}


def rounding_name(rounding: Rounding) -> str:
    """The key in ROUNDING_NAMES, or the mode with its number."""
    return name_in(ROUNDING_NAMES, rounding) or f"ema{rounding.beta:g}"  # type: ignore[union-attr]  # of the others all are named


ROUNDING_WORDS = {"nearest": "", "half-away": "half-away", "stochastic": "SR", "stochastic8": "SR8", "ema": "EMA"}


def rounding_words(rounding: Rounding) -> str:
    """Empty for nearest even, `SR`, `EMA` …."""
    name = rounding_name(rounding)
    return ROUNDING_WORDS.get(name, name.replace("ema", "EMA"))
