"""Chooses the unit of a chip that multiplies an operand, and prices what no unit takes.

A product takes the slower of its two operands' units, UNITS' order: FP4 with BF16 is a BF16 product of a decoded
operand. A 4-bit format that a chip's FP4 unit does not take is priced as if it did, since a new format is judged by
what it would cost in silicon.

A chip without FP4 units scales no blocks within a product:

    FP8, a scale a row or a tensor     the FP8 unit; the scale is applied to the product
    FP8, one for 128 (1x128, 128x128)  the FP8 unit; scales are applied to partial sums, as by DeepGEMM
    FP8 in smaller blocks, 4-bit       element times scale is decoded, and multiplied in the narrowest unit above FP8
                                       with enough significant bits (exactness.py): MXFP8 and most FP4 in BF16
    `gemm = "fp8-exact"`               both operands in the FP8 unit where this project's kernels take them there
                                       (exactness.fp8_formats); other products as without it
    `gemm = "bf16-rounded"`            decoded with all factors, rounded to BF16

Scales of rows, tensors and 128 elements are left to the product in every row but the last, so they take no bits of the
operand. `notes` says which of this is in a price.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fp4dse.dse.attention import ATTENTION_SLOTS
from fp4dse.dse.cost.chip import UNITS, Chip
from fp4dse.dse.exactness import FP8_BITS, OPERAND_FORMATS, Grid, element_grid, fp8_formats, operand_grid
from fp4dse.dse.own_formats import Own, element_format, element_name
from fp4dse.dse.quantizer import MACRO_BLOCK, Quantizer, tile
from fp4dse.dse.recipe import GemmChoice, Recipe
from fp4dse.dse.scale import FloatScale, scale_format, scale_key
from fp4dse.dse.stages import SLOTS, STAGES

NOT_TAKEN = "gemm fp8-exact: no product on FP8 units here takes both operands; priced as without it"
_WIDE_BYTES = {"bf16": 2.0, "tf32": 4.0, "fp32": 4.0}


@lru_cache(maxsize=65536)
def operand_unit(q: Quantizer, chip: Chip, gemm: GemmChoice = "exact") -> str:
    """The fastest of UNITS that takes the operand by itself. `none`, the layer's own dtype, is priced as TF32."""
    if q.is_plain:
        return "bf16" if q.element == "bf16" else "tf32"
    is_wide = element_format(q.element).bits > 4
    if chip.has_fp4:
        return "fp8" if is_wide else "fp4"  # a unit that scales blocks of FP4 scales those of FP8
    if "fp8" in chip.matrix and is_wide and _scaled_afterwards(q):
        return "fp8"
    if gemm == "bf16-rounded":
        return "bf16"
    return next((name for name, number in OPERAND_FORMATS.items() if _bits(q) <= number.mantissa + 1), "fp32")


def product_unit(a: Quantizer, b: Quantizer, chip: Chip, gemm: GemmChoice = "exact") -> str:
    """The slower of the two operands' units, or with `fp8-exact` FP8's, if it takes both."""
    if in_fp8(a, b, chip, gemm):
        return "fp8"
    return max(operand_unit(a, chip, gemm), operand_unit(b, chip, gemm), key=UNITS.index)


def in_fp8(a: Quantizer, b: Quantizer, chip: Chip, gemm: GemmChoice) -> bool:
    """True if `fp8-exact` has a chip without FP4 units multiply both operands in FP8."""
    has_units = "fp8" in chip.matrix and not chip.has_fp4
    return gemm == "fp8-exact" and has_units and fp8_formats((a,), (b,)) is not None


def decoded_bytes(q: Quantizer, unit: str, chip: Chip) -> float | None:
    """Bytes of a decoded element, where the unit reads operands decoded; None where it reads the stored codes."""
    if unit == "fp8" and not chip.has_fp4 and not q.is_plain and element_format(q.element).bits <= 4:
        return 1.0
    return _WIDE_BYTES.get(unit)


def but_fp8(gemm: GemmChoice) -> GemmChoice:
    """The choice of products for what `fp8-exact` leaves exact: attention cores, and layers with channels apart."""
    return "exact" if gemm == "fp8-exact" else gemm


def gemm_of(recipe: Recipe) -> GemmChoice:
    """The choice by which the products of a recipe's linear layers are priced: with channels apart `fp8-exact` leaves
    them exact (in truth dgrad may take FP8 units, and wgrad where only fprop has such channels)."""
    return but_fp8(recipe.gemm) if recipe.fprop.channels else recipe.gemm


