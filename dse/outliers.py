"""Treatments of the large elements of an operand, as data: a quantizer for the error, clamping, also to a bound that is
learned, a part of low rank, also one that is trained; and scales that are trained."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fp4dse.dse.record import Part, name_in


class Residual(Part, frozen=True, tag_field="kind", tag="residual"):
    """A second quantizer for the error of the first: x̂ = Q(x) + alpha · Q(x - Q(x)); two products (2605.20402)."""

    alpha: Annotated[float, msgspec.Meta(gt=0)] = 0.5


class Clamp(Part, frozen=True, tag_field="kind", tag="clamp"):
    """x is clamped to its quantiles (1 - quantile, quantile) before it is quantized (OCC, 2501.17116).

    compensate  what was cut off is multiplied, unquantized, with the other operand, unquantized: a sparse product
    """

    quantile: Annotated[float, msgspec.Meta(gt=0)] = 0.99
    compensate: bool = True


class Mean(Part, frozen=True, tag_field="kind", tag="mean"):
    """The mean over tokens is taken off x or g and multiplied apart: x̂ = μ + Q(x - μ) (Averis, 2603.10444).

    A mean that tokens share makes large elements in all of them. It is not quantized, and its product with the other
    operand has rank one.
    """


class LowRank(Part, frozen=True, tag_field="kind", tag="low-rank"):
    """The largest singular components are taken off and multiplied apart: x̂ = Q(U) S Q(V)ᵀ + Q(x - U S Vᵀ) (Metis,
    2509.00404).

    A few directions hold most of a tensor, and in a block they take the range of the others.

    rank        number of components, at most the rows or columns that there are
    iterations  of the subspace, from random vectors on
    vectors     U and V are `quantized` as the operand is, or left in `fp32`
    """

    rank: Annotated[int, msgspec.Meta(ge=1)] = 16
    iterations: Annotated[int, msgspec.Meta(ge=1)] = 2
    vectors: Literal["quantized", "fp32"] = "quantized"

    def count(self, rows: int, columns: int) -> int:
        """The number of components that a tensor [rows, columns] has."""
        return min(self.rank, rows, columns)


class LearnedClip(Part, frozen=True, tag_field="kind", tag="learned-clip"):
    """A forward operand is clamped to [-alpha, alpha], and alpha is trained (PACT, 1805.06085): a parameter of each
    layer. A tensor scale follows it, in place of the largest element.

    start     alpha before the first step; 8 in the common implementations; `max`: the largest of a weight
    decay     of the loss's term decay / 2 · alpha²; the default is what accounts of the paper give for CIFAR-10
    rate      the learning rate of alpha over that of the weights
    gradient  of alpha: PACT's, which counts what is clamped, or LSQ's (1902.08153), that of the scale alpha / largest,
              which counts errors of rounding too
    """

    start: Annotated[float, msgspec.Meta(gt=0)] | Literal["max"] = 8.0
    decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0002
    rate: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    gradient: Literal["pact", "lsq"] = "pact"


class TrainedFactors(Part, frozen=True, tag_field="kind", tag="factors"):
    """The forward weight is a sum of parts that are trained: a part of low rank as factors, which are not quantized,
    and the rest, which is.

    rank    number of components, at most the weight's rows or columns
    start   `largest`: the weight's largest singular components, W = U diag(s) Vᵀ + R (Metis, 2509.00404; with
            `training.trains = "learned"`, QPiSSA, 2404.02948). `zero`: nothing, W + U Vᵀ with U = 0 and V drawn (LoRA,
            2106.09685; over a rounded weight QLoRA, 2305.14314)
    """

    rank: Annotated[int, msgspec.Meta(ge=1)] = 16
    start: Literal["largest", "zero"] = "largest"

    def count(self, rows: int, columns: int) -> int:
        """The number of components that a weight [rows, columns] has."""
        return min(self.rank, rows, columns)


class TrainedScales(Part, frozen=True, tag_field="kind", tag="scales"):
    """The scale of each block of the forward weight is trained, from that of its largest element on (the end-to-end
    training of EfficientQAT, 2407.11062): a parameter for each block."""


Treatment = Residual | Clamp | Mean | LowRank | LearnedClip | TrainedFactors | TrainedScales
Outliers = Residual | Clamp | Mean | LowRank | LearnedClip | TrainedFactors | TrainedScales | None
OUTLIER_NAMES: dict[str, Treatment | None] = {
    "none": None,
    "residual": Residual(),
    "occ": Clamp(),
    "clamp": Clamp(compensate=False),
    "mean": Mean(),
    "low-rank": LowRank(),
    "low-rank-fp32": LowRank(vectors="fp32"),
    "pact": LearnedClip(),
    "lsq": LearnedClip(start="max", decay=0.0, gradient="lsq"),
    "factors": TrainedFactors(),
    "lora": TrainedFactors(start="zero"),
    "scales": TrainedScales(),
}


def outlier_words(outliers: Treatment | None) -> str:
    """`residual`, `occ`, `clamp`, `mean`, `low-rank`, `pact`, `lsq`, `factors`, `lora`, `scales`, with what is not
    the default; empty for None."""
    if outliers is None:
        return ""
    if name := name_in(OUTLIER_NAMES, outliers):
        return name
    if isinstance(outliers, Residual):
        return f"residual{outliers.alpha:g}"
    if isinstance(outliers, LowRank):
        iterations = f"x{outliers.iterations}" if outliers.iterations != LowRank().iterations else ""
        return f"low-rank{outliers.rank}{iterations}{'-fp32' if outliers.vectors == 'fp32' else ''}"
    if isinstance(outliers, TrainedFactors):
        return f"{'lora' if outliers.start == 'zero' else 'factors'}{outliers.rank}"
    if isinstance(outliers, LearnedClip):
        numbers = f"learned-clip start={outliers.start} decay={outliers.decay} rate={outliers.rate}".replace(".0 ", " ")
        return numbers.removesuffix(".0") + (" lsq" if outliers.gradient == "lsq" else "")
    assert isinstance(outliers, Clamp)  # of a mean there is one, which has a name
    return f"{'occ' if outliers.compensate else 'clamp'}{outliers.quantile:g}"


def outlier_layout(outliers: Treatment | None) -> str:
    """The part that fixes tensor shapes and control flow, in words: the kind, and of components how many and how they
    are found; empty for None."""
    if isinstance(outliers, LowRank):
        return f"low-rank {outliers.rank} {outliers.iterations} {outliers.vectors}"
    if isinstance(outliers, TrainedFactors):
        return f"factors {outliers.rank} {outliers.start}"
    return str(outliers.__struct_config__.tag) if outliers else ""
