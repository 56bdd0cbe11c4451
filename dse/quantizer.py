"""A quantizer: everything done to one operand, as immutable data.

What cannot be combined at all is unwritable; what makes no sense together breaks a rule of `rules/quantizers.py`. Every
part and every quantizer may also be written by name, in TOML as well as in Python (`SCALE_NAMES`, `ROUNDING_NAMES`, …).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import msgspec

from fp4dse.dse.errors import ConfigError
from fp4dse.dse.formats import PLAIN, FloatFormat
from fp4dse.dse.outliers import Outliers, Residual, outlier_layout, outlier_words
from fp4dse.dse.own_formats import (
    Element,
    FloatElement,
    TableElement,
    element_format,
    element_name,
    simplest,
)
from fp4dse.dse.record import Part
from fp4dse.dse.rounding import Nearest, Rounding, Stochastic, rounding_words, samples_of
from fp4dse.dse.scale import (
    E4M3,
    E6M2,
    E8M0,
    FP32,
    FloatScale,
    One,
    Scale,
    TensorScale,
    default_target,
    scale_bits,
    scale_name,
    simplest_scale,
)


class Quantizer(Part, frozen=True):
    """The treatment of one operand of one GEMM.

    element       codebook (formats.ELEMENTS, or one of own_formats), or a plain operand: `none` (untouched) or `bf16`
                  (one rounding)
    block         elements that share a scale: a number along the contraction axis, a 2-D tile (`16x16`, so that a
                  weight and its transpose have one encoding), a whole `row`, or the `tensor`
    scale         how the block scale is chosen and stored
    tensor_scale  a per-tensor factor above the block scales, or None
    rounding      of the elements
    range         what the block maximum is mapped to, so that stochastic rounding clips nothing and stays unbiased.
                  `16/17` of the largest element: for float scales, which may be rounded down by up to 1/17.
                  `3/4`: for E8M0 under the floor rule; the scale is that of x, the elements are those of 3x/4, and
                  the product is multiplied by 4/3 (2502.20586).
                  `aligned`: the same for rounding to nearest, whose products are multiplied by 1.009276 besides
                  (2505.14669)
    adapt         each block is encoded in several ways, and the encoding with the smallest error is kept, the first if
                  equal. `4over6-mse`, `4over6-mae`: with its maximum mapped to `range` of the largest element and to
                  4/6 of that, by squared or absolute error (2512.02010); a tensor target must leave room for 1.5 times
                  the scale. `if4`: as E2M1, or as 6/7 of INT4 (2603.28765). `mixfp4`: as E2M1, or as E1M2 with a scale
                  of its own, E1M2 if equal (2605.31035). `razer`: with +5 or -5 for -0 (2501.04052). `dialects`: with
                  one of BlockDialect's 16 codebooks (2501.01144)
    scaling       how block scales follow from the tensor. `amax`: from block maxima. `split`: a scale for positive and
                  one for negative elements (AMXFP4, 2411.09909). `macro`: a mantissa factor per 128 elements above
                  E8M0 (2603.08713). `eden`: rounded to nearest, then scales corrected to make the block unbiased and
                  rounded stochastically (MS-EDEN, 2601.22813). `quest`: from the standard deviation (2505.14669).
                  `softmax`: from a soft maximum of the block (2509.17791).
                  `sawb`: from rms and mean magnitude (Sun et al. 2020)
    arithmetic    `fp32`: NVIDIA's order of operations, each rounded to FP32; `exact`: one rounding per stored number
    outliers      what is done about large elements, or None
    """

    element: Element = "e2m1"
    block: Literal[8, 16, 32, 64, 128, 256, "16x16", "32x32", "128x128", "row", "tensor"] = 16
    scale: Scale = E4M3()
    tensor_scale: TensorScale | None = None
    rounding: Rounding = Nearest()
    range: Literal["full", "16/17", "3/4", "aligned"] = "full"
    adapt: Literal["none", "4over6-mse", "4over6-mae", "if4", "mixfp4", "razer", "dialects"] = "none"
    scaling: Literal["amax", "split", "macro", "eden", "quest", "sawb", "softmax"] = "amax"
    arithmetic: Literal["fp32", "exact"] = "fp32"
    outliers: Outliers = None

    @staticmethod
    def named(name: str) -> Quantizer:
        """The quantizer of that name; ConfigError names the known ones."""
        if name not in QUANTIZERS:
            raise ConfigError("quantizer", name, ", ".join(QUANTIZERS))
        return QUANTIZERS[name]

    @property
    def is_plain(self) -> bool:
        """True where no block scale is involved."""
        return isinstance(self.element, str) and self.element in PLAIN

    @property
    def methods(self) -> tuple[str, ...]:
        """The special ways by which elements and scales are found; at most one of them is valid."""
        return _methods(self)

    @property
    def codec(self) -> str:
        """The function of kernels/quant/spec/codecs that computes it: its method, or `block`."""
        return self.methods[0] if self.methods else "block"

    @property
    def layout(self) -> str:
        """The part that fixes tensor shapes and control flow: block shape, codec, row factors, outlier treatment, and
        samples of a stochastic rounding."""
        if self.is_plain:
            return ""
        words = [block_name(self.block)]
        words += [self.codec] if self.methods else []
        words += [self.factors_over] if self.factors_over != "tensor" else []
        words += ["one"] if self.scales_partial_sums else []
        words += [outlier_layout(self.outliers)] if self.outliers else []
        words += [f"{samples} samples"] if (samples := samples_of(self.rounding)) > 1 else []
        return " ".join(words)

    @property
    def stochastic_scales(self) -> bool:
        """True where block scales are rounded by chance."""
        return isinstance(self.scale, FloatScale) and self.scale.rounding == "stochastic"

    @property
    def factors_over(self) -> str:
        """The unit that has a tensor factor of its own: `tensor`, `row`, `segment` or `tile`."""
        return self.tensor_scale.over if self.tensor_scale else "tensor"

    @property
    def scales_partial_sums(self) -> bool:
        """True where factors change along the contraction and are not in the operand: they multiply the partial sums of
        the product, a segment of 128 each."""
        return isinstance(self.scale, One) and self.factors_over in ("segment", "tile")

    def factors(self, rows: int, columns: int) -> int:
        """The number of tensor factors of an operand [rows, columns], rows of tiles padded to whole ones."""
        if self.factors_over == "tile":
            edge = tile(self.block)
            return -(-rows // edge) * (columns // edge)
        return {"tensor": 1, "row": rows, "segment": rows * columns // MACRO_BLOCK}[self.factors_over]

    @property
    def unit(self) -> int:
        """The number that the length of the contraction axis must be a multiple of."""
        if self.is_plain:
            return 1
        if isinstance(self.block, int):
            return (
                max(self.block, MACRO_BLOCK)
                if self.scaling == "macro" or self.factors_over == "segment"
                else self.block
            )
        return tile(self.block) or 1

    @property
    def scaled_to(self) -> FloatFormat | TableElement:
        """The codebook that the block is scaled to: its own, but the even phase's for both phases of radix-4."""
        return element_format("radix4" if self.element == "radix4-odd" else self.element)

    @property
    def val_max(self) -> float:
        """The scaled value that the block maximum is mapped to before the scale is rounded."""
        largest = self.scaled_to.max
        if self.scaling == "eden":
            return largest / (0.93 * 17 / 16)  # a little is clipped, which costs less than it saves
        return largest * 16 / 17 if self.range == "16/17" else largest

    @property
    def encodings(self) -> int:
        """The number of encodings whose products are added: two with a residual, else the samples of its rounding."""
        return 2 if isinstance(self.outliers, Residual) else samples_of(self.rounding)

    @property
    def bits_per_element(self) -> float:
        """Stored bits per element: element bits plus the share of block scales and selectors. Sparse compensation of
        clamped elements and singular vectors are not counted."""
        if isinstance(self.element, str) and self.element in PLAIN:
            return PLAIN[self.element]
        scales = scale_bits(self.scale) * (2 if self.scaling == "split" else 1)
        scales += 1 if self.adapt == "dialects" else 0  # 4 bits of selector, and 5 of exponent are enough
        bits = element_format(self.element).bits + scales / (block_elements(self.block) or math.inf)
        bits += 8 / MACRO_BLOCK if self.scaling == "macro" else 0
        bits += {"segment": 32 / MACRO_BLOCK, "tile": 32 / (block_elements(self.block) or 1)}.get(self.factors_over, 0)
        return bits * self.encodings

    def canonical(self) -> Quantizer:
        """The one spelling of all quantizers that compute the same: what has no effect is set to its default."""
        return _canonical(self)

    def evaluated(self) -> Quantizer:
        """The same, canonical, with elements and scales that are rounded by chance rounded to nearest: what inference
        has. Rules are about training, and it may break one of them (MS-EDEN's)."""
        changes: dict[str, object] = {}
        if isinstance(self.rounding, Stochastic):
            changes["rounding"] = Nearest()
        if isinstance(self.scale, FloatScale) and self.scale.rounding == "stochastic":
            changes["scale"] = msgspec.structs.replace(self.scale, rounding="nearest")
        return (msgspec.structs.replace(self, **changes) if changes else self).canonical()

    def label(self) -> str:
        """A short name for people: the dict name where there is one, else the format's label and its modifier."""
        q = self.canonical()
        return NAMES_OF.get(q) or " ".join(filter(None, (q.format_label(), q.modifier_label())))

    def format_label(self) -> str:
        """The stored format in words: the label without range, adaption, rounding and outliers."""
        return _format_label(self.canonical())

    def modifier_label(self) -> str:
        """Range, adaption, rounding and outliers in words: empty, `SR`, `16/17`, `16/17 SR` …."""
        q = self.canonical()
        words = [word for word in (q.range, q.adapt) if word not in ("full", "none")]
        own = isinstance(q.scale, E6M2) and isinstance(q.rounding, Nearest)  # HiFloat4's ties are part of the format
        return " ".join(filter(None, [*words, "" if own else rounding_words(q.rounding), outlier_words(q.outliers)]))