def scales_partial_sums(q: Quantizer, unit: str, chip: Chip) -> bool:
    """True if a factor of the operand changes along the contraction, and is not multiplied into it but applied to sums
    over 128 elements."""
    if q.is_plain or unit not in (("fp4", "fp8") if chip.has_fp4 else ("fp8", "bf16")):
        return False
    by_blocks = not chip.has_fp4 and q.block not in ("row", "tensor") and _scaled_afterwards(q)
    return by_blocks or q.scaling == "macro" or q.factors_over in ("segment", "tile")


def has_block_scales(q: Quantizer) -> bool:
    """True if scales of blocks go into a product with the codes: not in BF16, nor with a factor a row or a tensor."""
    return not q.is_plain and q.block not in ("row", "tensor")


def _scaled_afterwards(q: Quantizer) -> bool:
    """True if the block scale can be applied to the product, or to sums over 128 elements of the contraction: the block
    is as long, and has one scale."""
    length = q.block if isinstance(q.block, int) else tile(q.block)
    is_long = length % MACRO_BLOCK == 0  # a row and a tensor are as long as any: tile gives 0
    return is_long and q.scaling != "split"


@lru_cache(maxsize=4096)
def _bits(q: Quantizer) -> int:
    """Significant bits of what is multiplied where no unit scales blocks: element, or element times block scale. FP32's
    24 and more where there is no number of them. Powers of two count nothing: scales so small that BF16 would flush
    what they scale do not occur in training."""
    found = element_grid(q) if _scaled_afterwards(q) else _scaled_grid(q)
    return found.odd.bit_length() if found else 99


def _scaled_grid(q: Quantizer) -> Grid | None:
    """The grid of element times block scale, without factors for 128 elements."""
    of_segment = q.tensor_scale is not None and q.factors_over == "segment"
    q = msgspec.structs.replace(q, tensor_scale=None) if of_segment else q
    return operand_grid(msgspec.structs.replace(q, scaling="amax") if q.scaling == "macro" else q)


def notes(recipe: Recipe, chip: Chip) -> list[str]:
    """Lines for everything that is not priced as the chip would do it, each with its slots."""
    found: dict[str, str] = {}
    for where, there in (("", recipe), *((f"{rule.where()}: ", recipe.changed(rule)) for rule in recipe.layers)):
        slots_of: dict[str, list[str]] = {}
        for slot in SLOTS:
            stage = slot.partition(".")[0]
            a, b = (there.slot(f"{stage}.{operand}").canonical() for operand in STAGES[stage])
            taken = in_fp8(a, b, chip, gemm_of(there))
            for text in _notes(there.slot(slot).canonical(), chip, gemm_of(there), taken):
                slots_of.setdefault(text, []).append(slot)
            if recipe.gemm == "fp8-exact" and "fp8" in chip.matrix and not (taken or chip.has_fp4 or a.is_plain):
                slots_of.setdefault(NOT_TAKEN, []).append(slot)
        for text, slots in slots_of.items():
            found.setdefault(text, where + ("all slots" if len(slots) == len(SLOTS) else ", ".join(slots)))
    for slot in ATTENTION_SLOTS:
        for text in _notes(recipe.attention.operand(slot).canonical(), chip, but_fp8(recipe.gemm)):
            found.setdefault(text, "attention core")
    return [f"{where}: {text}" for text, where in found.items()]


@lru_cache(maxsize=65536)
def _notes(q: Quantizer, chip: Chip, gemm: GemmChoice, fp8: bool = False) -> tuple[str, ...]:
    if q.element == "none":
        return ("the layer's own dtype, priced as TF32",)
    if q.is_plain:
        return ()
    unit = "fp8" if fp8 else operand_unit(q, chip, gemm)
    if decoded_bytes(q, unit, chip):
        return (f"{_why_decoded(q)}; emulated, {_decoded(q, unit)}",)
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


def _why_decoded(q: Quantizer) -> str:
    if element_format(q.element).bits <= 4:
        return "no FP4 unit"
    return "no FP8 unit" if _scaled_afterwards(q) else f"no FP8 unit that scales blocks of {q.block}"


def _decoded(q: Quantizer, unit: str) -> str:
    bits = {"fp8": FP8_BITS, "fp32": 24} | {name: number.mantissa + 1 for name, number in OPERAND_FORMATS.items()}
    how = "decoded exactly" if _bits(q) <= bits[unit] else "decoded with one rounding"
    return f"{how} to {unit.upper()}"


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
