"""Gradient estimators of the forward quantizers, as data. kernels/quant/spec/estimators.py computes it.

For x̂ = s · Q(x/s) with z = x/s, the gradient of x is that of x̂ times a surrogate of Q'(z), plus a term for the scale's
own dependence on x, with a surrogate of the derivative of its rounding. What STE, the default, does: one, no such term.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fp4dse.dse.record import Part, Positive, name_or_numbers
from fp4dse.dse.scale import E8M0, FP32, Scale


class STE(Part, frozen=True, tag_field="kind", tag="ste"):
    """Straight through: 1."""


class Clipped(Part, frozen=True, tag_field="kind", tag="clipped"):
    """1 where |z| is at most the largest element, else 0."""


class DGE(Part, frozen=True, tag_field="kind", tag="dge"):
    """min(cap, |t|^(1/k - 1) / k), t in [-1, 1] the position in the interval of the grid, 0 outside (2501.17116)."""

    k: Positive = 5.0
    cap: Positive = 3.0


class PowerLaw(Part, frozen=True, tag_field="kind", tag="power-law"):
    """(δ/2) |z - c|^(1/k - 1) / k, not normalised by the interval's width δ; 0 at its centre c (2509.17791)."""

    k: Positive = 5.0


class Sigmoid(Part, frozen=True, tag_field="kind", tag="sigmoid"):
    """12 σ(1 - σ) / temperature at 12 (z - c) / (δ · temperature), at least `lower` (2509.17791)."""

    temperature: Positive = 0.5
    lower: Positive = 0.5


class Spline(Part, frozen=True, tag_field="kind", tag="spline"):
    """Slope of the interpolant of the hard Q on 40 equispaced knots over the grid, at least `lower` (2509.17791).

    On the grid of a scale, the knots cut each interval into thirds.
    """

    lower: Positive = 0.5


class Trust(Part, frozen=True, tag_field="kind", tag="trust"):
    """1 where |x̂ - x| is at most half the coarsest step of the grid times the scale, else 0 (QuEST, 2502.05003)."""


Relaxation = STE | Clipped | DGE | PowerLaw | Sigmoid | Spline | Trust

RELAXATION_NAMES: dict[str, Relaxation] = {
    "ste": STE(),
    "clipped": Clipped(),
    "dge": DGE(),
    "power-law": PowerLaw(),
    "sigmoid": Sigmoid(),
    "spline": Spline(),
    "trust": Trust(),
}

ScaleRelaxation = STE | Clipped | DGE | PowerLaw | Sigmoid | Spline
"""Of the rounding of a block scale, on the grid of its format. A trust mask is about elements."""
SCALE_RELAXATION_NAMES: dict[str, Relaxation] = {
    name: known for name, known in RELAXATION_NAMES.items() if isinstance(known, ScaleRelaxation)
}


class Through(Part, frozen=True):
    """The way from the gradient of one decoded forward operand to that of the operand.

    element         surrogate derivative of the element rounding
    masked          surrogates count only where |z|, or the scale, is at least the largest of its grid, elsewhere 1:
                    what the released simulator of 2509.17791 does
    scale           the gradient that goes through the block scale. `none`; `diagonal`: of each element through its own
                    dependence, at the block maximum (as the paper); `exact`: of the whole block (one dot product per
                    block), at the block maximum; `softmax-diagonal`, `softmax`: the same with the maximum's weight
                    spread over the block by softmax(80 |x| / amax)
    scale_rounding  surrogate derivative of the scale's rounding, a factor on what `scale` adds (the paper's qGradient)
    """

    element: Relaxation = STE()
    masked: bool = False
    scale: Literal["none", "diagonal", "exact", "softmax-diagonal", "softmax"] = "none"
    scale_rounding: ScaleRelaxation = STE()

    def canonical(self, scale: Scale) -> Through:
        """The same estimator without what has no effect on an operand with such scales.

        Without a gradient through the scale nothing passes through its rounding, and FP32 is not rounded. No float32
        number asks for more than E8M0's largest, so that what acts only there or beyond does nothing. Masking has no
        effect on what is one inside of the grid anyway.
        """
        rounding = self.scale_rounding
        beyond = self.masked or isinstance(rounding, Clipped)
        if self.scale == "none" or isinstance(scale, FP32) or (isinstance(scale, E8M0) and beyond):
            rounding = STE()
        inside = isinstance(self.element, STE | Clipped) and isinstance(rounding, STE | Clipped)
        changed = rounding != self.scale_rounding or (self.masked and inside)
        if not changed:
            return self
        return msgspec.structs.replace(self, masked=self.masked and not inside, scale_rounding=rounding)

    def form(self) -> tuple[str, bool, str, str]:
        """The part that a kernel is compiled for: relaxation of elements, masked, scale gradient, relaxation of the
        scale's rounding; the numbers of relaxations left out."""
        element, rounding = (str(part.__struct_config__.tag) for part in (self.element, self.scale_rounding))
        return element, self.masked, self.scale, rounding

    def label(self) -> str:
        """Empty for STE; `dge`, `dge masked`, `ste exact scale gradient with sigmoid rounding` …."""
        if self == Through():
            return ""
        words = [relaxation_name(self.element)]
        words += ["masked"] if self.masked else []
        words += [f"{self.scale} scale gradient"] if self.scale != "none" else []
        words += [f"with {relaxation_name(self.scale_rounding)} rounding"] if self.scale_rounding != STE() else []
        return " ".join(words)

    def phrase(self) -> str:
        """The same in the label of a recipe: `power-law masked (scale softmax-diagonal sigmoid)`; empty for STE."""
        element = Through(self.element, masked=self.masked).label() or relaxation_name(self.element)
        rounding = "" if self.scale_rounding == STE() else f" {relaxation_name(self.scale_rounding)}"
        return self.label() and (element if self.scale == "none" else f"{element} (scale {self.scale}{rounding})")


class Estimator(Part, frozen=True):
    """The two forward operands."""

    x: Through = Through()
    w: Through = Through()


def relaxation_name(relaxation: Relaxation) -> str:
    """The key in RELAXATION_NAMES, or the kind with its numbers, in full: `dge k7 cap3`."""
    return name_or_numbers(RELAXATION_NAMES, relaxation)
