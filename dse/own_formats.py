"""Number formats of the user's own, as data: a codebook of up to 16 values, or the parameters of a float format.

A file defines them by name in `[elements.NAME]` and `[scales.NAME]` (`reading/own_names.py` reads these). A recipe
holds what they are, so that it is complete without the file. A format's name is for people: recipes have one
`config_id` exactly if the numbers are the same.
"""

from __future__ import annotations

import hashlib
import math
import struct
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.formats import ELEMENTS, PLAIN, FloatFormat
from fp4dse.dse.record import Part

MOST_VALUES = 16
ELEMENT_RANGE = 40
"""Magnitudes of elements are 0, or from 2^-40 to 2^40."""
ELEMENT_BITS = 8
"""The most bits of a float element, sign included."""

Whole = Annotated[int, msgspec.Meta(ge=0)]
Exponent = Annotated[int, msgspec.Meta(ge=-126)]
Largest = Annotated[float, msgspec.Meta(gt=0)]


class Own(Part, frozen=True):
    """A format of the user's own. Its `name` counts in comparisons, and not in ids (record.unlabelled)."""

    LABELS: ClassVar[tuple[str, ...]] = ("name",)

    @property
    def name(self) -> str:
        """The name that people use."""
        raise NotImplementedError

    def content(self) -> tuple[Any, ...]:
        """All fields but the name."""
        return tuple(getattr(self, name) for name in self.__struct_fields__ if name != "name")


class TableElement(Own, frozen=True, tag_field="kind", tag="table"):
    """A codebook: 2 to 16 numbers, 0 among them, which need not be symmetric; kept as float32 numbers, ascending.

    Rounded to nearest, a tie goes to the value of even index, counted from 0 outwards on either side.
    """

    values: tuple[float, ...]
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        msgspec.structs.force_setattr(self, "values", _checked(self.values))

    @property
    def max(self) -> float:
        """The largest magnitude, which a block's maximum is scaled to."""
        return max(-self.values[0], self.values[-1])

    @property
    def emax(self) -> int:
        """Exponent of the largest magnitude."""
        return math.frexp(self.max)[1] - 1

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return (len(self.values) - 1).bit_length()

    @property
    def is_even(self) -> bool:
        """True if neighbours are equally far apart."""
        return len({b - a for a, b in pairwise(self.values)}) == 1

    def magnitudes(self) -> list[float]:
        """Every magnitude once, ascending."""
        return sorted({abs(value) for value in self.values})


class FloatElement(Own, frozen=True, tag_field="kind", tag="float"):
    """A float format with a sign, as formats.FloatFormat has it: mantissa bits, smallest normal exponent, largest."""

    mantissa: Whole
    emin: Exponent
    max: Largest
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float(self.mantissa, self.emin, self.max, ELEMENT_RANGE, ELEMENT_BITS - 1)
        if not self.mantissa and self.max > (top := 2.0 ** (self.emin + 6)):
            raise ConfigError("max", self.max, f"at most {top:g} (without mantissa, 7 powers of two)")


OwnElement = TableElement | FloatElement

if TYPE_CHECKING:
    Element = str | TableElement | FloatElement
else:
    Element = Literal[(*ELEMENTS, *PLAIN)] | TableElement | FloatElement
"""A format as it may stand in a recipe: the name of a built-in, or an own one."""


def _checked(values: tuple[float, ...]) -> tuple[float, ...]:
    """The values as float32 numbers, ascending, -0 as 0. ConfigError says what is wrong with them."""
    for i, value in enumerate(values):
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"values[{i}]", value, "a finite number")
        if value and not 2.0**-ELEMENT_RANGE <= abs(value) <= 2.0**ELEMENT_RANGE:
            raise ConfigError(f"values[{i}]", value, f"0, or a magnitude from 2^-{ELEMENT_RANGE} to 2^{ELEMENT_RANGE}")
    single = [_float32(value) for value in values]
    if twice := [value for value in single if single.count(value) > 1 and (value or _has_twice(single))]:
        raise ConfigError("values", f"{twice[0]:g} more than once", "different numbers (0 and -0 are one)")
    found = tuple(sorted({value + 0.0 for value in single}))
    if not 2 <= len(found) <= MOST_VALUES:
        raise ConfigError("values", f"{len(found)} numbers", f"2 to {MOST_VALUES}")
    if 0.0 not in found:
        raise ConfigError("values", "no 0", "0 among them: padding and what is 0 must stay 0")
    return found


