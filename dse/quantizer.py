"""A quantizer: everything done to one operand, as immutable data.

The parts (scale, tensor scale, rounding) are tagged unions, so that a rule can only be written where it exists:
an E8M0 scale has a rounding rule, a float scale has a zero policy, and neither can carry the other's field. Every
part and every quantizer may also be written by name (the dicts below), in TOML as well as in Python.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.formats import ELEMENTS, PLAIN, SCALES
from fp4dse.dse.record import Part, plain


class E8M0(Part, frozen=True, tag_field="format", tag="e8m0"):
    """Power-of-two block scale; `rule` picks the exponent from the block maximum (see formats.E8M0_RULES)."""

    rule: Literal["floor", "ceil", "rceil", "even", "nearest"] = "floor"


class FloatScale(Part, frozen=True, tag_field="format"):
    """A block scale with a mantissa.

    zero        what a scale that rounds to zero becomes: `keep` 0 (the block is lost), `min` (the smallest code), `one`
    rounding    of the scale to its format: nearest even, or `up`, which clips no block maximum
    convention  `decode`: stored is s, x̂ = q·s. `encode`: stored is the multiplier 1/s, x̂ = q/s (2509.17791)
    hybrid      quantize with the unrounded scale, decode with the rounded one
    """

    zero: Literal["keep", "min", "one"] = "keep"
    rounding: Literal["nearest", "up"] = "nearest"
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


Scale = E8M0 | E4M3 | UE5M3 | E5M2 | UE4M4 | BF16 | FP32

DEFAULT_TARGET = {"e8m0": 1.0, "e4m3": 448.0, "ue5m3": 448.0, "e5m2": 448.0, "ue4m4": 448.0, "bf16": 1.0, "fp32": 1.0}
"""Tensor-scale target where none is given: the value that the block scale of the tensor's largest block gets. Under
the encode convention it is the largest element, which is 2509.17791's division by the tensor maximum."""


class TensorScale(Part, frozen=True):
    """A per-tensor FP32 factor from the current maximum: the largest block's scale becomes `target` before rounding.

    `target = None` stands for the scale format's own (DEFAULT_TARGET), and is the same quantizer.
    """

    target: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Nearest(Part, frozen=True, tag_field="mode", tag="nearest"):
    """Round to nearest; ties to the even code, or `away` from zero."""

    ties: Literal["even", "away"] = "even"


class Stochastic(Part, frozen=True, tag_field="mode", tag="stochastic"):
    """Round up with the probability of the fractional position, from b = 8 or 16 random bits, midpoint form.

    With r uniform in 0 … 2^b-1, the magnitude is rounded up iff fraction + (2r+1)/2^(b+1) >= 1.
    """

    bits: Literal[8, 16] = 16


Rounding = Nearest | Stochastic

SCALE_NAMES: dict[str, Scale] = {
    "e8m0": E8M0(),
    "e8m0-floor": E8M0(),
    "e8m0-ceil": E8M0(rule="ceil"),
    "e8m0-rceil": E8M0(rule="rceil"),
    "e8m0-even": E8M0(rule="even"),
    "e8m0-nearest": E8M0(rule="nearest"),
    "e4m3": E4M3(),
    "e4m3-encode": E4M3(convention="encode", zero="min"),
    "ue5m3": UE5M3(),
    "ue5m3-61440": UE5M3(max=61440),
    "ue5m3-encode": UE5M3(convention="encode", zero="min"),
    "e5m2": E5M2(),
    "ue4m4": UE4M4(),
    "bf16": BF16(),
    "fp32": FP32(),
}
TENSOR_SCALE_NAMES: dict[str, TensorScale | None] = {"none": None, "amax": TensorScale()}
ROUNDING_NAMES: dict[str, Rounding] = {
    "nearest": Nearest(),
    "half-away": Nearest(ties="away"),
    "stochastic": Stochastic(),
    "stochastic8": Stochastic(bits=8),
}


