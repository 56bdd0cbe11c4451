"""Scales as data: how a block's scale is chosen and stored, and the tensor's factor above the block scales.

The formats are a tagged union, so that a rule can only be written where it exists: an E8M0 scale has a rule, a float
scale has a zero policy, and neither can carry the other's field.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from fp4dse.dse.formats import E8M0_GRID, ONE_GRID, SCALES, FloatFormat
from fp4dse.dse.own_formats import Exponent, Largest, Own, Whole, called, check_float, float_format, same_grid
from fp4dse.dse.record import Part, field_types


class E8M0(Part, frozen=True, tag_field="format", tag="e8m0"):
    """Power-of-two block scale; `rule` picks the exponent from the block maximum (see formats.E8M0_RULES)."""

    rule: Literal["floor", "ceil", "rceil", "even", "nearest", "encode"] = "floor"


class E6M2(Part, frozen=True, tag_field="format", tag="e6m2"):
    """HiFloat4's: an E6M2 scale per 64 elements, an exponent bit per 8 and one per 4 below it (2602.11287)."""


class FloatScale(Part, frozen=True, tag_field="format"):
    """A block scale with a mantissa.

    zero        what a scale that rounds to zero becomes: `keep` 0 (the block is lost), `min` (the smallest code), `one`
    rounding    of the scale to its format: nearest even; `up`, which clips no block maximum; or `stochastic` (16 bits)
    convention  `decode`: stored is s, x̂ = q·s. `encode`: stored is the multiplier 1/s, x̂ = q/s (2509.17791)
    hybrid      quantize with the unrounded scale, decode with the rounded one
    """

    zero: Literal["keep", "min", "one"] = "keep"
    rounding: Literal["nearest", "up", "stochastic"] = "nearest"
    convention: Literal["decode", "encode"] = "decode"
    hybrid: bool = False


class E4M3(FloatScale, frozen=True, tag="e4m3"):
    """4 exponent and 3 mantissa bits, max 448."""


class UE5M3(FloatScale, frozen=True, tag="ue5m3"):
    """Unsigned, 5 exponent and 3 mantissa bits. Four codebooks are in use; the largest value tells them apart.

    114688: only 0xFF is NaN (PTX, LLVM, 2601.19026). 61440: the top exponent is reserved (2609.02846). 122880: every
    code is finite.
    """

    zero: Literal["keep", "min", "one"] = "one"
    max: Literal[114688, 61440, 122880] = 114688


class E5M2(FloatScale, frozen=True, tag="e5m2"):
    """5 exponent and 2 mantissa bits, max 57,344."""


class UE4M4(FloatScale, frozen=True, tag="ue4m4"):
    """Unsigned, 4 exponent and 4 mantissa bits, bias 7, max 496: a reading of our own, none is published."""


class BF16(FloatScale, frozen=True, tag="bf16"):
    """16 bits."""


class FP32(FloatScale, frozen=True, tag="fp32"):
    """32 bits: the scale before any format."""


class One(Part, frozen=True, tag_field="format", tag="one"):
    """No block scale: elements are those of x · (largest element / maximum), and the inverse of that factor multiplies
    the product. As FP8 is scaled: tensor_scale says what has a maximum of its own, and which one it follows."""


class OwnScale(FloatScale, Own, frozen=True, kw_only=True, tag="own"):
    """A format of the user's own, without a sign: mantissa bits, smallest normal exponent, largest number."""

    mantissa: Whole
    emin: Exponent
    max: Largest
    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_float(*self.numbers, SCALE_RANGE, SCALE_BITS)

    @property
    def numbers(self) -> tuple[int, int, float]:
        """The fields that fix the numbers of the format."""
        return self.mantissa, self.emin, self.max


SCALE_RANGE = 64
"""Own scales are 0, or from 2^-64 to 2^64, so that their inverses are normal numbers."""
SCALE_BITS = 16

Scale = E8M0 | E6M2 | E4M3 | UE5M3 | E5M2 | UE4M4 | BF16 | FP32 | One | OwnScale

DEFAULT_TARGET = {
    **dict.fromkeys(("e8m0", "e6m2", "bf16", "fp32", "one"), 1.0),
    **dict.fromkeys(("e4m3", "ue5m3", "e5m2", "ue4m4"), 448.0),
}


def default_target(scale: Scale) -> float:
    """Tensor-scale target where none is given: the value that the block scale of the tensor's largest block gets.

    448, or of an own scale that has no such normal number the nearest that it has. Under the encode convention it is
    the largest element instead, which is 2509.17791's division by the tensor maximum.
    """
    if isinstance(scale, OwnScale):
        return min(max(448.0, 2.0**scale.emin), scale.max)
    return DEFAULT_TARGET[scale_format(scale)]


def simplest_scale(scale: Scale) -> Scale:
    """The built-in scale of the same numbers, where an own one has such; else the scale itself."""
    if not isinstance(scale, OwnScale):
        return scale
    codebooks = get_args(field_types(UE5M3)["max"])
    built_in: tuple[Scale, ...] = (E4M3(), *(UE5M3(max=largest) for largest in codebooks), E5M2(), UE4M4())
    for known in built_in:
        if same_grid(scale_grid(known), scale_grid(scale)):
            return msgspec.structs.replace(
                known, **{name: getattr(scale, name) for name in FloatScale.__struct_fields__}
            )
    return scale


