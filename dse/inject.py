"""Parts of a quantizer's error that are added to the weights of the policy that samples, as data."""

from __future__ import annotations

from typing import Literal, get_args

from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.quantizers import QUANTIZERS
from fp4dse.dse.record import Part, name_in

PARTS = ("scale", "dead", "grid")
"""Of an error, in the order of `has` (kernels/inspection/decompose.py)."""
Parts = Literal["scale", "dead", "grid", "scale+dead", "scale+grid", "dead+grid", "scale+dead+grid"]


class Inject(Part, frozen=True):
    """W + E in place of W, where samples are drawn and held-out problems answered: E is the sum of some of the parts of
    Q(W) - W (2605.20402), so that each can be seen to do what it does alone.

    parts  scale bias, dead zone, grid noise, or two of them; all three are Q(W)
    of     Q: a quantizer whose error has these parts (kernels/inspection/decompose.py)
    """

    parts: Parts = "scale+dead+grid"
    of: Quantizer = QUANTIZERS["mxfp4-rceil"]

    @property
    def has(self) -> tuple[bool, bool, bool]:
        """True for each of PARTS that is in it."""
        words = self.parts.split("+")
        return "scale" in words, "dead" in words, "grid" in words


INJECT_NAMES: dict[str, Inject] = {name: Inject(name) for name in get_args(Parts)}


def inject_name(inject: Inject | None) -> str:
    """The key in INJECT_NAMES, or the parts and the quantizer; `none` for none."""
    if inject is None:
        return "none"
    return name_in(INJECT_NAMES, inject) or f"{inject.parts} of {inject.of.label()}"
