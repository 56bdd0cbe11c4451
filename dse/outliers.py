"""Treatments of the large elements of an operand, as data: a second quantizer for the error, or clamping."""

from __future__ import annotations

from typing import Annotated

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


Outliers = Residual | Clamp | None
OUTLIER_NAMES: dict[str, Residual | Clamp | None] = {
    "none": None,
    "residual": Residual(),
    "occ": Clamp(),
    "clamp": Clamp(compensate=False),
}


def outlier_words(outliers: Residual | Clamp | None) -> str:
    """`residual`, `occ`, `clamp`, with the number that is not the default; empty for None."""
    if outliers is None:
        return ""
    if name := name_in(OUTLIER_NAMES, outliers):
        return name
    if isinstance(outliers, Residual):
        return f"residual{outliers.alpha:g}"
    return f"{'occ' if outliers.compensate else 'clamp'}{outliers.quantile:g}"
