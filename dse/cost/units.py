"""Chooses the unit of a chip that multiplies an operand, and prices what no unit takes.

A product takes the slower of its two operands' units, UNITS' order: FP4 with BF16 is a BF16 product of a decoded
operand. A 4-bit format that a chip's FP4 unit does not take is priced as if it did, since a new format is judged by
what it would cost in silicon. On a chip without FP4 units the operand is decoded and multiplied in the narrowest unit
that holds it exactly (exactness.py), which is how this project emulates FP4. `notes` says which of this is in a price.
"""

from __future__ import annotations

from functools import lru_cache

from fp4dse.dse.cost.chip import UNITS, Chip
from fp4dse.dse.exactness import operand_format, significant_bits
from fp4dse.dse.own_formats import Own, element_format, element_name
from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.recipe import Recipe
from fp4dse.dse.scale import FloatScale, scale_format, scale_key
from fp4dse.dse.stages import SLOTS

DECODED_BYTES = {"bf16": 2.0, "tf32": 4.0, "fp32": 4.0}
"""Bytes of an element in units that read decoded operands."""


@lru_cache(maxsize=65536)
def operand_unit(q: Quantizer, chip: Chip) -> str:
    """The fastest of UNITS that takes the operand. `none`, the layer's own dtype, is priced as TF32."""
    if q.is_plain:
        return "bf16" if q.element == "bf16" else "tf32"
    if element_format(q.element).bits > 4 and (chip.has_fp4 or q.block in ("row", "tensor")):
        return "fp8"  # a unit that scales blocks of FP4 scales those of FP8
    return "fp4" if chip.has_fp4 else operand_format(q)


def product_unit(a: Quantizer, b: Quantizer, chip: Chip) -> str:
    """The slower of the two operands' units."""
    return max(operand_unit(a, chip), operand_unit(b, chip), key=UNITS.index)


def notes(recipe: Recipe, chip: Chip) -> list[str]:
    """Lines for everything that is not priced as the chip would do it, each with its slots."""
    slots_of: dict[str, list[str]] = {}
    for slot in SLOTS:
        for text in _notes(recipe.slot(slot).canonical(), chip):
            slots_of.setdefault(text, []).append(slot)
    names = {text: "all slots" if len(slots) == len(SLOTS) else ", ".join(slots) for text, slots in slots_of.items()}
    return [f"{names[text]}: {text}" for text in slots_of]


@lru_cache(maxsize=65536)
def _notes(q: Quantizer, chip: Chip) -> tuple[str, ...]:
    if q.element == "none":
        return ("the layer's own dtype, priced as TF32",)
    if q.is_plain:
        return ()
    unit = operand_unit(q, chip)
    if unit not in ("fp4", "fp8"):
        decoded = "decoded exactly" if significant_bits(q) else "decoded with one rounding"
        return (f"no FP4 unit; emulated, {decoded} to {operand_format(q).upper()}",)
    if isinstance(q.element, Own) and "any" not in chip.native:
        name = element_name(q.element) + (f" with {scale_key(q.scale)}" if isinstance(q.scale, Own) else "")
        taken = f"priced as if the {unit.upper()} unit took it, and rounded in software"
        return (f"{name} is a format of your own, which no chip has; {taken}",)
    lines = []
    if unit == "fp4" and (reason := why_not_native(q, chip)):
        lines.append(f"{reason}; priced as if the FP4 unit took it")
    if not isinstance(q.element, Own) and q.element not in chip.converts:
        lines.append(f"no instruction converts to {q.element}; priced as rounded by vector instructions")
    return tuple(lines)


def why_not_native(q: Quantizer, chip: Chip) -> str | None:
    """The reason that the chip's FP4 unit does not take a 4-bit operand; None if it does."""
    if "any" in chip.native:
        return None
    if q.codec in ("split", "razer", "dialects", "if4", "mixfp4", "hif4"):
        return f"codec {q.codec} is not native"
    if isinstance(q.scale, FloatScale) and q.scale.convention == "encode":
        return "a stored multiplier is not native"
    name, length = scale_format(q.scale), q.block
    if length in ("row", "tensor"):
        name, length = "e8m0", 32  # blocks with scale 1; the factor is applied to the product
    size = length if isinstance(length, int) else int(length.split("x")[0])
    entries = [entry.split() for entry in chip.native]
    if any(element == q.element and scale == name and size % int(least) == 0 for element, scale, least in entries):
        return None
    if isinstance(q.scale, Own):
        return f"{scale_key(q.scale)} is a scale of your own, which no chip has"
    return f"{q.element} with {scale_format(q.scale)} scales for blocks of {q.block} is not native"
