"""Number formats are data: one record each, no class per format.

A float format with m mantissa bits, smallest normal exponent emin and largest magnitude `max` has the grid

    |x| in [2^e, 2^(e+1)):  multiples of 2^(e-m),  e >= emin        (below 2^emin: multiples of 2^(emin-m))

which is all that a quantizer has to know. Codes are counted from zero, sign bit on top.
Sources: OCP Microscaling v1.0 (E2M1, E8M0), OFP8 (E4M3), 2601.19026 and PTX `ue5m3` (UE5M3, only 0xFF is NaN).
"""

from __future__ import annotations

import math

import msgspec


class FloatFormat(msgspec.Struct, frozen=True):
    """A grid of magnitudes: `mantissa` bits, smallest normal exponent `emin`, largest value `max`.

    `bits` is what one stored number takes, sign included where the format has one.
    """

    mantissa: int
    emin: int
    max: float
    bits: int

    @property
    def emax(self) -> int:
        """Exponent of the largest value: floor(log2(max))."""
        return math.frexp(self.max)[1] - 1

    def magnitudes(self) -> list[float]:
        """Every non-negative value of the format, ascending; the index is the magnitude code."""
        binade = 1 << self.mantissa
        values: list[float] = []
        while not values or values[-1] < self.max:
            exponent, fraction = divmod(len(values), binade)
            if exponent == 0:  # subnormal: no hidden bit, and the step of the first binade
                values.append(fraction * 2.0 ** (self.emin - self.mantissa))
            else:
                values.append((binade + fraction) * 2.0 ** (self.emin + exponent - 1 - self.mantissa))
        return values


ELEMENTS: dict[str, FloatFormat] = {
    "e2m1": FloatFormat(mantissa=1, emin=0, max=6.0, bits=4),
}
"""Element formats that share a block scale."""

PLAIN = {"none": 32, "bf16": 16}
"""Operands without a block scale, with their bits: `none` is the layer's own dtype, `bf16` one BF16 rounding."""

SCALES: dict[str, FloatFormat] = {
    "e4m3": FloatFormat(mantissa=3, emin=-6, max=448.0, bits=8),
    "ue5m3": FloatFormat(mantissa=3, emin=-14, max=114688.0, bits=8),
}
"""Block-scale formats with a mantissa. E8M0, the pure power of two, is described by its rule instead."""

E8M0_RULES = ("floor", "rceil")
"""floor: OCP, 2^(floor(log2 amax) - emax), the block maximum may clip. rceil: the smallest power of two that
clips nothing, 2^ceil(log2(amax / max)); also called truncation-free (TetraJet)."""


def e8m0_carry(rule: str, element: FloatFormat) -> int:
    """What to add to the FP32 bits of amax so that its exponent field, less `element.emax`, is the E8M0 exponent.

    Both rules are floor(log2 amax) - emax + [significand of amax > t]; an integer added to the bits carries into
    the exponent exactly when the 23 fraction bits exceed the threshold, so no floating log2 is involved.
    """
    if rule == "floor":
        return 0
    significand = 2 * math.frexp(element.max)[0]  # 6 -> 1.5: amax/6 exceeds a power of two iff its own exceeds 1.5
    return (1 << 23) - (int((significand - 1) * (1 << 23)) + 1)
