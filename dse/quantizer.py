"""A quantizer: everything done to one operand, as immutable data.

The parts (scale, tensor scale, rounding) are tagged unions, so that a rule can only be written where it exists:
an E8M0 scale has a rounding rule, a float scale has a zero policy, and neither can carry the other's field. Every
part and every quantizer may also be written by name (the dicts below), in TOML as well as in Python.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.formats import ELEMENTS, PLAIN, SCALES
from fp4dse.dse.record import Part


class E8M0(Part, frozen=True, tag_field="format", tag="e8m0"):
    """Power-of-two block scale; `rule` picks the exponent from the block maximum (see formats.E8M0_RULES)."""

    rule: Literal["floor", "rceil"] = "floor"


class E4M3(Part, frozen=True, tag_field="format", tag="e4m3"):
    """Block scale with 4 exponent and 3 mantissa bits, max 448. `zero`: what a scale that rounds to 0 becomes."""

    zero: Literal["keep", "one"] = "keep"


class UE5M3(Part, frozen=True, tag_field="format", tag="ue5m3"):
    """Unsigned block scale with 5 exponent and 3 mantissa bits, max 114,688 (only 0xFF is NaN)."""

    zero: Literal["keep", "one"] = "one"


Scale = E8M0 | E4M3 | UE5M3

DEFAULT_TARGET = {"e8m0": 1.0, "e4m3": 448.0, "ue5m3": 448.0}
"""Tensor-scale target where none is given: the value that the block scale of the tensor's largest block gets."""


class TensorScale(Part, frozen=True):
    """A per-tensor FP32 factor from the current maximum: the largest block's scale becomes `target` before rounding.

    `target = None` stands for the scale format's own (DEFAULT_TARGET), and is the same quantizer.
    """

    target: Annotated[float, msgspec.Meta(gt=0)] | None = None


class Nearest(Part, frozen=True, tag_field="mode", tag="nearest"):
    """Round to nearest, ties to the even code."""


class Stochastic(Part, frozen=True, tag_field="mode", tag="stochastic"):
    """Round up with the probability of the fractional position, from 16 random bits an element, midpoint form.

    With r uniform in 0 … 65535, the magnitude is rounded up iff fraction + (2r+1)/2^17 >= 1.
    """


Rounding = Nearest | Stochastic

SCALE_NAMES: dict[str, Scale] = {
    "e8m0": E8M0(),
    "e8m0-floor": E8M0(),
    "e8m0-rceil": E8M0(rule="rceil"),
    "e4m3": E4M3(),
    "ue5m3": UE5M3(),
}
TENSOR_SCALE_NAMES: dict[str, TensorScale | None] = {"none": None, "amax": TensorScale()}
ROUNDING_NAMES: dict[str, Rounding] = {"nearest": Nearest(), "stochastic": Stochastic()}


class Quantizer(Part, frozen=True):
    """What is done to one operand of one GEMM.

    element       codebook (formats.ELEMENTS), or a plain operand: `none` (untouched) or `bf16` (one rounding)
    block         elements along the contraction axis that share a scale
    scale         how the block scale is chosen and stored
    tensor_scale  a per-tensor factor above the block scales, or None
    rounding      of the elements
    range         `16/17` maps the block maximum to 16/17 of the largest element: a scale rounded down by up to 1/17
                  then clips nothing, which stochastic rounding needs to be unbiased. Float scales only.
    """

    element: Literal["e2m1", "bf16", "none"] = "e2m1"
    block: Literal[16, 32] = 16
    scale: Scale = E4M3()
    tensor_scale: TensorScale | None = None
    rounding: Rounding = Nearest()
    range: Literal["full", "16/17"] = "full"

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
        scale = 8 if isinstance(self.scale, E8M0) else SCALES[scale_format(self.scale)].bits
        return ELEMENTS[self.element].bits + scale / self.block

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
        """Range and rounding in words: empty, `SR`, `16/17` or `16/17 SR`."""
        q = self.canonical()
        words = [q.range] if q.range != "full" else []
        return " ".join(words + ["SR"] * isinstance(q.rounding, Stochastic))


@lru_cache(maxsize=4096)
def _canonical(q: Quantizer) -> Quantizer:
    if q.is_plain:
        return Quantizer(element=q.element)
    changes: dict[str, object] = {}
    if q.tensor_scale is not None and q.tensor_scale.target is None:
        changes["tensor_scale"] = TensorScale(target=DEFAULT_TARGET[scale_format(q.scale)])
    if q.range != "full" and isinstance(q.scale, E8M0):
        changes["range"] = "full"  # a power-of-two scale is never rounded down by 1/17: nothing to make room for
    return msgspec.structs.replace(q, **changes) if changes else q


def scale_format(scale: Scale) -> str:
    """The storage format's name: the tag of the union."""
    return str(scale.__struct_config__.tag)


QUANTIZERS: dict[str, Quantizer] = {
    "none": Quantizer(element="none"),
    "bf16": Quantizer(element="bf16"),
    "mxfp4": Quantizer(block=32, scale=E8M0()),
    "mxfp4-rceil": Quantizer(block=32, scale=E8M0(rule="rceil")),
    "nvfp4": Quantizer(block=16, scale=E4M3(), tensor_scale=TensorScale()),
    "nvfp4-1716": Quantizer(block=16, scale=E4M3(), tensor_scale=TensorScale(), range="16/17"),
    "e4m3-b16": Quantizer(block=16, scale=E4M3()),
    "ue5m3": Quantizer(block=16, scale=UE5M3()),
    "ue5m3-t448": Quantizer(block=16, scale=UE5M3(), tensor_scale=TensorScale()),
}
"""Named quantizers. mxfp4: OCP MX v1.0. nvfp4: 2509.25149. ue5m3: 2609.02846 (T = 448), 2601.19026 (codebook)."""


@lru_cache(maxsize=4096)
def _format_label(q: Quantizer) -> str:
    q = msgspec.structs.replace(q, rounding=Nearest(), range="full")
    for name, known in QUANTIZERS.items():
        if known.canonical() == q:
            return name
    target = q.tensor_scale.target if q.tensor_scale else None
    return f"{q.element} 1×{q.block} {scale_name(q.scale)}" + (f" T{target:g}" if target else "")


def scale_name(scale: Scale) -> str:
    """`e8m0-floor`, `e8m0-rceil`, `e4m3`, `ue5m3`; a zero policy other than the format's own is appended."""
    name = scale_format(scale)
    if isinstance(scale, E8M0):
        return f"{name}-{scale.rule}"
    return name if scale == type(scale)() else f"{name}-zero-{scale.zero}"
