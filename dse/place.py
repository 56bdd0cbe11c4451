"""Where in a model a layer stands: what a recipe can keep in high precision, as data."""

from __future__ import annotations

from typing import Literal

from fp4dse.dse.record import Part

Kind = Literal["linear", "embedding", "head", "attention", "mlp", "router", "conv"]
"""`embedding`: the first product with the input (patches, pixels, times); `head`: the last one; `attention`:
projections of queries, keys, values and output; `linear`: none of the others."""


class Place(Part, frozen=True):
    """Kind of a layer, and its block (0 …) among the model's `blocks`; None outside of blocks."""

    kind: Kind = "linear"
    block: int | None = None
    blocks: int = 0
