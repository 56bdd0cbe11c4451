"""The layers, and the share of the steps at the end, in which a recipe's quantizers are off, as data.

A layer, or a stage of the finish, that is precise computes as in the BF16 baseline: every operand rounded once to
BF16, no rotation. Stages that quantize nothing stay as they are.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fp4dse.dse.layers.place import Place
from fp4dse.dse.record import Part

KINDS = ("embedding", "head", "router", "attention")
"""Kinds of layers that a recipe may keep precise as a whole."""


class Precise(Part, frozen=True):
    """Layers that are not quantized.

    embedding, head, router, attention   by kind of place (see place.py); the first three as in the literature
    first, last                          blocks at either end, with all their layers: a number of them or, below 1,
                                         a share of the model's, rounded to the nearest number
    """

    embedding: bool = True
    head: bool = True
    router: bool = True
    attention: bool = False
    first: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    last: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def why(self, place: Place) -> str | None:
        """The field by which a layer at this place is precise, None if it is quantized."""
        if place.kind in KINDS and getattr(self, place.kind):
            return place.kind
        if place.block is None:
            return None
        return at_either_end(place, self.first, self.last)

    def label(self) -> str:
        """The layers in words: `embedding+head+router, first 2, last 0.129`."""
        kinds = "+".join(kind for kind in KINDS if getattr(self, kind))
        ends = [f"{end} {number!r}".removesuffix(".0") for end in ("first", "last") if (number := getattr(self, end))]
        return ", ".join([kinds or "no kind", *ends])


class Finish(Part, frozen=True):
    """The last `share` of the steps, with the products of the `forward` pass, of the `backward` pass, or `all` precise.

    A backward operand that is made from the forward's copy still is: with `backward`, from the quantized one.

    `all-but-weights` is fine-tuning in high precision (FNT of LUQ, 2112.10769): weights stay quantized, x and g are
    BF16, in the rotation of their product. Held-out data go through the whole recipe then, as its users deploy it; else
    as in the last step.
    """

    share: Annotated[float, msgspec.Meta(gt=0)]
    what: Literal["forward", "backward", "all", "all-but-weights"] = "all"

    def first_step(self, steps: int) -> int:
        """The first of `steps` steps that belongs to it."""
        return steps - round(self.share * steps)

    @property
    def stages(self) -> tuple[str, ...]:
        """Those that are precise as a whole."""
        stages: dict[str, tuple[str, ...]] = {
            "forward": ("fprop",),
            "backward": ("dgrad", "wgrad"),
            "all": ("fprop", "dgrad", "wgrad"),
            "all-but-weights": ("wgrad",),
        }
        return stages[self.what]

    @property
    def stages_but_weights(self) -> tuple[str, ...]:
        """Those that are precise but for the weight."""
        return ("fprop", "dgrad") if self.what == "all-but-weights" else ()

    def label(self) -> str:
        return f"last {self.share!r} {self.what}"


def at_either_end(place: Place, first: float, last: float) -> Literal["first", "last"] | None:
    """The end of the model at which a layer within blocks stands: the first or the last so many blocks, or share."""
    assert place.block is not None
    if place.block < _blocks(first, place.blocks):
        return "first"
    return "last" if place.block >= place.blocks - _blocks(last, place.blocks) else None


def _blocks(number: float, blocks: int) -> int:
    return round(number if number >= 1 else number * blocks)