class Quantizer(Part, frozen=True):
    """What is done to one operand of one GEMM.

    element       codebook (formats.ELEMENTS), or a plain operand: `none` (untouched) or `bf16` (one rounding)
    block         elements that share a scale: a number along the contraction axis, a 2-D tile (`16x16`, so that a
                  weight and its transpose have one encoding), a whole `row`, or the `tensor`
    scale         how the block scale is chosen and stored
    tensor_scale  a per-tensor factor above the block scales, or None
    rounding      of the elements
    range         what the block maximum is mapped to, so that stochastic rounding clips nothing and stays unbiased.
                  `16/17` of the largest element: for float scales, which may be rounded down by up to 1/17.
                  `3/4`: for E8M0 under the floor rule; the scale is that of x, the elements are those of 3x/4, and
                  the product is multiplied by 4/3 (2502.20586).
    adapt         `4over6-…`: each block is encoded twice, its maximum mapped to `range` of the largest element and to
                  4/6 of that, and the one with the smaller squared (mse) or absolute (mae) error is kept, the first
                  if equal (2512.02010). Float scales only; a tensor target must leave room for 1.5 times the scale.
    """

    element: Literal["e2m1", "e1m2", "e3m0", "int4", "e4m3", "e5m2", "bf16", "none"] = "e2m1"
    block: Literal[16, 32, 64, 128, "16x16", "32x32", "row", "tensor"] = 16
    scale: Scale = E4M3()
    tensor_scale: TensorScale | None = None
    rounding: Rounding = Nearest()
    range: Literal["full", "16/17", "3/4"] = "full"
    adapt: Literal["none", "4over6-mse", "4over6-mae"] = "none"

    @staticmethod
    def named(name: str) -> Quantizer:
        """The quantizer of that name; ConfigError names the known ones."""
        if name not in QUANTIZERS:
            raise ConfigError("quantizer", name, ", ".join(QUANTIZERS))
        return QUANTIZERS[name]

    @property
    def is_plain(self) -> bool:
        """True where no block scale is involved."""
        return self.element in PLAIN

    @property
    def val_max(self) -> float:
        """The scaled value that the block maximum is mapped to before the scale is rounded."""
        largest = ELEMENTS[self.element].max
        return largest * 16 / 17 if self.range == "16/17" else largest

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element: element bits plus the block scale's share."""
        if self.is_plain:
            return PLAIN[self.element]
        return ELEMENTS[self.element].bits + scale_bits(self.scale) / (block_elements(self.block) or math.inf)

    def canonical(self) -> Quantizer:
        """The one spelling of all quantizers that compute the same: what has no effect is set to its default."""
        return _canonical(self)

    def label(self) -> str:
        """A short name for people: the dict name where there is one, else the format's label and its modifier."""
        q = self.canonical()
        name = next((name for name, known in QUANTIZERS.items() if known.canonical() == q), None)
        return name or " ".join(filter(None, (q.format_label(), q.modifier_label())))

    def format_label(self) -> str:
        """How numbers are stored, in words: the label without range and rounding."""
        return _format_label(self.canonical())

    def modifier_label(self) -> str:
        """Range and rounding in words: empty, `SR`, `16/17`, `16/17 SR` …."""
        q = self.canonical()
        words = [word for word in (q.range, q.adapt) if word not in ("full", "none")]
        return " ".join([*words, ROUNDING_WORDS[q.rounding]]).strip()


@lru_cache(maxsize=4096)
def _canonical(q: Quantizer) -> Quantizer:
    if q.is_plain:
        return Quantizer(element=q.element)
    changes: dict[str, object] = {}
    if q.tensor_scale is not None and q.tensor_scale.target is None:
        encode = isinstance(q.scale, FloatScale) and q.scale.convention == "encode"
        target = ELEMENTS[q.element].max if encode else DEFAULT_TARGET[scale_format(q.scale)]
        changes["tensor_scale"] = TensorScale(target=target)
    if isinstance(q.scale, E8M0):
        if q.range == "16/17":
            changes["range"] = "full"  # a power-of-two scale is never rounded down by 1/17: nothing to make room for
        changes["adapt"] = "none"  # it could not represent 1.5 times itself
    return msgspec.structs.replace(q, **changes) if changes else q


def scale_format(scale: Scale) -> str:
    """The storage format's name: the tag of the union."""
    return str(scale.__struct_config__.tag)