QUANTIZERS: dict[str, Quantizer] = {}
"""Name -> quantizer; quantizers.py lists them."""
NAMES_OF: dict[Quantizer, str] = {}
"""Canonical quantizer -> its name, the first if there are several."""

MACRO_BLOCK = 128
"""Elements that share a macro-block factor, or the factor of a segment."""


ONE_BLOCKS: dict[str, int | str] = {"tensor": "tensor", "row": "row", "segment": MACRO_BLOCK}
"""Unit with a factor of its own -> the block of a quantizer without block scales, whichever it was given."""


@lru_cache(maxsize=4096)
def _methods(q: Quantizer) -> tuple[str, ...]:
    if q.is_plain:
        return ()
    special = {
        "table": isinstance(q.element, TableElement),
        "hif4": isinstance(q.scale, E6M2),
        "radix4": q.element in ("radix4", "radix4-odd"),
        q.arithmetic: q.arithmetic != "fp32",
        q.scaling: q.scaling != "amax",
        q.adapt: q.adapt in ("if4", "mixfp4", "razer", "dialects"),
    }
    return tuple(name for name, is_so in special.items() if is_so)


@lru_cache(maxsize=4096)
def _canonical(q: Quantizer) -> Quantizer:
    if q.is_plain:
        return Quantizer(element=q.element)
    if isinstance(q.element, TableElement | FloatElement) and (same := simplest(q.element)) is not q.element:
        q = msgspec.structs.replace(q, element=same)
    if (scale := simplest_scale(q.scale)) is not q.scale:
        q = msgspec.structs.replace(q, scale=scale)
    changes: dict[str, object] = {}
    if q.tensor_scale is not None:
        factor: dict[str, object] = {}
        if q.tensor_scale.target is None:
            encode = isinstance(q.scale, FloatScale) and q.scale.convention == "encode"
            factor["target"] = q.scaled_to.max if encode else default_target(q.scale)
        if q.tensor_scale.amax not in ("held", "history"):
            factor["steps"] = TensorScale().steps
        changes["tensor_scale"] = msgspec.structs.replace(q.tensor_scale, **factor)
    if isinstance(q.scale, One) and q.factors_over in ONE_BLOCKS:
        changes["block"] = ONE_BLOCKS[q.factors_over]
    if isinstance(q.scale, E6M2) and q.rounding == Nearest():
        changes["rounding"] = Nearest(ties="away")
    if isinstance(q.scale, E8M0 | E6M2):
        if q.range == "16/17":
            changes["range"] = "full"  # a power-of-two scale is never rounded down by 1/17: nothing to make room for
        if q.adapt.startswith("4over6"):
            changes["adapt"] = "none"  # it could not represent 1.5 times itself
    if q.element in ("radix4", "radix4-odd") and isinstance(q.rounding, Nearest):
        changes["rounding"] = Nearest()  # its ties go up
    if q.scaling == "quest" and isinstance(q.scale, E8M0):
        changes["scale"] = E8M0()  # the rule concerns maxima
    if q.scaling == "sawb" and isinstance(q.scale, FP32):
        changes["scale"] = FP32()
    return msgspec.structs.replace(q, **changes) if changes else q


