"""Number formats are data: one record each, no class per format.

A float format with m mantissa bits, smallest normal exponent emin and largest magnitude `max` has the grid

    |x| in [2^e, 2^(e+1)):  multiples of 2^(e-m),  e >= emin        (below 2^emin: multiples of 2^(emin-m))

which is all that a quantizer has to know. Codes are counted from zero, sign bit on top.
Sources: OCP Microscaling v1.0 (E2M1, E8M0), OFP8 (E4M3), 2601.19026 and PTX `ue5m3` (UE5M3, only 0xFF is NaN).
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec


class FloatFormat(msgspec.Struct, frozen=True):
    """A grid of magnitudes: `mantissa` bits, smallest normal exponent `emin`, largest value `max`.

    `bits` is what one stored number takes, sign included where the format has one. `radix` is the base of the
    exponent: powers of 4 instead of 2 for radix-4 formats, which have no mantissa.
    """

    mantissa: int
    emin: int
    max: float
    bits: int
    radix: int = 2

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
                power = self.emin + (exponent - 1) * (self.radix // 2)
                values.append((binade + fraction) * 2.0 ** (power - self.mantissa))
        return values


ELEMENTS: dict[str, FloatFormat] = {
    "e2m1": FloatFormat(mantissa=1, emin=0, max=6.0, bits=4),
    "e1m2": FloatFormat(mantissa=2, emin=1, max=3.5, bits=4),  # uniform: 0 … 3.5 in steps of 0.5
    "e3m0": FloatFormat(mantissa=0, emin=-2, max=16.0, bits=4),  # powers of two
    "int4": FloatFormat(mantissa=2, emin=2, max=7.0, bits=4),  # symmetric, sign and magnitude: -7 … 7
    "s1p2": FloatFormat(mantissa=2, emin=0, max=1.75, bits=4),  # HiFloat4's: 0 … 1.75 in steps of 0.25
    "radix4": FloatFormat(mantissa=0, emin=-6, max=64.0, bits=4, radix=4),  # Sun et al. 2020: 4^-3 … 4^3
    "radix4-odd": FloatFormat(mantissa=0, emin=-7, max=32.0, bits=4, radix=4),  # the other phase: 4^-3/2 … 4^3/2
    "e4m3": FloatFormat(mantissa=3, emin=-6, max=448.0, bits=8),
    "e5m2": FloatFormat(mantissa=2, emin=-14, max=57344.0, bits=8),
}
"""Element formats that share a block scale."""

PLAIN = {"none": 32, "bf16": 16}
"""Operands without a block scale, with their bits: `none` is the layer's own dtype, `bf16` one BF16 rounding."""

SCALES: dict[str, FloatFormat] = {
    "e4m3": FloatFormat(mantissa=3, emin=-6, max=448.0, bits=8),
    "ue5m3": FloatFormat(mantissa=3, emin=-14, max=114688.0, bits=8),
    "ue5m3-61440": FloatFormat(mantissa=3, emin=-14, max=61440.0, bits=8),  # top exponent reserved: 2609.02846
    "ue5m3-122880": FloatFormat(mantissa=3, emin=-14, max=122880.0, bits=8),  # every code finite
    "e5m2": FloatFormat(mantissa=2, emin=-14, max=57344.0, bits=8),
    "ue4m4": FloatFormat(mantissa=4, emin=-6, max=496.0, bits=8),  # bias 7, every code finite; nobody has fixed it yet
    "bf16": FloatFormat(mantissa=7, emin=-126, max=(2 - 2**-7) * 2.0**127, bits=16),
    "fp32": FloatFormat(mantissa=23, emin=-126, max=(2 - 2**-23) * 2.0**127, bits=32),
}
"""Block-scale formats with a mantissa. E8M0, the pure power of two, is described by its rule instead."""

E8M0_GRID = FloatFormat(mantissa=0, emin=-127, max=2.0**127, bits=8)
"""The 255 powers of two of E8M0, and the zero that it lacks."""

ONE_GRID = FloatFormat(mantissa=0, emin=0, max=1.0, bits=0)
"""The one scale that is none, and zero."""

SMALLEST = SCALES["bf16"].emin - SCALES["bf16"].mantissa
"""Exponent of BF16's smallest number, 2^-133. No E8M0 scale is so small that a float element's smallest value would lie
below it: E4M3's scales end at 2^-124, E5M2's at 2^-117, those of elements down to 2^-6 where E8M0 does, at 2^-127."""

E8M0_RULES = {
    "floor": "OCP: 2^(floor(log2 amax) - emax); the block maximum may clip",
    "ceil": "2^(ceil(log2 amax) - emax); never clips, the top codes stay unused",
    "rceil": "2^ceil(log2(amax / max)), the smallest that clips nothing; also called truncation-free",
    "even": "floor, and one more from the significand on at which the element would round up to a power of two",
    "nearest": "2^round(log2(amax / max)), the nearest in the exponent",
    "encode": "the inverse of 2^emax / amax rounded to the nearest power of two; never clips (2509.17791's simulator)",
}
"""Rules by which an E8M0 scale follows from the block maximum; `max` and `emax` are the element's."""


class Codebook(Protocol):
    """An element as a scale's rule sees it: its largest magnitude, and the exponent of that."""

    @property
    def max(self) -> float: ...

    @property
    def emax(self) -> int: ...


def e8m0_rule(rule: str, element: Codebook) -> tuple[int, int]:
    """(carry, offset): the E8M0 exponent is that of the FP32 number with bits(amax) + carry, less the offset.

    `even` is about mantissa bits, and for a FloatFormat alone.

    Every rule is floor(log2 amax) - offset + [significand of amax >= t]; an integer added to the bits carries into
    the exponent exactly when the 23 fraction bits reach the threshold, so no floating log2 is involved.
    """
    top = 2 * math.frexp(element.max)[0]  # significand of the largest element, 1.5 for E2M1
    if rule == "floor":
        return 0, element.emax
    if rule == "ceil":
        return _carry(1.0, above=True), element.emax
    if rule == "rceil":  # amax / max exceeds a power of two iff its significand exceeds that of max
        return _carry(top, above=True), element.emax
    if rule == "even":
        assert isinstance(element, FloatFormat)
        return _carry(top + 2.0 ** -(element.mantissa + 1), above=False), element.emax
    if rule == "encode":  # halfway between 2^emax / amax = 1 and 1/2
        return _carry(4 / 3, above=True), element.emax
    threshold = top * math.sqrt(2)  # nearest: halfway between two powers of two in the exponent
    if threshold < 2:
        return _carry(threshold, above=True), element.emax
    return _carry(threshold / 2, above=True), element.emax + 1


def _carry(threshold: float, above: bool) -> int:
    """The number that carries if and only if the significand is at least `threshold` (above: greater); 0 if it never
    can be."""
    fraction = math.floor((threshold - 1) * (1 << 23)) + above
    return max(0, (1 << 23) - fraction)