def scale_key(scale: Scale) -> str:
    """The record in formats.SCALES."""
    name = scale_format(scale)
    return f"{name}-{scale.max}" if isinstance(scale, UE5M3) and scale.max != 114688 else name


def scale_bits(scale: Scale) -> int:
    """Bits of one stored scale."""
    return 8 if isinstance(scale, E8M0) else SCALES[scale_key(scale)].bits


def block_elements(block: int | str) -> int | None:
    """Elements that share a scale; None where that depends on the tensor."""
    if isinstance(block, int):
        return block
    return int(block.split("x")[0]) ** 2 if "x" in block else None


def block_name(block: int | str) -> str:
    """`1x16`, `16x16`, `row`, `tensor`."""
    return f"1x{block}" if isinstance(block, int) else block


def rounding_name(rounding: Rounding) -> str:
    """The key in ROUNDING_NAMES."""
    return next(name for name, known in ROUNDING_NAMES.items() if known == rounding)


_AMAX = TensorScale()
QUANTIZERS: dict[str, Quantizer] = {
    "none": Quantizer(element="none"),
    "bf16": Quantizer(element="bf16"),
    "mxfp4": Quantizer(block=32, scale=E8M0()),  # OCP MX v1.0
    "mxfp4-ceil": Quantizer(block=32, scale=E8M0(rule="ceil")),
    "mxfp4-rceil": Quantizer(block=32, scale=E8M0(rule="rceil")),  # 2502.20853
    "mxfp4-even": Quantizer(block=32, scale=E8M0(rule="even")),
    "mxfp4-34": Quantizer(block=32, scale=E8M0(), range="3/4"),  # 2502.20586
    "mxfp4-2d": Quantizer(block="32x32", scale=E8M0(rule="rceil")),
    "nvfp4": Quantizer(scale=E4M3(), tensor_scale=_AMAX),  # 2509.25149
    "nvfp4-1716": Quantizer(scale=E4M3(), tensor_scale=_AMAX, range="16/17"),
    "nvfp4-2d": Quantizer(block="16x16", scale=E4M3(), tensor_scale=_AMAX),
    "nvfp4-4over6-mse": Quantizer(
        scale=E4M3(), tensor_scale=TensorScale(target=256.0), adapt="4over6-mse"
    ),  # 2512.02010
    "nvfp4-4over6-mae": Quantizer(scale=E4M3(), tensor_scale=TensorScale(target=256.0), adapt="4over6-mae"),
    "nvint4": Quantizer(element="int4", scale=E4M3(), tensor_scale=_AMAX),  # 2603.28765
    "e4m3-b16": Quantizer(scale=E4M3()),
    "ue5m3": Quantizer(scale=UE5M3()),  # 2601.19026
    "ue5m3-t448": Quantizer(scale=UE5M3(), tensor_scale=_AMAX),  # 2609.02846
    "fp8": Quantizer(element="e4m3", block="tensor", scale=FP32()),
    "fp8-e5m2": Quantizer(element="e5m2", block="tensor", scale=FP32()),
}
"""Named quantizers, with the source of those that have one."""

ROUNDING_WORDS: dict[Rounding, str] = {
    Nearest(): "",
    Nearest(ties="away"): "half-away",
    Stochastic(): "SR",
    Stochastic(bits=8): "SR8",
}


@lru_cache(maxsize=4096)
def _format_label(q: Quantizer) -> str:
    q = msgspec.structs.replace(q, rounding=Nearest(), range="full", adapt="none")
    for name, known in QUANTIZERS.items():
        if known.canonical() == q:
            return name
    words = [q.element, block_name(q.block), scale_name(q.scale)]
    if q.tensor_scale is not None:
        words.append(f"T{q.tensor_scale.target:g}")
    return " ".join(words)


def scale_name(scale: Scale) -> str:
    """The name of the scale in SCALE_NAMES, else its format and what differs from the default."""
    names = [name for name, known in SCALE_NAMES.items() if known == scale]
    if names:
        return names[-1]  # `e8m0-floor` rather than `e8m0`
    fields = (f"{key}-{value}" for key, value in plain(scale).items() if key != "format")
    return "-".join([scale_format(scale), *fields])
