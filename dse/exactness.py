"""Counts the significant bits of a GEMM operand, and so finds the number format that holds it without rounding.

An operand is element × block scale (and whatever else a format multiplies in), without the tensor factor. Written as
odd integer × power of two, every value of a factor has an odd part of at most `odd` and a power of at least 2^`step`.
Odd parts and powers multiply separately, so a product of factors has

    significant bits = bit length of the product of their `odd`        lowest bit = 2^(sum of their `step`)

which is attained: it is no bound but the number that listing all codes gives. A format with p significant bits and
smallest normal number 2^emin holds the operand iff the bits are at most p and the lowest bit is at least
2^(emin - p + 1), its smallest subnormal. Products of two operands of at most 11 bits are exact in FP32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache

import msgspec

from fp4dse.dse.formats import E8M0_GRID, ELEMENTS, SCALES, SMALLEST, FloatFormat
from fp4dse.dse.own_formats import TableElement, element_format
from fp4dse.dse.quantizer import Quantizer, tile
from fp4dse.dse.scale import E6M2, E8M0, FloatScale, One, scale_grid


class Grid(msgspec.Struct, frozen=True):
    """Numbers n · 2^k whose odd part is at most `odd`, with k at least `step`."""

    odd: int
    step: int


ONE = Grid(odd=1, step=0)

OPERAND_FORMATS: dict[str, FloatFormat] = {
    "bf16": SCALES["bf16"],
    "tf32": FloatFormat(mantissa=10, emin=-126, max=(2 - 2**-10) * 2.0**127, bits=19),
}
"""Formats of matrix units that may hold an operand, the fastest first. What none of them holds is left in FP32."""

FP8_FORMATS: dict[str, FloatFormat] = {name: ELEMENTS[name] for name in ("e5m2", "e4m3")}
"""Formats of FP8 units that may hold an operand, that of the widest range first."""
FP8_BITS = max(number.mantissa for number in FP8_FORMATS.values()) + 1
"""Significant bits that they have at most."""

_E6M2 = FloatFormat(mantissa=2, emin=-48, max=1.5 * 2.0**15, bits=8)

_ADAPTED = {
    "razer": [*ELEMENTS["e2m1"].magnitudes(), 5.0],
    "dialects": [0.5 * n for n in range(16)],
    "if4": [7 * v for v in ELEMENTS["e2m1"].magnitudes()] + [6 * v for v in ELEMENTS["int4"].magnitudes()],
    "mixfp4": [*ELEMENTS["e2m1"].magnitudes(), *ELEMENTS["int4"].magnitudes()],
}
"""Elements where a block chooses its codebook; those of IF4 in units of 1/7, which goes into the tensor factor;
MixFP4's E1M2 doubled, as its scale is half."""

OF_ONE_CODEBOOK = frozenset(
    ("block", "table", "hif4", "split", "macro", "eden", "quest", "sawb", "softmax", "radix4", "exact")
)
"""Codecs whose elements are those of the element format, times powers of two at most. A codec that is neither here nor
above may multiply anything in: no format is known to hold its operands, and their products are in FP32."""


def grid(values: Iterable[float]) -> Grid:
    """The grid of a codebook: all its values, zero among them or not."""
    odd, step = 1, math.inf
    for value in values:
        if value:
            numerator, denominator = abs(value).as_integer_ratio()
            twos = (numerator & -numerator).bit_length() - 1
            odd = max(odd, numerator >> twos)
            step = min(step, twos + 1 - denominator.bit_length())
    return Grid(odd, int(step))


@cache
def format_grid(number: FloatFormat | TableElement) -> Grid:
    """The grid of a format, by listing its codes; FP32 has too many, and every significand."""
    if isinstance(number, FloatFormat) and number.bits > 16:
        return Grid(2 ** (number.mantissa + 1) - 1, number.emin - number.mantissa)
    return grid(number.magnitudes())


def _element(q: Quantizer) -> Grid | None:
    if q.codec in _ADAPTED:
        return grid(_ADAPTED[q.codec])
    if q.is_plain:
        return format_grid(SCALES["bf16" if q.element == "bf16" else "fp32"])
    return format_grid(element_format(q.element)) if q.codec in OF_ONE_CODEBOOK else None


def _scale(q: Quantizer) -> Grid | None:
    if q.is_plain:
        return ONE
    if (element := _element(q)) is None:
        return None
    if isinstance(q.scale, One):
        return ONE
    if q.scaling == "macro" or q.factors_over == "segment":
        return None  # a factor that changes along the contraction cannot wait until after the product
    if isinstance(q.scale, E8M0) and isinstance(element_format(q.element), FloatFormat):
        return Grid(odd=1, step=max(E8M0_GRID.emin, SMALLEST - element.step))
    if isinstance(q.scale, E6M2):
        return format_grid(_E6M2)  # exponents of parts of the block only add to its power
    is_quotient = isinstance(q.scale, FloatScale) and q.scale.convention == "encode"
    return None if is_quotient else format_grid(scale_grid(q.scale))