class TensorScale(Part, frozen=True):
    """A per-tensor FP32 factor: the largest block's scale becomes `target` before rounding.

    target  None stands for the scale format's own (DEFAULT_TARGET), and is the same quantizer. Under the scale `one`
            the maximum becomes the largest element divided by it: 2^m is Transformer Engine's margin m
    amax    the maximum that it follows: `current`; `previous`, that of the step before; `held` for `steps` steps; or
            `history`, the largest of the last `steps` steps (Transformer Engine's delayed scaling, with 1024); or
            `feedback`, a power of two that doubles after a step whose maximum was above it and halves after one whose
            maximum was at most half of it (GradScale of Sun et al. 2020, whose own law is not known here). Only the
            current one costs a second read of the tensor. What outgrows an old maximum saturates
    over    what has a factor of its own: the `tensor`; each `row` of the operand, laid out along the contraction axis;
            each `segment` of 128 elements of a row (2510.27527); or, under the scale `one`, each 2-D `tile`
    """

    target: Annotated[float, msgspec.Meta(gt=0)] | None = None
    amax: Literal["current", "previous", "held", "history", "feedback"] = "current"
    steps: Annotated[float, msgspec.Meta(gt=0)] = 50.0
    over: Literal["tensor", "row", "segment", "tile"] = "tensor"

    @property
    def policy(self) -> str:
        """`current`, `previous`, `held50`, `history1024` or `feedback`, with ` row`, ` segment` or ` tile` where these
        have their own."""
        steps = f"{self.steps:g}" if self.amax in ("held", "history") else ""
        return self.amax + steps + ("" if self.over == "tensor" else f" {self.over}")


SCALE_NAMES: dict[str, Scale] = {
    "e8m0": E8M0(),
    "e8m0-floor": E8M0(),
    "e8m0-ceil": E8M0(rule="ceil"),
    "e8m0-rceil": E8M0(rule="rceil"),
    "e8m0-even": E8M0(rule="even"),
    "e8m0-nearest": E8M0(rule="nearest"),
    "e8m0-encode": E8M0(rule="encode"),
    "e6m2": E6M2(),
    "e4m3": E4M3(),
    "e4m3-encode": E4M3(convention="encode", zero="min"),
    "ue5m3": UE5M3(),
    "ue5m3-61440": UE5M3(max=61440),
    "ue5m3-encode": UE5M3(convention="encode", zero="min"),
    "e5m2": E5M2(),
    "ue4m4": UE4M4(),
    "bf16": BF16(),
    "fp32": FP32(),
    "one": One(),
}
TENSOR_SCALE_NAMES: dict[str, TensorScale | None] = {
    "none": None,
    "amax": TensorScale(),
    "previous": TensorScale(amax="previous"),
    "held": TensorScale(amax="held"),
    "history": TensorScale(amax="history", steps=1024.0),
    "feedback": TensorScale(amax="feedback"),
    "row": TensorScale(over="row"),
    "segment": TensorScale(over="segment"),
    "tile": TensorScale(over="tile"),
}


def scale_format(scale: Scale) -> str:
    """The storage format's name: the tag of the union."""
    return str(scale.__struct_config__.tag)


def scale_key(scale: Scale) -> str:
    """The record in formats.SCALES; of an own scale its name with six digits that follow from its numbers."""
    if isinstance(scale, OwnScale):
        return called(scale.name, scale.numbers)
    name = scale_format(scale)
    return f"{name}-{scale.max}" if isinstance(scale, UE5M3) and scale.max != 114688 else name


def scale_grid(scale: Scale) -> FloatFormat:
    """The numbers that a stored scale is rounded to; KeyError for E6M2, whose block has several."""
    if isinstance(scale, OwnScale):
        return float_format(*scale.numbers, 0)
    if isinstance(scale, E8M0 | One):
        return E8M0_GRID if isinstance(scale, E8M0) else ONE_GRID
    return SCALES[scale_key(scale)]


def scale_bits(scale: Scale) -> int:
    """Bits of one stored scale, with what goes with it."""
    if isinstance(scale, E6M2):
        return 8 + 8 + 16
    return scale_grid(scale).bits


def scale_name(scale: Scale) -> str:
    """The name of the scale in SCALE_NAMES, else the most similar one there and what differs from it."""
    if isinstance(scale, OwnScale):
        plainly = OwnScale(mantissa=scale.mantissa, emin=scale.emin, max=scale.max)
        return "-".join([scale_key(scale), *_differences(scale, plainly)])
    names = [name for name, known in SCALE_NAMES.items() if known == scale]
    if names:
        return names[-1]  # `e8m0-floor` rather than `e8m0`
    known = {name: like for name, like in SCALE_NAMES.items() if type(like) is type(scale)}
    near = min(known, key=lambda name: (len(_differences(scale, known[name])), -len(name)))
    return "-".join([near, *_differences(scale, known[near])])


def _differences(scale: Scale, other: Scale) -> list[str]:
    """In words, where the scale has other fields than one of its format: `zero-min`, `up`, `hybrid` …"""
    own = {
        name: getattr(scale, name)
        for name in scale.__struct_fields__
        if name not in scale.LABELS and getattr(scale, name) != getattr(other, name)
    }
    return [f"zero-{value}" if name == "zero" else name if value is True else str(value) for name, value in own.items()]