def _has_twice(values: list[float]) -> bool:
    """True if one of the zeros stands there twice; a format with a sign has 0 and -0."""
    signs = [math.copysign(1.0, value) for value in values if not value]
    return len(signs) != len(set(signs))


def check_float(mantissa: int, emin: int, largest: float, reach: int, bits: int) -> None:
    """ConfigError unless there is such a format with magnitudes from 2^-reach to 2^reach, and so many bits at most."""
    if mantissa > bits:
        raise ConfigError("mantissa", mantissa, f"at most {bits}")
    if not mantissa - reach <= emin <= reach:
        raise ConfigError("emin", emin, f"{mantissa - reach} to {reach}")
    if not (least := 2.0 ** (emin - mantissa)) <= largest <= 2.0**reach:
        raise ConfigError("max", largest, f"{least:g} (the smallest number) to 2^{reach}")
    steps = largest / 2.0 ** (max(emin, math.frexp(largest)[1] - 1) - mantissa)
    if steps != int(steps):
        raise ConfigError("max", largest, f"a number with {mantissa} mantissa bits")
    if (found := float_format(mantissa, emin, largest, 0).bits) > bits:
        raise ConfigError("max", largest, f"a smaller one (so many numbers take {found} bits, {bits} at most)")


def _float32(value: float) -> float:
    (single,) = struct.unpack("f", struct.pack("f", value))
    return float(single)


@cache
def simplest(element: OwnElement) -> Element:
    """The one spelling of elements with the same values: a built-in's name, a float format, or a table.

    A table on a float format's grid is that format, whose rounding has the same bits.
    """
    if isinstance(element, TableElement):
        positive = [value for value in element.values if value >= 0]
        negative = [-value for value in reversed(element.values) if value <= 0]
        if negative != positive or (found := fit(positive)) is None:
            return element
    else:
        positive = element_format(element).magnitudes()
        if (found := fit(positive)) is None:
            return TableElement(values=(*(-value for value in positive[1:]), *positive), name=element.name)
    for name, known in ELEMENTS.items():
        if name != "s1p2" and same_grid(known, found):  # whose levels are HiFloat4's alone
            return name
    return FloatElement(mantissa=found.mantissa, emin=found.emin, max=found.max, name=element.name)


def fit(magnitudes: list[float]) -> FloatFormat | None:
    """The float format with fewest mantissa bits that has just these magnitudes, ascending from 0; None if none has.

    Of formats without mantissa, those whose smallest exponent is even: a tie goes to the power of even biased exponent,
    which then is the even code.
    """
    for mantissa in range(8):
        emin = math.frexp(magnitudes[1])[1] - 1 + mantissa
        found = FloatFormat(mantissa=mantissa, emin=emin, max=magnitudes[-1], bits=len(magnitudes).bit_length())
        if (mantissa or emin % 2 == 0) and found.magnitudes() == magnitudes:
            return found
    return None


def same_grid(a: FloatFormat, b: FloatFormat) -> bool:
    """True if two formats have the same numbers by the same fields."""
    return (a.mantissa, a.emin, a.max, a.radix) == (b.mantissa, b.emin, b.max, b.radix)


@cache
def element_format(element: Element) -> FloatFormat | TableElement:
    """The numbers of an element: the record of its name, or what an own one is."""
    if isinstance(element, str):
        return ELEMENTS[element]
    return (
        element if isinstance(element, TableElement) else float_format(element.mantissa, element.emin, element.max, 1)
    )


@cache
def float_format(mantissa: int, emin: int, largest: float, sign: int) -> FloatFormat:
    """The record of a float format, with as many bits as its codes take; sign: bits of it."""
    found = FloatFormat(mantissa=mantissa, emin=emin, max=largest, bits=0)
    return msgspec.structs.replace(found, bits=(len(found.magnitudes()) - 1).bit_length() + sign)


def element_name(element: Element) -> str:
    """`e2m1`; of an own one its name and six digits that follow from its numbers, `nf4-8c1e5a`."""
    return element if isinstance(element, str) else called(element.name, element.content())


def called(name: str, numbers: tuple[Any, ...]) -> str:
    """A name (`lut` for none) with six digits of a hash of the numbers: different formats may be called alike."""
    return f"{name or 'lut'}-{hashlib.sha256(msgspec.json.encode(numbers)).hexdigest()[:6]}"
