"""Input channels of a layer that are treated apart, as data: in another format, or with their error besides.

Some channels of the input are large in all tokens, and in a block they take the range of the others. Which ones they
are follows from x alone. A channel is a column of x and of w, so that both operands of the forward product are split
alike: it is the sum of two products, of the channels that are chosen and of the others.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fp4dse.dse.quantizer import Quantizer
from fp4dse.dse.record import Part, name_in
from fp4dse.dse.scale import E8M0


class Chosen(Part, frozen=True):
    """The channels that are meant: a share of all, rounded half up, at least one and never all.

    by     statistic of a channel over the rows of x, of which the largest are chosen: its `norm` (root of the sum of
           squares), `amax` or `mean` (mean magnitude); or `error`, the mean magnitudes of both operands' errors, added
           (HCP, 2602.02047), of channels that are corrected: these stay in their places. Of equals the first
    steps  they are chosen anew in every so many steps, and held between
    """

    share: Annotated[float, msgspec.Meta(gt=0)] = 0.1
    by: Literal["norm", "amax", "mean", "error"] = "norm"
    steps: Annotated[float, msgspec.Meta(gt=0)] = 1.0

    def count(self, channels: int) -> int:
        """The number that are chosen among so many; none of a single one."""
        return min(max(1, int(self.share * channels + 0.5)), channels - 1)

    @property
    def choice(self) -> str:
        """The choice in words: `10% by norm`, `5% by amax every 50`."""
        every = f" every {self.steps:g}" if self.steps != 1 else ""
        return f"{100 * self.share:g}% by {self.by}{every}"


class Held(Chosen, frozen=True, tag_field="kind", tag="held"):
    """Both operands are in another format on these channels, unless they are plain (OutControl, 2510.27527).

    wgrad  the columns of the weight's gradient that belong to these channels are a product in that format, too, which
           is not rotated
    """

    format: Quantizer = Quantizer(element="e4m3", block=32, scale=E8M0())
    wgrad: bool = True


class Corrected(Chosen, frozen=True, tag_field="kind", tag="corrected"):
    """The error of an operand's quantizer on these channels is quantized by it once more, and multiplied with the other
    operand: channels appended to the contraction.

    of  `x`: the error of x (ARCQuant, 2601.07475). `both`: also that of w, without the product of the two errors (HCP,
        2602.02047)
    """

    of: Literal["x", "both"] = "x"


Channels = Held | Corrected | None
CHANNEL_NAMES: dict[str, Held | Corrected | None] = {
    "none": None,
    "outcontrol": Held(format=Quantizer(element="e4m3", block=32, scale=E8M0(rule="rceil")), steps=50.0),
    "arc": Corrected(share=0.0625, by="amax", steps=1000.0),
    "hcp": Corrected(share=0.0625, by="error", steps=50.0, of="both"),
}


def channels_name(channels: Held | Corrected | None) -> str:
    """`outcontrol`, `arc`, `hcp`, or the choice with what is done: `held 10% by norm in mxfp8`; `none` for None."""
    if channels is None:
        return "none"
    if name := name_in(CHANNEL_NAMES, channels):
        return name
    if isinstance(channels, Corrected):
        return f"error of {channels.of} on {channels.choice}"
    return f"{channels.choice} in {channels.format.label()}{'' if channels.wgrad else ', not in wgrad'}"
