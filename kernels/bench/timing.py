"""A row of the tables of speeds."""

from __future__ import annotations

from typing import Literal

import msgspec

from fp4dse.dse import Quantizer
from fp4dse.dse.rounding import Stochastic


class Timing(msgspec.Struct, frozen=True):
    """One row of the table.

    time_us is that of one call; gb_s counts the input once and the outputs once; of_copy is the time of a copy of the
    same tensor over time_us; wrong is the number of outputs that differ from the reference; extra_memory, on a CPU, is
    what one call takes beyond its input, the result included, as a multiple of the input. A peer that cannot be timed
    has none of these.
    """

    what: str
    time_us: float | None
    gb_s: float | None
    of_copy: float | None
    wrong: int | None
    extra_memory: float | None = None


def stochastic(q: Quantizer, bits: Literal[8, 16] = 16) -> Quantizer:
    """The quantizer with stochastic rounding."""
    return msgspec.structs.replace(q, rounding=Stochastic(bits=bits))