FACTORS: dict[str, Callable[[Quantizer], Grid | None]] = {"element": _element, "scale": _scale}
"""The factors of an operand: the grid of each, None where no format holds it, as a quotient, or nothing is known of it.

A new element or scale format is found by its listed values; whatever else is multiplied in is one more entry.
"""


@lru_cache(maxsize=4096)
def operand_grid(quantizer: Quantizer) -> Grid | None:
    """The grid of element × block scale, None where a factor has none."""
    odd, step = 1, 0
    for factor in FACTORS.values():
        if (found := factor(quantizer)) is None:
            return None
        odd, step = odd * found.odd, step + found.step
    return Grid(odd, step)


def significant_bits(quantizer: Quantizer) -> int | None:
    """Significant bits of element × block scale; None where even the FP32 operand is rounded."""
    found = operand_grid(quantizer)
    return found.odd.bit_length() if found and holds(SCALES["fp32"], found) else None


def holds(number: FloatFormat, operand: Grid) -> bool:
    """True if every value of the grid, but for overflow, is a value of the format."""
    return operand.odd.bit_length() <= number.mantissa + 1 and operand.step >= number.emin - number.mantissa


def element_grid(quantizer: Quantizer) -> Grid | None:
    """The grid of the element alone."""
    return FACTORS["element"](quantizer)


@lru_cache(maxsize=4096)
def operand_format(quantizer: Quantizer) -> str:
    """The fastest of OPERAND_FORMATS that holds the operand, else `fp32`."""
    found = operand_grid(quantizer)
    return next((name for name, number in OPERAND_FORMATS.items() if found and holds(number, found)), "fp32")


@lru_cache(maxsize=4096)
def fp8_format(quantizer: Quantizer) -> str | None:
    """The first of FP8_FORMATS in which FP8 units take the operand, None if they do not.

    E2M1 × E8M0 in blocks or tiles: the format of the widest range, under a power of two for the operand. E4M3 and E5M2
    under one factor of the tensor: themselves. Elements of 8 bits in blocks fill a format's range, and leave no room
    for blocks of different scale beside each other; other operands, whatever their bits, are left to BF16 units.
    """
    q = quantizer
    if q.is_plain or q.codec != "block" or q.factors_over != "tensor" or q.outliers is not None:
        return None
    if isinstance(q.scale, One):
        return q.element if q.element in FP8_FORMATS and q.block == "tensor" else None
    in_blocks = isinstance(q.block, int) or tile(q.block) is not None
    return next(iter(FP8_FORMATS)) if q.element == "e2m1" and isinstance(q.scale, E8M0) and in_blocks else None


def fp8_formats(a: Sequence[Quantizer], b: Sequence[Quantizer]) -> tuple[str, str] | None:
    """The FP8 of both operands of a product on FP8 units, in all lanes; None if these do not take it.

    cuBLAS multiplies no E5M2 by E5M2. So where both would be, one that E4M3 holds as well is in that: the second
    operand, the weight or in wgrad the input, rather than the first, since both have a narrower range than gradients.
    """
    of_each = [{fp8_format(q) for q in quantizers} for quantizers in (a, b)]
    if any(len(found) > 1 or None in found for found in of_each):
        return None
    (first,), (second,) = of_each
    assert first is not None
    assert second is not None
    if first == second == "e5m2":
        if not any(is_fp8_itself(q) for q in b):
            return first, "e4m3"
        return None if any(is_fp8_itself(q) for q in a) else ("e4m3", second)
    return first, second


def is_fp8_itself(quantizer: Quantizer) -> bool:
    """True if elements are FP8 numbers that a single factor scales, which need no power of two."""
    return isinstance(quantizer.scale, One) and fp8_format(quantizer) is not None


def has_factor(quantizer: Quantizer) -> bool:
    """False if a product of elements and block scales needs no decode factor afterwards, since it is 1: scales E8M0
    that follow no factor of the tensor.

    Of other scales it may be 1, too, but lanes with and without a factor cannot share a population where it is left
    out, and many studies compare such.
    """
    q = quantizer
    in_range = q.range in ("full", "16/17")
    return not (q.codec == "block" and isinstance(q.scale, E8M0) and q.tensor_scale is None and in_range)


def product_format(*quantizers: Quantizer) -> str:
    """The fastest format that holds all operands of a GEMM: `bf16`, `tf32` or `fp32`."""
    order = [*OPERAND_FORMATS, "fp32"]
    return order[max(order.index(operand_format(q)) for q in quantizers)]