BF16 = Quantizer(element="bf16")
"""The one that is shipped as `bf16`: an operand that is rounded to BF16 and nothing else."""


def tile(block: int | str) -> int:
    """Edge of a 2-D tile, or 0."""
    return int(block.split("x")[0]) if isinstance(block, str) and "x" in block else 0


def block_elements(block: int | str) -> int | None:
    """Elements that share a scale; None where that depends on the tensor."""
    if isinstance(block, int):
        return block
    return tile(block) ** 2 or None


def block_name(block: int | str) -> str:
    """`1x16`, `16x16`, `row`, `tensor`."""
    return f"1x{block}" if isinstance(block, int) else block


@lru_cache(maxsize=4096)
def _format_label(q: Quantizer) -> str:
    q = msgspec.structs.replace(q, rounding=Nearest(), range="full", adapt="none", outliers=None).canonical()
    if name := NAMES_OF.get(q):
        return name
    words = [element_name(q.element), block_name(q.block), scale_name(q.scale)]
    if q.tensor_scale is not None:
        policy = q.tensor_scale.policy.removeprefix("current")
        words.append(" ".join([f"T{q.tensor_scale.target:g}", *policy.split()]))
    words += [word for word in (q.scaling, q.arithmetic) if word not in ("amax", "fp32")]
    return " ".join(words)
